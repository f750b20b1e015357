"""The process of one rank, around its training (rank/session.py): signals, the reason of a failure, the exit code."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from lockstep import paths
from lockstep.errors import RunFailed
from lockstep.files import remove_unfinished
from lockstep.rank.session import Session
from lockstep.run import lifetime
from lockstep.run.progress import RankFiles

TRIES = 25  # attempts to write why a rank failed, one every 0.2 s


def main(folder: Path, kind: type[Session] = Session) -> None:
    """Train this process's share of the run in `folder`, in a session of this kind. Does not return.

    The process ends by os._exit: with gloo, PyTorch 2.13's DDP sometimes hangs or aborts while the interpreter exits,
    after all work is done. So everything is written and flushed first, and the files say how the run went.
    """
    lifetime.die_with_parent()
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, _end)
    code = 1
    try:
        code = run(folder, kind)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(folder: Path, kind: type[Session] = Session) -> int:
    """Train this process's share of the run in `folder`; returns the exit code, and has written why it failed.

    It ends with the run's supervisor, but handles no signal: a framework may call it in a thread of its own process.
    """
    files = RankFiles(folder, int(os.environ.get("RANK", 0)))
    lifetime.end_with_holder(paths.node_folder(folder, files.node))
    session = None
    try:
        session = kind(folder, files)
        session.strategy.lead(session)
        session.stop()
    except BaseException as error:  # not only Exception, because DCP's CheckpointException is not one
        if threading.current_thread() is threading.main_thread():
            # The launcher may send it now, but the reason must be written.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        progress = session and session.progress
        _write_reason(folder, files, error, progress.steps if progress else 0)
        print(f"rank {files.rank} failed:", file=sys.stderr)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _write_reason(folder: Path, files: RankFiles, error: BaseException, step: int) -> None:
    """Write why this rank failed, even when the disk is full.

    Another rank may first use the space that this one freed. That rank then fails and frees it too, so this one tries
    again for five seconds, in which the launcher must not end it.
    """
    for _ in range(TRIES):
        try:
            remove_unfinished(folder)
            files.write_error(error, step)
        except (RunFailed, OSError):
            time.sleep(0.2)
        else:
            return


def _end(number, frame):
    """Report the signal. A launcher ends the other ranks when one dies; this tells them from the rank that died."""
    closed = ", which closing the terminal sends" if number == signal.SIGHUP else ""
    raise RunFailed(f"was ended by {signal.Signals(number).name}{closed}")
