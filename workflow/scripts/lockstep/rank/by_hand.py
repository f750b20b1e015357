"""One rank of a run whose ranks are started by hand: what a line pasted into a terminal starts (run/hand.py)."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lockstep import paths
from lockstep.config.launchers import rank_variables
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.run import hand, lifetime, node

SIGNALS = {
    signal.SIGINT: "Ctrl-C in the terminal",
    signal.SIGHUP: "closing the terminal",
    signal.SIGTERM: "SIGTERM in the terminal",
}
AS_PRINTED = "Paste the line as the run printed it."
REASON_SECONDS = 5.0  # how long to wait for a failed run to write its reason


def start(folder: Path) -> int:
    """Wait for all ranks, then run the rank that the environment names; returns its exit code.

    Raises BadInput if no run waits for this rank, or if the environment does not belong to that run.
    """
    call = _answered(folder)
    rank, ranks = _number("RANK"), call["ranks"]
    with hand.call_file(folder).open(encoding="utf-8") as ours, _claimed(folder, rank, ranks):
        others = hand.named({other for other in range(ranks) if other != rank})
        _say(f"rank {rank} of {ranks} is there" + (f", and waits for {others}" if others else ""))
        while not hand.go_file(folder).is_file():
            time.sleep(hand.POLL)
            if _is_over(ours):
                break
        else:
            code = _run(folder, rank, call, ours)
            if code and not _is_over(ours):
                _note_end(folder, rank, code)
            if code == 0:
                _say(f"rank {rank} of {ranks} is done")
                return 0
    _say(f"rank {rank} of {ranks} has ended, as the run has: {_reason(folder)}")
    return 1


def _answered(folder: Path) -> dict:
    """The call that this process answers. Raises BadInput if there is none, or if it is not meant for this process."""
    rank, size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    file = hand.call_file(folder)
    if not hand.is_locked(file):
        raise BadInput(
            f"{folder}: no run waits for ranks here; it has ended or has not started. Start it, then paste the lines"
            " that it prints."
        )
    call = read_json(file)
    for name, given, wanted in (
        ("WORLD_SIZE", size, call["ranks"]),
        ("MASTER_ADDR", os.environ.get("MASTER_ADDR"), call["address"]),
        ("MASTER_PORT", port, call["port"]),
    ):
        if given != wanted:
            raise BadInput(f"{name}: it is {given}, and this run's is {wanted}. {AS_PRINTED}")
    if rank >= size:
        raise BadInput(f"RANK: it is {rank}, and {size} ranks are numbered from 0 to {size - 1}. {AS_PRINTED}")
    return call


def _number(name: str) -> int:
    given = os.environ.get(name, "")
    if not given.isdecimal():
        raise BadInput(f"{name}: it is {given or 'not set'}, and must be a number. {AS_PRINTED}")
    return int(given)


@contextlib.contextmanager
def _claimed(folder: Path, rank: int, ranks: int):
    """Claim this rank while the block runs. Raises BadInput if another process has claimed it."""
    with hand.rank_file(folder, rank).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            missing = {other for other in range(ranks) if not hand.is_locked(hand.rank_file(folder, other))}
            which = f"Still missing: {hand.named(missing)}." if missing else "All ranks are there."
            raise BadInput(f"RANK: rank {rank} is started already, in another terminal. {which}") from None
        stream.truncate(0)
        json.dump({"pid": os.getpid()}, stream)
        stream.flush()
        yield


def _is_over(call) -> bool:
    """Whether the run that held `call`, an open file, has ended."""
    try:
        fcntl.flock(call, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(folder: Path, rank: int, call: dict, ours) -> int:
    """Run the rank as launchers do, until the rank or the run ends."""
    own = {name: value for name, value in os.environ.items() if not node.OF_OUTSIDE.fullmatch(name)}
    environment = own | call["variables"] | read_json(hand.go_file(folder))
    environment |= rank_variables(rank, call["ranks"], call["address"], call["port"])
    process = subprocess.Popen(
        [sys.executable, str(paths.TRAIN), str(folder)],
        env=environment,
        cwd=call["folder"],  # the run's settings name files from there
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that a signal reaches it once
    )
    # Ctrl-C, a closed terminal and `kill` are passed on to the rank, which then ends.
    for number, what in SIGNALS.items():

        def pass_on(number, _, what=what):
            if not _is_over(ours):
                _note(folder, f"{what} of rank {rank} ended the run")
            process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

        signal.signal(number, pass_on)
    # What a rank prints before it redirects its output to its own file; rank 0 has no such file and prints all here.
    words = threading.Thread(target=_hand_on, args=(process.stdout, folder / paths.LOG), daemon=True)
    words.start()
    while process.poll() is None:
        time.sleep(hand.POLL)
        if _is_over(ours):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(lifetime.GRACE_SECONDS)
            process.kill()
    words.join()
    return process.returncode


def _note_end(folder: Path, rank: int, code: int) -> None:
    """Record it if a rank was killed; a rank that ends in any other way reports that itself."""
    if code < 0:
        _note(folder, f"rank {rank} was killed ({signal.Signals(-code).name}), by hand or because memory ran out")


def _note(folder: Path, reason: str) -> None:
    """Write why the run ends, unless another rank has done so."""
    with contextlib.suppress(FileExistsError), hand.ended_file(folder).open("x", encoding="utf-8") as stream:
        json.dump({"reason": reason}, stream)


def _hand_on(output, log: Path) -> None:
    with log.open("ab", buffering=0) as stream:
        for line in output:
            stream.write(line)
            _show(line)


def _reason(folder: Path) -> str:
    deadline = time.monotonic() + REASON_SECONDS
    while time.monotonic() < deadline:
        for name, key in ((paths.FAILED, "reason"), (paths.RECORD, "status")):
            if (folder / name).is_file():
                return read_json(folder / name)[key]
        time.sleep(hand.POLL)
    return f"no reason is known; see {folder / paths.LOG}"


def _say(text: str) -> None:
    _show(f"{text}\n".encode())


def _show(line: bytes) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        os.write(1, line)
