"""A fork of this process that calls a function: for many runs that need the same imports, which take seconds.

This process must not have initialised CUDA or started a thread of PyTorch's, because neither works in a fork.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from lockstep.run import lifetime


class Fork:
    """Like subprocess.Popen, for a function that a fork of this process calls; has `pid` and `returncode`."""

    def __init__(self, function: Callable[[], None], variables: dict[str, str], log=None, new_session: bool = False):
        sys.stdout.flush(), sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _call(function, variables, log, new_session)

    def poll(self) -> int | None:
        self._wait(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        self._wait(0)
        return self.returncode

    def _wait(self, options: int) -> None:
        if self.returncode is not None:
            return
        with contextlib.suppress(ChildProcessError):  # it was collected elsewhere
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            return
        self.returncode = 1


def _call(function: Callable[[], None], variables: dict[str, str], log, new_session: bool) -> None:
    """Called in the fork: detach from the parent, call the function, and end."""
    code = 1
    try:
        lifetime.die_with_parent()
        if new_session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        lifetime.let_go()
        if log is not None:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(variables)
        function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
