"""What limits a run's lifetime: its folder, which belongs to one run at a time, and the Snakemake that started it.

The run's supervisor (such as the process of launch.py) holds the kernel's lock (flock(2)) on a file in the folder. The
lock is released when the supervisor ends, however that happens. The run's ranks wait for this lock, and end when they
get it. This is needed because launchers between them (config/launchers.py), such as DeepSpeed's or Horovod's, outlive
their own parent and keep their ranks running.
"""

import contextlib
import ctypes
import datetime
import fcntl
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from lockstep.errors import BadInput
from lockstep.files import hash_text
from lockstep.paths import LOCK

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_SECONDS = 3  # between SIGTERM and SIGKILL for a run's processes
# A run that is being ended holds its folder until its processes have ended; the next run waits for that.
LOCK_TIMEOUT_SECONDS = GRACE_SECONDS + 2
# Environment variables: the supervisor's process id, for its ranks; and the Snakemake that started it, if any.
SUPERVISOR, STARTER, SESSION = "LOCKSTEP_SUPERVISOR", "LOCKSTEP_STARTER", "LOCKSTEP_SESSION"

libc = ctypes.CDLL(None, use_errno=True)

_held: dict[Path, TextIO] = {}  # each held folder's locked file


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def hold(folder: Path):
    """Keep other processes out of `folder` while the block runs; blocks of one process may be nested.

    Raises BadInput if another process holds the folder.
    """
    resolved = folder.resolve()
    if resolved in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as stream:
        _lock(stream, folder)
        stream.truncate(0)
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        json.dump({"pid": os.getpid(), "host": platform.node(), "since": now}, stream)
        stream.flush()
        _held[resolved] = stream
        try:
            yield
        finally:
            _held.pop(resolved, None)


def let_go() -> None:
    """Called in a fork: close the parent's locked files, which would otherwise stay locked after the parent's end."""
    for stream in _held.values():
        os.close(stream.fileno())
    _held.clear()


def refuse_held(folders: list[Path]) -> None:
    """Raises BadInput if another process holds one of `folders`."""
    for folder in folders:
        with (folder / LOCK).open(encoding="utf-8") as stream:  # read-only, as it may be another user's
            _lock(stream, folder, fcntl.LOCK_SH)


def _lock(stream, folder: Path, kind: int = fcntl.LOCK_EX) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            return fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BadInput(f"{folder}: {_who(_holder(stream))}") from None
            time.sleep(0.1)
        except OSError as error:  # a network file system may have no locks
            warning = (
                f"{stream.name}: can't be locked ({error.strerror}); make sure that no second run uses this folder"
            )
            return print(warning, file=sys.stderr)


def refuse_without_locks(folder: Path, name: str) -> None:
    """Raises BadInput if a held folder's lock, held here or on another node, can be acquired a second time.

    Then the ranks of the row `name` can't meet in a file there: PyTorch's FileStore locks the file (flock(2)) for each
    message. Without locks ranks overwrite each other's messages, and wait forever for those that are lost.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as stream:  # NFS locks only files that are open for writing
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            why = f"can't lock files ({error.strerror})"
        else:
            why = f"lets two processes lock one file at the same time, as {platform.node()} found"
    raise BadInput(
        f"rows.{name}: its ranks would meet through a file in {folder}, whose file system {why}, so they"
        " could wait for each other forever. Set rendezvous: tcp in the row, or put the results on another file system."
    )


def _holder(stream) -> dict:
    """What the last holder of the lock on `stream` wrote into it; empty if it has not written yet."""
    stream.seek(0)
    try:
        return json.load(stream)
    except ValueError:
        return {}


def _who(holder: dict) -> str:
    if not holder:
        return "another process works here. Wait for it, or end it."
    who = f"process {holder['pid']}" + (f" on {holder['host']}" if holder["host"] != platform.node() else "")
    return f"{who} has worked here since {holder['since']}. Wait for it, or end it: kill {holder['pid']}"


def end_with_holder(folder: Path) -> None:
    """Have this rank killed as soon as its supervisor no longer holds `folder`.

    A thread sleeps in the kernel until then. If this rank started late, another process may hold the folder already;
    then it is killed at once.
    """

    def wait() -> None:
        with contextlib.suppress(OSError), (folder / LOCK).open(encoding="utf-8") as stream:
            if _holder(stream).get("pid") == supervisor:
                fcntl.flock(stream, fcntl.LOCK_SH)  # raises, without a kill, if the file system has no locks
            os.kill(os.getpid(), signal.SIGKILL)

    if supervisor := int(os.environ.get(SUPERVISOR, 0)):
        threading.Thread(target=wait, daemon=True).start()


def name_starter(submitted: bool = False) -> None:
    """Name this process as the starter to all processes that it starts, including those in Apptainer's containers.

    submitted: whether another Snakemake submitted this one to a cluster; then the session is that one's.
    """
    named = f"{_namespace()} {os.getpid()} {_began(os.getpid())}"
    of_session = os.environ.get(SESSION, named) if submitted else named
    for name, value in ((STARTER, named), (SESSION, of_session)):
        os.environ |= {name: value, f"APPTAINERENV_{name}": value}


def session_name() -> str:
    """A name for what started this process: its Snakemake or, if it was started by hand, its terminal or script.

    Records keep it as `session`. Runs of different sessions are usually hours apart, on a machine that has changed.
    """
    leader = os.getsid(0)
    named = os.environ.get(SESSION) or f"{_namespace()} {leader} {_began(leader)}"
    return hash_text(named)[:12]


def starter_is_gone() -> bool:
    """Whether the Snakemake that started this process has ended. The parent can't tell it: Bash is between them.

    False if started by hand, or inside a container with its own process ids.
    """
    named = os.environ.get(STARTER)
    if not named:
        return False
    namespace, pid, began = named.split()
    return namespace == _namespace() and _began(int(pid)) != began


def boot() -> str:
    """Names this machine since its last boot, from which all its processes count time; empty if unknown."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else ""


def _namespace() -> str:
    """Names the scope of a process id: a machine since its last boot, and a namespace of pid_namespaces(7) on it."""
    try:
        return f"{boot()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the kernel's start (proc_pid_stat(5)); None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
