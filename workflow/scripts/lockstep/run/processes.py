"""Starting a run's processes, watching that they make progress, and ending every one of them.

Launchers can't be trusted with that: some wait forever when a rank hangs, and killing one can leave its ranks alive.
So the launcher and its descendants are started in a session of their own. Those that are orphaned become children of
this process, the run's supervisor (their "child subreaper", prctl(2)), and every process asks the kernel to be killed
when its parent dies. This process ends when the Snakemake that started it does (lifetime.py).
"""

import collections
import contextlib
import math
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
from lockstep.errors import RunFailed
from lockstep.run import lifetime
from lockstep.run.fork import Fork
from lockstep.run.lifetime import die_with_parent, libc
from lockstep.run.progress import LAUNCHED, Progress

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_SECONDS = 0.2
ENDING = (signal.SIGINT, signal.SIGTERM)
# The time that a launcher has to end the other ranks after one has failed; torchrun and DeepSpeed's take up to 30 s.
LAUNCHER_SECONDS = 5
KILLED_SECONDS = 120  # after SIGKILL; to free a large memory takes some, and more means that the kernel is stuck
STARTUP_SECONDS = 120  # the least timeout before every rank has done a step, as imports and loading take time
LOG_EVERY = 0.1  # the share of all steps after which the log gets a line


def _die_with_parent_deaf() -> None:
    """Call `die_with_parent`, and block SIGTERM in this process and in those that it starts.

    Slurm sends SIGTERM to all processes of a job step at once. In a run that saves its state first, only the supervisor
    must handle it.
    """
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


@contextlib.contextmanager
def signals_wait():
    """Defer SIGINT and SIGTERM until the block has ended; it starts a process with `preexec_fn`.

    An exception that a signal raises during such a fork is lost: Python ignores those in os.register_at_fork calls.
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
    """A run must end although it has not failed: SIGTERM was received, or the process that started it has ended."""


class Saved(Interrupted):
    """A run has ended after SIGTERM, and its state is saved."""


class StopRequest:
    """Handle SIGTERM while the block runs: the first asks a run that saves to save and stop; a second ends it at once.

    All ranks must end after the same step. They are at most one step apart, because each step averages gradients, so
    they are told a step that none can have begun yet. With several nodes, the first node chooses the step
    (coordination.py), and the others learn of it a little later.
    """

    AHEAD = 3  # steps between the fastest rank and the last step
    HEARD_AFTER = 5.0  # seconds after which all nodes know the step
    ONCE = 2.0  # seconds in which a further signal is the same request: Slurm sends two to a job step

    def __init__(self, progress: Progress, saves: bool, node: int, nodes: int):
        self.progress, self.saves, self.node, self.nodes = progress, saves, node, nodes
        self.asked = 0.0  # when SIGTERM was received, by perf_counter; 0 if it was not
        self.step = 0  # the step after which the ranks are to end; 0: none
        self.seen = collections.deque(maxlen=10)  # times, and the number of steps done by then

    def __enter__(self):
        self.previous = signal.signal(signal.SIGTERM, self._asked)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGTERM, self.previous)

    def _asked(self, number, frame):
        now = time.perf_counter()
        if self.asked and now - self.asked < self.ONCE:
            return
        if not self.saves or self.asked or not self.progress.table[:, 2].min():
            raise Interrupted("the run was ended from outside (SIGTERM)")
        self.asked = now
        if self.node == 0 and not self.step:
            self.soon()

    def note(self) -> None:
        """Called repeatedly, to know how fast steps are done."""
        self.seen.append((time.perf_counter(), int(self.progress.table[:, 2].max())))

    def soon(self) -> None:
        """End after the first step that no rank can have begun when it learns of this."""
        ahead = self.AHEAD
        if self.nodes > 1:
            (began, first), (ended, last) = self.seen[0], self.seen[-1]
            ahead += math.ceil((last - first) / max(ended - began, POLL_SECONDS) * self.HEARD_AFTER)
        self.after(int(self.progress.table[:, 2].max()) + ahead)

    def after(self, step: int) -> None:
        self.step = step
        self.progress.table[:, 3] = step


@dataclass(frozen=True)
class Supervised:
    """A run as its supervisor on one node knows it."""

    folder: Path
    ranks: int  # on this node
    steps: int
    timeout: float  # seconds without progress of any rank after which the run counts as hung
    saves: bool = False  # whether ranks save their state on request
    node: int = 0
    nodes: int = 1


def supervise(
    run: Supervised,
    command: list[str] | Callable[[], None],
    environment: dict,
    log,
    meanwhile: Callable[[StopRequest], None] = lambda request: None,
) -> Outcome:
    """Run `command` until it ends, or until no rank makes progress any more; then end everything that it started.

    command: what starts the ranks; a function is called in a fork of this process. log: an open file for its output.
    `meanwhile` is called every POLL_SECONDS. A run that `saves` its state is asked to do so by SIGTERM, and then ends.
    On a terminal a progress bar is shown on stderr. Whatever happens in here, KeyboardInterrupt included, no process is
    left behind.
    """
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    progress = Progress(run.folder, run.node, run.ranks)
    with StopRequest(progress, run.saves, run.node, run.nodes) as request:
        started, process = time.perf_counter(), None
        try:
            launched = f"{started!r} {lifetime.boot()}"
            environment = environment | {LAUNCHED: launched, lifetime.SUPERVISOR: str(os.getpid())}
            with signals_wait():
                process = _start(command, environment, log, run.saves)
            reason = _watch(run, process, progress, log, meanwhile, request)
            if request.step < run.steps and paths.saved_state(run.folder, request.step).is_dir():
                raise Saved(f"ended from outside (SIGTERM); its state after step {request.step} is saved")
            return Outcome(process.wait(), reason, time.perf_counter() - started)
        finally:
            end_descendants()
            if process:
                process.wait()  # before the orphans: else its exit code would be collected with theirs
            reap_orphans()


def _start(command: list[str] | Callable[[], None], environment: dict, log, saves: bool):
    if callable(command):
        return Fork(command, environment, log, new_session=True)
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent_deaf if saves else die_with_parent,
    )


def _watch(run: Supervised, process, progress: Progress, log, meanwhile, request: StopRequest) -> str:
    """Wait until the launcher ends, or the run has to be ended; returns why it went wrong, or nothing."""
    folder, steps = run.folder, run.steps
    last_sum, last_change, dead, logged, failed = -1, time.perf_counter(), [], 0, None
    with tqdm(total=steps, unit="step", desc=paths.row_of(folder), leave=False, disable=not sys.stderr.isatty()) as bar:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            request.note()
            meanwhile(request)
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
            allowed = run.timeout if step else max(run.timeout, STARTUP_SECONDS)
            if now - last_change > allowed:
                at = ", ".join(_place(pid, step, rank) for pid, _, step, _, rank in progress.table.tolist())
                end_descendants()
                return f"no progress for {allowed:g} s, so the run was ended as hung ({at} of {steps})"
    if process.returncode and not dead and failed is None:
        dead = _dead_ranks(progress, folder)
    if dead:
        at = max(int(row[2]) for row in progress.table if row[4] in dead)
        names = " and ".join(f"rank {rank}" for rank in dead)
        return f"{names} died after step {at} of {steps} without an error message; killed, or out of memory?"
    return ""


def _failed_ranks(progress: Progress, folder: Path) -> list[int]:
    """The ranks that have written why they failed."""
    return [rank for rank in progress.table[:, 4].tolist() if paths.rank_error(folder, rank).exists()]


def _dead_ranks(progress: Progress, folder: Path) -> list[int]:
    """The ranks that have begun and ended, and left neither a result nor an error."""
    return [
        rank
        for pid, *_, rank in progress.table.tolist()
        if pid
        and not _alive(int(pid))
        and not any(file(folder, rank).exists() for file in (paths.rank_summary, paths.rank_error))
    ]


def _place(pid: int, step: int, rank: int) -> str:
    """Where a rank of a hung run is. One that was stopped (SIGSTOP) is the one that the others wait for."""
    if not pid:
        return "a rank not started"
    return f"rank {rank}{' (stopped)' * (_status(pid) == psutil.STATUS_STOPPED)} after step {step}"


def _alive(pid: int) -> bool:
    return _status(pid) not in (psutil.STATUS_ZOMBIE, None)


def _status(pid: int) -> str | None:
    """The state of a process; None if there is no such one."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def end_descendants() -> None:
    """End all descendants of this process: by SIGTERM, and after GRACE_SECONDS by SIGKILL.

    Raises RunFailed if one does not end, because it waits in the kernel for a device or for files of another machine.
    """
    deadline = time.perf_counter() + lifetime.GRACE_SECONDS
    signalled = set()
    while descendants := [child for child in psutil.Process().children(recursive=True) if _alive(child.pid)]:
        late = time.perf_counter() > deadline
        if time.perf_counter() > deadline + KILLED_SECONDS:
            there = ", ".join(str(child.pid) for child in descendants)
            raise RunFailed(
                f"processes of the run can't be ended: {there}. They wait in the kernel, for a GPU's driver or for a"
                " file system that does not answer; dmesg may tell which"
            )
        for child in descendants:
            if late or child.pid not in signalled:
                signalled.add(child.pid)
                _signal(child, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself in the meantime
        process.send_signal(number)


def reap_orphans() -> None:
    """Collect the ended orphans that became children of this process, so that no zombie is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # none left
