"""What a run is tied to: its folder, which is one run's at a time, and the Snakemake that started it.

The run's supervisor (the process of launch.py, say) holds the kernel's lock (flock(2)) on a file in the folder, which
goes when the supervisor goes, however that ends. The run's ranks wait for that lock, and go then too: launchers between
them (config/launchers.py), such as DeepSpeed's or Horovod's, outlive their own parent and keep their ranks.
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
GRACE_SECONDS = 3  # between SIGTERM and SIGKILL, for a run's processes
# A run that is being ended holds its folder until its processes are gone, and the next one waits for that.
LOCK_TIMEOUT_SECONDS = GRACE_SECONDS + 2
# Environment variables: the process id of the supervisor, for its ranks; which Snakemake started it, unless by hand.
SUPERVISOR, STARTER, SESSION = "LOCKSTEP_SUPERVISOR", "LOCKSTEP_STARTER", "LOCKSTEP_SESSION"

libc = ctypes.CDLL(None, use_errno=True)

_held: dict[Path, TextIO] = {}  # folders, with the file of each that is locked


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def hold(folder: Path):
    """Keep other processes out of `folder` while the block runs; blocks of this process may be one inside the other.

    Raises BadInput where another process holds it.
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
    """In a fork: hold nothing of what its parent holds, which would stay locked when the parent has ended."""
    for stream in _held.values():
        os.close(stream.fileno())
    _held.clear()


def refuse_held(folders: list[Path]) -> None:
    """Raises BadInput where another process holds one of `folders`."""
    for folder in folders:
        with (folder / LOCK).open(encoding="utf-8") as stream:  # which may be somebody else's, to read only
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
        except OSError as error:  # a network's file system may have none
            warning = (
                f"{stream.name}: can't be locked ({error.strerror}); see to it that no second run uses this folder"
            )
            return print(warning, file=sys.stderr)


def refuse_without_locks(folder: Path, name: str) -> None:
    """Raises BadInput where the lock of a folder that is held, here or on another node, can be had a second time.

    Then the ranks of the row `name` can't meet in a file there: PyTorch's FileStore locks it (flock(2)) for each thing
    that they tell each other, and without that they write over each other's words, and wait for ever for what is lost.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as stream:  # NFS locks only what may be written
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            why = f"can't lock files ({error.strerror})"
        else:
            why = f"lets two lock one file at a time, as {platform.node()} found"
    raise BadInput(
        f"rows.{name}: its ranks would meet through a file in {folder}, whose file system {why}, so that they could"
        " wait for each other for ever. Set rendezvous: tcp in the row, or have the results on another file system."
    )


def _holder(stream) -> dict:
    """What the last one to hold the lock on `stream` wrote there; nothing, if it is about to."""
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
    """Have this rank killed as soon as its supervisor does not hold `folder` any more.

    By a thread that sleeps in the kernel until then. Where this rank was slow to come, another may hold it by now.
    """

    def wait() -> None:
        with contextlib.suppress(OSError), (folder / LOCK).open(encoding="utf-8") as stream:
            if _holder(stream).get("pid") == supervisor:
                fcntl.flock(stream, fcntl.LOCK_SH)  # a network's file system may have none: then it is not ended so
            os.kill(os.getpid(), signal.SIGKILL)

    if supervisor := int(os.environ.get(SUPERVISOR, 0)):
        threading.Thread(target=wait, daemon=True).start()


def name_starter(submitted: bool = False) -> None:
    """Tell all that this process starts, also in Apptainer's containers, that this is what started it.

    submitted: whether another Snakemake submitted this one to a cluster; then the session is that one's.
    """
    named = f"{_namespace()} {os.getpid()} {_began(os.getpid())}"
    of_session = os.environ.get(SESSION, named) if submitted else named
    for name, value in ((STARTER, named), (SESSION, of_session)):
        os.environ |= {name: value, f"APPTAINERENV_{name}": value}


def session() -> str:
    """A name for what started this process: the Snakemake that did; by hand, all that one terminal (or script) starts.

    Runs of other sessions lie hours apart as a rule, when the machine is not what it was.
    """
    leader = os.getsid(0)
    named = os.environ.get(SESSION) or f"{_namespace()} {leader} {_began(leader)}"
    return hash_text(named)[:12]


def starter_is_gone() -> bool:
    """Whether the Snakemake that started this process has ended, which nothing else would tell: Bash is between them.

    Not so where none did, as by hand; nor where its process id says nothing, as in a container that has its own.
    """
    named = os.environ.get(STARTER)
    if not named:
        return False
    namespace, pid, began = named.split()
    return namespace == _namespace() and _began(int(pid)) != began


def _namespace() -> str:
    """In which process ids mean the same: a machine since it was started, and there one of pid_namespaces(7)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip() if boot.is_file() else ''}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks since it started (proc_pid_stat(5)); None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
