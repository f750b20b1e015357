"""The two ways a command can end badly, and how it says so."""

import sys


class BadInput(Exception):
    """The user's input is wrong: says what, where, and what to do, in one or two lines. Exit code 2."""


class RunFailed(Exception):
    """A run was started and did not succeed. Exit code 1."""


class RunStopped(RunFailed):
    """A run did not succeed because somebody ended it: nothing that would go on without it should."""


def exit_code(main, *arguments) -> int:
    """Run a command's `main`; turn its expected errors into one message on stderr and an exit code."""
    try:
        return main(*arguments) or 0
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
