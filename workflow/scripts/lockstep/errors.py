"""The exceptions of commands, and how they become messages and exit codes."""

import contextlib
import errno
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Iterable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full, or a quota or the largest file size is reached
NOT_OURS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
# torch.save's errors for an incompletely written file; they do not contain the system's error.
UNWRITTEN = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed writing", re.DOTALL)
SHOWN = 10  # how many names a message lists
LONGEST = 200  # how many characters of each
MAKE_ROOM = "Make room, and start again."


class BadInput(Exception):
    """The user's input is wrong. The message says what, where, and what to do, in one or two lines. Exit code 2."""


class RunFailed(Exception):
    """A run was started, but did not succeed. Exit code 1."""


class OtherWork(RunFailed):
    """A run trained other samples than its plan's, or other weights."""


class RunStopped(RunFailed):
    """A run was ended by somebody, so whatever would continue after a failed run must end, too."""


class RunSaved(RunStopped):
    """A run was stopped after it saved its state; the same command resumes it. Exit code 143, as for SIGTERM."""


COLUMNS = 80  # of a terminal that does not tell its size, as one that a container is given


def printable(text: str) -> str:
    """`text` in one line, without control characters, which could control the terminal."""
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "" for letter in text)


def wrapped(text: str, columns: int) -> str:
    """`text` in lines of at most `columns` characters, broken between words; a terminal would break within words."""
    options = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return "\n".join("\n".join(textwrap.wrap(line, columns, **options)) for line in text.split("\n"))


def tell(text: str, stream=None, bad: bool = False) -> None:
    """Print `text` on `stream` (stdout); in a terminal by whole words, and in red where it says what went badly."""
    stream = stream or sys.stdout
    if stream.isatty():
        columns = os.get_terminal_size(stream.fileno()).columns
        text = wrapped(text, columns or COLUMNS)
        if bad and "NO_COLOR" not in os.environ and os.environ.get("TERM") not in (None, "", "dumb"):
            text = f"\x1b[31m{text}\x1b[0m"
    print(text, file=stream, flush=True)


def brief(error: Exception) -> str:
    """A library's error about an unreadable file, in one line."""
    if isinstance(error, pickle.UnpicklingError):  # PyTorch's message would say how to load it unsafely
        return "it holds more than values, and is not read, because a pickle may run anything"
    return " ".join(str(error).split())[:300] or type(error).__name__


def no_room(error: BaseException) -> str | None:
    """The system's message if an error means a full disk, otherwise None. Libraries quote the error's number."""
    if UNWRITTEN.search(str(error)):
        return "not all of it was written, as where the disk is full"
    said = re.search(r"(?:Errno |os error )(\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(said[1]) if said else None
    return os.strerror(number) if number in FULL else None


@contextlib.contextmanager
def exit_on_bad_input():
    """End the program with one message and exit code 2 if the block, or the decorated function, raises BadInput.

    It is for code that Snakemake runs, which would print a traceback.
    """
    try:
        yield
    except BadInput as error:
        tell(f"error: {error}", sys.stderr, bad=True)
        sys.exit(2)


def exit_code(main, *arguments) -> int:
    """Run a command's `main`, and turn expected errors into a message on stderr and an exit code."""
    try:
        return main(*arguments) or 0
    except BadInput as error:
        tell(f"error: {error}", sys.stderr, bad=True)
        return 2
    except RunSaved as error:
        tell(f"stopped: {error}", sys.stderr)
        return 143
    except RunFailed as error:
        tell(f"failed: {error}", sys.stderr, bad=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        if why := no_room(error):
            full = getattr(error, "filename", None) or "a file"
            tell(f"failed: {full}: {why}. {MAKE_ROOM}", sys.stderr, bad=True)
            return 1
        if isinstance(error, OSError) and error.errno in NOT_OURS and error.filename:
            tell(f"error: {error.filename}: {error.strerror}. Name a folder that can be written.", sys.stderr, bad=True)
            return 2
        raise


def shortened(value) -> str:
    return repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}..."


def in_weights(differing: int, weights: int, nearest: str) -> str:
    """In how many of a model's weights something differs, and which of them is nearest to the loss."""
    return f"{differing} of {weights} weights{', the nearest to the loss is' if differing > 1 else ':'} {nearest}"


def listed(names: Iterable[str], separator: str = ", ", most: int = SHOWN) -> str:
    """The first `most` names, each cut after LONGEST characters, and the number of further ones."""
    names = [name if len(name) <= LONGEST else f"{name[:LONGEST]}..." for name in names]
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
