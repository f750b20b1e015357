"""The clock: what is timed, and when.

Inside the timed window nothing is synchronised, printed or reduced: on a GPU a step leaves an event behind, on a CPU
a reading of the clock. The device is synchronised once at each edge. `time.perf_counter` is Linux's CLOCK_MONOTONIC,
which all processes of a machine share: so a process can count from the moment at which it was launched.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable

import numpy as np
import torch

from lockstep.run.progress import LAUNCHED, WARMUP_STEPS

STALL = 10  # times the upper quartile: the longest texts take less, compiling takes more


class Clock:
    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.launched = float(os.environ.get(LAUNCHED, now()))
        self.setup: dict[str, float] = {}  # seconds by part, in order
        self.device: torch.device | None = None
        self._warm_up = 0.0  # seconds before the first window
        self._warm_up_steps: list[tuple[int, float]] = []  # which steps, and the part of each, were computed in it
        self.evaluation = 0.0  # seconds of evaluating, outside the windows; those of saving are neither's
        self._last = self.launched
        self._ticks: list[float | torch.cuda.Event] = []  # the start of each window, and the end of each step
        self._windows: list[int] = []  # where in _ticks each window starts
        self._opened: list[float] = []
        self.seconds = 0.0  # of all windows
        self._earlier = np.empty(0)  # seconds of each step before an interruption

    def part(self, name: str) -> None:
        """A part of the set-up is done."""
        now = self.now()
        self.setup[name] = now - self._last
        self._last = now

    def synchronize(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def open(self, barrier: Callable[[], None] = lambda: None) -> None:
        """The timed window begins: at the first step, and again after an evaluation.

        `barrier` returns when every rank has come as far, and is the last thing before: the window of one that came
        first would count its waiting for the others as training.
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
        """Before the first window one of `accumulation` micro-batches of each of `steps` was computed, in `seconds`."""
        self._warm_up, self._warm_up_steps = seconds, [(step, 1 / accumulation) for step in steps]

    def tick(self) -> None:
        """One optimizer step has been issued."""
        if self.device is not None and self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(self.now())

    def close(self) -> None:
        """The timed window ends: after the last step, and before an evaluation."""
        self.synchronize()
        self._closed = self.now()
        self.seconds += self._closed - self._opened[-1]
        gc.enable()

    def trained(self) -> float:
        """Seconds in timed windows up to now, in one of which this is, by the host's clock."""
        return self.seconds + self.now() - self._opened[-1]

    def restore(self, step_seconds: np.ndarray, seconds: float, evaluation: float) -> None:
        """Go on from what the clock of an interrupted run had come to."""
        self._earlier, self.seconds, self.evaluation = step_seconds, seconds, evaluation

    def step_seconds(self) -> np.ndarray:
        """Seconds of each step, those before an interruption included, shape [steps]."""
        return np.concatenate([self._earlier, self._step_seconds()])

    def _step_seconds(self) -> np.ndarray:
        windows = [self._ticks[a:b] for a, b in zip(self._windows, [*self._windows[1:], None], strict=True)]
        return np.array([_between(a, b) for ticks in windows for a, b in itertools.pairwise(ticks)])

    def reading(self) -> dict:
        """All of this rank's clocks, in seconds; call after the last window is closed."""
        steps = self.step_seconds()
        steady = steps[WARMUP_STEPS:] if len(steps) > 2 * WARMUP_STEPS else steps
        median, upper = np.quantile(steady, [0.5, 0.75]).tolist()
        warm = sum(part * steps[step] for step, part in self._warm_up_steps if step < len(steps))
        return {
            "setup": self.setup,
            "warm_up_seconds": self._warm_up,
            "cold_seconds": max(0.0, self._warm_up - float(warm)),  # beyond what the same steps took in the window
            "first_step_seconds": self._opened[0] - self.launched + float(self._step_seconds()[0]),
            "train_seconds": self.seconds,
            "stall_seconds": float((steps - median)[steps > STALL * upper].sum()),
            "step_seconds_median": median,
            "step_seconds_quartiles": np.quantile(steady, [0.25, 0.75]).tolist(),
            "evaluation_seconds": self.evaluation,
            "total_seconds": self.now() - self.launched,
            "window": [self._opened[0], self._closed],  # by the machine's clock: when what is timed began and ended
        }


def _between(start, end) -> float:
    return start.elapsed_time(end) / 1000 if isinstance(start, torch.cuda.Event) else end - start
