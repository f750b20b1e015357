"""Ranks that a person starts, each in a terminal of its own, as PyTorch's `env://` has it (a row's `launcher: hand`).

The run's supervisor prints a line for each rank, and waits until all of them are started (`called`). That comes before
the run, and no clock counts it. What a line starts (rank/by_hand.py) holds what it was given against the call, waits
for the others, and then runs the rank, whose words it shows in its terminal.

They meet in a folder of the run. On the call in it the supervisor holds the kernel's lock (flock(2)) for as long as the
run lasts: so no rank outlives it, however it ends. What runs a rank likewise holds one on a file of its own.

    python -m lockstep.run.hand FOLDER   (the launcher: it says that the ranks may begin, and ends when they have ended)
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
# What the launcher hands on of its own environment, besides the variables in the call.
OF_LAUNCHER = ("TMPDIR", LAUNCHED, lifetime.SUPERVISOR)


def call_file(run: Path) -> Path:
    """What the ranks of a run by hand must know: where they meet, how many they are, and variables for all of them."""
    return run / paths.HAND / "call.json"


def go_file(run: Path) -> Path:
    """Written when all ranks are there: the variables that the launcher adds."""
    return run / paths.HAND / "go.json"


def rank_file(run: Path, rank: int) -> Path:
    """Locked by the process that runs this rank, whose id is in it."""
    return run / paths.HAND / str(rank)


def ended_file(run: Path) -> Path:
    """Which rank somebody ended first, and how: written by what ran it."""
    return run / paths.HAND / "ended.json"


def ended(run: Path) -> str:
    """What the first rank died of that was ended from outside, in words; empty where none was."""
    file = ended_file(run)
    return read_json(file)["reason"] if file.is_file() else ""


def lines(ranks: int, folder: Path, rendezvous: Rendezvous) -> list[str]:
    """The line for a shell that starts each rank, from whatever folder."""
    command = [os.path.abspath(sys.executable), str(paths.TRAIN), "--by-hand", str(folder.absolute())]
    meeting = f"MASTER_ADDR={rendezvous.address} MASTER_PORT={rendezvous.port} WORLD_SIZE={ranks}"
    return [f"{meeting} RANK={rank} {shlex.join(command)}" for rank in range(ranks)]


@contextlib.contextmanager
def called(row: Row, folder: Path, rendezvous: Rendezvous, variables: dict[str, str], log: TextIO):
    """Have somebody start this run's ranks: they are there when the block begins, and gone after it.

    The value is the process ids of what runs them; none, at once, where another launcher starts them. Raises BadInput
    where the port at which they are to meet is taken; RunFailed where a rank does not come within `hardware.timeout`.
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
    """A file that is locked from its first moment on, until the block ends."""
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
            with contextlib.suppress(OSError):  # nobody reads it any more, or the terminal is gone
                print(*told, sep="\n", file=stream, flush=True)

    there, changed = set(), time.monotonic()
    with _kept_free(rendezvous):
        say(
            f"{row.name}: start its ranks by hand, each by its line in a terminal of its own on this machine. The run"
            f" waits {timeout:g} s (hardware.timeout) for the first, and for each further one; then it fails.",
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
    """The port at which the ranks will meet, so that nobody else takes it while they are waited for."""
    try:
        return socket.create_server((rendezvous.address, rendezvous.port))
    except OSError as error:
        raise BadInput(
            f"hardware.port: {rendezvous.port} can't be used: {error.strerror}. Start again, or set another."
        ) from None


def _see_off(folder: Path, ranks: int) -> None:
    """Wait until those that ran the ranks are gone, which the call's lock has just told to; then kill them."""
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
    """Let the ranks begin; returns when all have ended, or one has not come to its end: then with 1."""
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
