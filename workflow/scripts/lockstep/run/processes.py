"""Starting a run's processes, watching that they go on, and ending every one of them.

Launchers can't be trusted with that: some wait for ever when a rank hangs, and killing one can leave its ranks alive.
So the launcher's tree is started in a session of its own; whatever is orphaned in it falls to this process, the run's
supervisor (it is their "child subreaper", prctl(2)), and every process asks the kernel to be killed when its parent
dies. This process ends when the Snakemake that started it does (lifetime.py).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from lockstep import paths
from lockstep.run import lifetime
from lockstep.run.progress import LAUNCHED, Progress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_SECONDS = 0.2
ENDING = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 3  # between SIGTERM and SIGKILL
# For a launcher to end the other ranks, after one has failed; torchrun and DeepSpeed's take up to 30.
LAUNCHER_SECONDS = 5
STARTUP_SECONDS = 120  # the timeout is at least this until every rank has done a step: imports and loading take a while
LOG_EVERY = 0.1  # of all steps: how often the log gets a line

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def signals_wait():
    """SIGINT and SIGTERM wait until the block has ended, in which a process is started by `preexec_fn`.

    What a signal raises in the midst of such a fork is lost: Python ignores exceptions in calls of os.register_at_fork.
    """
    came = []
    before = {number: signal.signal(number, lambda came_by, _: came.append(came_by)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@dataclass
class Outcome:
    exit_code: int
    reason: str  # why the processes were ended, or which rank died; empty if neither
    seconds: float


class Interrupted(Exception):
    """A run is to end, though nothing is wrong with it: SIGTERM came, or who started it has ended."""


class Saved(Interrupted):
    """It has ended after SIGTERM came, and its state is saved."""


class StopRequest:
    """What SIGTERM does while the block runs: of a run that saves its state it asks for that; a second one ends it.

    The ranks must all end after the same step. They are a step apart at most, as each step's gradients are averaged, so
    they are told of one that none can have begun.
    """

    AHEAD = 3  # steps

    def __init__(self, progress: Progress, saves: bool):
        self.progress, self.saves = progress, saves
        self.step = 0  # after which the ranks are to end

    def __enter__(self):
        self.previous = signal.signal(signal.SIGTERM, self._asked)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGTERM, self.previous)

    def _asked(self, number, frame):
        done = self.progress.table[:, 2]
        if not self.saves or self.step or not done.min():
            raise Interrupted("the run was ended from outside (SIGTERM)")
        self.step = int(done.max()) + self.AHEAD
        self.progress.table[:, 3] = self.step


def supervise(
    command: list[str],
    environment: dict,
    folder: Path,
    log,
    world_size: int,
    steps: int,
    timeout: float,
    saves: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run `command` until it ends, or until no rank has made progress for `timeout` seconds; then end all it started.

    `meanwhile` is called every POLL_SECONDS. A run that `saves` its state is asked to by SIGTERM, and ends then. Output
    goes to `log`, an open file; on a terminal a progress bar is shown on stderr. Whatever happens in here,
    KeyboardInterrupt included, no process is left behind.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    progress = Progress(folder, world_size)
    with StopRequest(progress, saves) as request:
        started, process = time.perf_counter(), None
        try:
            with signals_wait():
                process = subprocess.Popen(
                    command,
                    env=environment | {LAUNCHED: repr(started), lifetime.SUPERVISOR: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            reason = _watch(process, progress, folder, log, steps, timeout, meanwhile)
            if request.step < steps and paths.saved_state(folder, request.step).is_dir():
                raise Saved(f"ended from outside (SIGTERM); its state after step {request.step} is saved")
            return Outcome(process.wait(), reason, time.perf_counter() - started)
        finally:
            end_descendants()
            if process:
                process.wait()  # before the orphans: else its exit code would be collected with theirs
            reap_orphans()


def _watch(process, progress: Progress, folder: Path, log, steps: int, timeout: float, meanwhile) -> str:
    last_sum, last_change, dead, logged, failed = -1, time.perf_counter(), [], 0, None
    with tqdm(total=steps, unit="step", desc=paths.row_of(folder), leave=False, disable=not sys.stderr.isatty()) as bar:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            meanwhile()
            if lifetime.starter_is_gone():
                raise Interrupted("Snakemake, which had started the run, was ended")
            now, done = time.perf_counter(), int(progress.table[:, 1].sum())
            step = int(progress.table[:, 2].min())
            if done != last_sum:
                last_sum, last_change = done, now
            if step > bar.n:
                bar.update(step - bar.n)
            if step >= (logged + max(1, steps * LOG_EVERY)) or step == steps > logged:
                logged = step
                log.write(f"step {step}/{steps}\n")
                log.flush()
            dead = dead or _dead_ranks(progress, folder)
            if failed is None and (dead or _failed_ranks(progress, folder)):
                failed = now
            if failed is not None and now - failed > LAUNCHER_SECONDS:
                end_descendants()
                break
            allowed = timeout if step else max(timeout, STARTUP_SECONDS)
            if now - last_change > allowed:
                at = ", ".join(f"rank {rank} after step {row[2]}" for rank, row in enumerate(progress.table))
                end_descendants()
                return f"no progress for {allowed:g} s, so the run was ended as hung ({at} of {steps})"
    if process.returncode and not dead:
        dead = _dead_ranks(progress, folder)
    if dead:
        at = int(progress.table[dead[0], 2])
        names = " and ".join(f"rank {rank}" for rank in dead)
        return f"{names} died after step {at} of {steps} without a word; killed, or out of memory?"
    return ""


def _failed_ranks(progress: Progress, folder: Path) -> list[int]:
    """Ranks that have said why they failed."""
    return [rank for rank in range(len(progress.table)) if paths.rank_error(folder, rank).exists()]


def _dead_ranks(progress: Progress, folder: Path) -> list[int]:
    """Ranks that have begun, are gone, and left neither a result nor an error."""
    return [
        rank
        for rank, (pid, *_) in enumerate(progress.table)
        if pid
        and not _alive(int(pid))
        and not any(file(folder, rank).exists() for file in (paths.rank_summary, paths.rank_error))
    ]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_descendants() -> None:
    """End every process below this one: SIGTERM, and SIGKILL for those that are still there after a grace."""
    deadline = time.perf_counter() + GRACE_SECONDS
    signalled = set()
    while descendants := [child for child in psutil.Process().children(recursive=True) if _alive(child.pid)]:
        late = time.perf_counter() > deadline
        for child in descendants:
            if late or child.pid not in signalled:
                signalled.add(child.pid)
                _signal(child, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself in the meantime
        process.send_signal(number)


def reap_orphans() -> None:
    """Collect the ended orphans that fell to this process, so that no zombie is left either."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # none left
