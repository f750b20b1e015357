"""Ranks that a person starts by hand, each in its own terminal, with PyTorch's `env://` (a row's `launcher: hand`).

The run's supervisor prints a command line for each rank, and waits until all of them are started (`called`), before the
run and its clock begin. The process that a line starts (rank/by_hand.py) checks its environment against the call, waits
for the others, and then runs the rank and shows its output in the terminal.

They meet in a folder of the run. The supervisor holds the kernel's lock (flock(2)) on the call in this folder for as
long as the run lasts, so no rank outlives the run, however that ends. Likewise, the process of each rank holds a lock
on a file of its own.

    python -m lockstep.run.hand FOLDER   (the launcher: it lets the ranks begin, and ends when they have ended)
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

from lockstep import paths
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, write_json
from lockstep.run import lifetime
from lockstep.run.addresses import Rendezvous
from lockstep.run.processes import Interrupted
from lockstep.run.progress import LAUNCHED

POLL = 0.1  # seconds
# Variables of the launcher's own environment that it passes on, besides those in the call.
OF_LAUNCHER = ("TMPDIR", LAUNCHED, lifetime.SUPERVISOR)


def call_file(run: Path) -> Path:
    """The call: where the ranks of a run by hand meet, how many there are, and the variables for all of them."""
    return run / paths.HAND / "call.json"


def go_file(run: Path) -> Path:
    """Written when all ranks have been started: the variables that the launcher adds."""
    return run / paths.HAND / "go.json"


def rank_file(run: Path, rank: int) -> Path:
    """Locked by the process that runs this rank; holds its process id."""
    return run / paths.HAND / str(rank)


def ended_file(run: Path) -> Path:
    """Which rank was first ended from outside, and how; written by the process that ran it."""
    return run / paths.HAND / "ended.json"


def ended(run: Path) -> str:
    """How the first rank that was ended from outside has ended; empty if there is none."""
    file = ended_file(run)
    return read_json(file)["reason"] if file.is_file() else ""


def lines(ranks: int, folder: Path, rendezvous: Rendezvous) -> list[str]:
    """The shell command that starts each rank, from any folder."""
    command = [os.path.abspath(sys.executable), str(paths.TRAIN), "--by-hand", str(folder.absolute())]
    alike = f"MASTER_ADDR={rendezvous.address} MASTER_PORT={rendezvous.port} WORLD_SIZE={ranks}"  # for all ranks
    return [f"{alike} RANK={rank} {shlex.join(command)}" for rank in range(ranks)]


@contextlib.contextmanager
def called(row: Row, folder: Path, rendezvous: Rendezvous, variables: dict[str, str], log: TextIO):
    """Have somebody start this run's ranks: they are running when the block begins, and have ended after it.

    The value is the list of process ids that run them; it is empty, without waiting, if the row has another launcher.
    Raises BadInput if the port where they meet is in use, and RunFailed if a rank is not started within
    `hardware.timeout`.
    """
    if not row.launcher.by_hand:
        yield []
        return
    ranks = row.hardware.processes
    call_file(folder).parent.mkdir()
    about = {"ranks": ranks, "address": rendezvous.address, "port": rendezvous.port, "folder": os.getcwd()}
    try:
        with _locked(call_file(folder), about | {"variables": variables}):
            _await(row, folder, rendezvous, log)
            yield [read_json(rank_file(folder, rank))["pid"] for rank in range(ranks)]
    finally:
        _see_off(folder, ranks)


@contextlib.contextmanager
def _locked(file: Path, content: dict):
    """A file that is locked from its creation until the block ends."""
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        json.dump(content, stream)
        stream.flush()
        unfinished.replace(file)
        yield


def _await(row: Row, folder: Path, rendezvous: Rendezvous, log: TextIO) -> None:
    ranks, timeout = row.hardware.processes, row.hardware.timeout

    def say(*told: str) -> None:
        for stream in (sys.stderr, log):  # stderr reaches the terminal under Snakemake's view too
            with contextlib.suppress(OSError):  # its reader or the terminal is gone
                print(*told, sep="\n", file=stream, flush=True)

    there, changed = set(), time.monotonic()
    with _kept_free(rendezvous):
        say(
            f"{row.name}: start its ranks by hand, each by its line in a terminal of its own on this machine. The run"
            f" waits {timeout:g} s (hardware.timeout) for the first one and for each further one, and then fails.",
            *lines(ranks, folder, rendezvous),
        )
        while len(there) < ranks:
            time.sleep(POLL)
            if lifetime.starter_is_gone():
                raise Interrupted("Snakemake, which had started the run, was ended")
            now = {rank for rank in range(ranks) if is_locked(rank_file(folder, rank))}
            missing = named(set(range(ranks)) - now)
            if now != there:
                news = [f"{named(now - there)} came"] if now - there else []
                news += [f"{named(there - now)} left again"] if there - now else []
                say(f"{row.name}: {', '.join(news)}; " + (f"{missing} still missing" if missing else "all are there"))
                there, changed = now, time.monotonic()
            elif time.monotonic() - changed > timeout:
                raise RunFailed(
                    f"{missing} of {ranks} was not started by hand within {timeout:g} s (hardware.timeout). Start the"
                    " run again, and paste each line that it prints then into a terminal"
                )


def _kept_free(rendezvous: Rendezvous) -> socket.socket:
    """Occupy the port where the ranks will meet, so that nobody else takes it during the wait."""
    try:
        return socket.create_server((rendezvous.address, rendezvous.port))
    except OSError as error:
        raise BadInput(
            f"hardware.port: {rendezvous.port} can't be used: {error.strerror}. Start again, or set another."
        ) from None


def _see_off(folder: Path, ranks: int) -> None:
    """Wait until the processes of all ranks have ended, as they do when the call is unlocked; kill late ones."""
    deadline = time.monotonic() + lifetime.GRACE_SECONDS + 1
    while running := [rank for rank in range(ranks) if is_locked(rank_file(folder, rank))]:
        if time.monotonic() > deadline:
            for rank in running:
                with contextlib.suppress(OSError):
                    os.kill(read_json(rank_file(folder, rank))["pid"], signal.SIGKILL)
        time.sleep(POLL)


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock on a file."""
    with contextlib.suppress(FileNotFoundError), file.open(encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def named(ranks: set[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks))


def launch(folder: Path) -> int:
    """Let the ranks begin. Returns 0 when all have finished, or 1 as soon as one has ended without a result."""
    call = read_json(call_file(folder))
    handed_on = {name: os.environ[name] for name in (*call["variables"], *OF_LAUNCHER) if name in os.environ}
    write_json(go_file(folder), handed_on)
    running = set(range(call["ranks"]))
    while running:
        time.sleep(POLL)
        ended = {rank for rank in running if not is_locked(rank_file(folder, rank))}
        if not all(paths.rank_summary(folder, rank).is_file() for rank in ended):
            return 1
        running -= ended
    return 0


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1])))
