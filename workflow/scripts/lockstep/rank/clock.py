"""The clock of a rank: what is timed, and when.

Inside the timed window nothing is synchronised, printed or reduced: each step only records an event on a GPU, or reads
the clock on a CPU. The device is synchronised once at each end of the window. `time.perf_counter` is Linux's
CLOCK_MONOTONIC, which all processes of a machine share, so a process can count from the moment of its launch.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable

import numpy as np
import torch

from lockstep.run import lifetime
from lockstep.run.progress import LAUNCHED, WARMUP_STEPS
from lockstep.run.record import RankClock

# A step is a stall if it takes more than this many times the upper quartile: long texts take less, compiling more.
STALL = 10


class Clock:
    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        launched, _, boot = os.environ.get(LAUNCHED, "").partition(" ")
        # A rank that a launcher started from another machine, by ssh, has that machine's time in its environment.
        self.launched = float(launched) if launched and boot == lifetime.boot() else now()
        self.setup: dict[str, float] = {}  # the seconds of each part of the set-up, in order
        self.device: torch.device | None = None
        self._warm_up = 0.0  # seconds before the first window
        self._warm_up_steps: list[tuple[int, float]] = []  # the steps that it computed, and which share of each
        self.evaluation = 0.0  # seconds of evaluation, outside the windows; saving is counted in neither
        self._last = self.launched
        self._ticks: list[float | torch.cuda.Event] = []  # the start of each window, and the end of each step
        self._windows: list[int] = []  # where in _ticks each window starts
        self._opened: list[float] = []
        self.seconds = 0.0  # of all windows
        self._earlier = np.empty(0)  # seconds of each step before an interruption

    def part(self, name: str) -> None:
        """Called when a part of the set-up is done."""
        now = self.now()
        self.setup[name] = now - self._last
        self._last = now

    def synchronize(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def open(self, barrier: Callable[[], None] = lambda: None) -> None:
        """Open the timed window: before the first step, and again after an evaluation.

        `barrier` returns when every rank has called it. It comes last: otherwise the window of the first rank would
        count waiting for the others as training.
        """
        gc.collect()
        gc.disable()  # a collection in the window would be timed as training
        barrier()
        self.synchronize()
        if not self._windows:
            self.part("warm_up")
        self._windows.append(len(self._ticks))
        self._opened.append(self.now())
        self.tick()

    def warmed_up(self, seconds: float, steps: list[int], accumulation: int) -> None:
        """Record that one of `accumulation` micro-batches of each of `steps` was computed before the first window."""
        self._warm_up, self._warm_up_steps = seconds, [(step, 1 / accumulation) for step in steps]

    def tick(self) -> None:
        """Called when an optimizer step has been issued."""
        if self.device is not None and self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(self.now())

    def close(self) -> None:
        """Close the timed window: after the last step, and before an evaluation."""
        self.synchronize()
        self._closed = self.now()
        self.seconds += self._closed - self._opened[-1]
        gc.enable()

    def trained(self) -> float:
        """Seconds in timed windows until now, by the host's clock; call while a window is open."""
        return self.seconds + self.now() - self._opened[-1]

    def restore(self, step_seconds: np.ndarray, seconds: float, evaluation: float) -> None:
        """Continue from the times that an interrupted run had saved."""
        self._earlier, self.seconds, self.evaluation = step_seconds, seconds, evaluation

    def step_seconds(self) -> np.ndarray:
        """The seconds of each step, [steps], including those before an interruption."""
        return np.concatenate([self._earlier, self._step_seconds()])

    def _step_seconds(self) -> np.ndarray:
        windows = [self._ticks[a:b] for a, b in zip(self._windows, [*self._windows[1:], None], strict=True)]
        return np.array([_between(a, b) for ticks in windows for a, b in itertools.pairwise(ticks)])

    def reading(self) -> RankClock:
        """All of this rank's clocks, in seconds; call after the last window is closed."""
        steps = self.step_seconds()
        steady = steps[WARMUP_STEPS:] if len(steps) > 2 * WARMUP_STEPS else steps
        median, upper = np.quantile(steady, [0.5, 0.75]).tolist()
        warm = sum(part * steps[step] for step, part in self._warm_up_steps if step < len(steps))
        return RankClock(
            setup=self.setup,
            warm_up_seconds=self._warm_up,
            cold_seconds=max(0.0, self._warm_up - float(warm)),  # more than the same steps took in the window
            first_step_seconds=self._opened[0] - self.launched + float(self._step_seconds()[0]),
            train_seconds=self.seconds,
            stall_seconds=float((steps - median)[steps > STALL * upper].sum()),
            step_seconds_median=median,
            step_seconds_quartiles=np.quantile(steady, [0.25, 0.75]).tolist(),
            evaluation_seconds=self.evaluation,
            total_seconds=self.now() - self.launched,
            window=[self._opened[0], self._closed],  # when the timed part began and ended, by the machine's clock
        )


def _between(start, end) -> float:
    return start.elapsed_time(end) / 1000 if isinstance(start, torch.cuda.Event) else end - start
