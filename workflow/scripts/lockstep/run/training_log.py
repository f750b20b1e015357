"""The log of a run while it trains: a line every `train.log_every` steps, also for TensorBoard and MLflow.

Rank 0 writes the numbers into memory that it shares with its supervisor (rank/losses.py), without a system call; the
supervisor does everything that takes time.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.config import registry
from lockstep.config.settings import Settings
from lockstep.data.plan import Plan
from lockstep.model.schedule import lr_factor
from lockstep.run.trackers import Trackers


class Notes:
    """Steps done, seconds trained, learning rate, loss and its terms, as rank 0 writes them: float64 [n, 4 + terms].

    The first row says where the run began, and has no loss. Rows that are not written yet have -1 steps. The rate is
    NaN unless it may differ from the schedule's.
    """

    def __init__(self, folder: Path, rows: int | None = None, terms: int = 0):
        path = folder / paths.LIVE
        if rows:
            np.full((rows, 4 + terms), -1, dtype=np.float64).tofile(path)
        self.table = np.memmap(path, dtype=np.float64, mode="r+").reshape(-1, 4 + terms)
        self.count = 0

    def write(self, step: int, seconds: float, losses: np.ndarray | float, rate: float = math.nan) -> None:
        """losses: the step's loss and its terms, [1 + terms]; or one number for all of them."""
        self.table[self.count, 1:3], self.table[self.count, 3:] = (seconds, rate), losses
        self.table[self.count, 0] = step  # last, because it marks the row as written
        self.count += 1

    def new(self) -> list[tuple[int, float, float, list[float]]]:
        """The rows that were not read before: step, seconds, learning rate, and the loss followed by its terms."""
        rows = []
        while self.count < len(self.table) and self.table[self.count, 0] >= 0:
            step, seconds, rate, *losses = self.table[self.count].tolist()
            rows.append((int(step), seconds, rate, losses))
            self.count += 1
        return rows


class Log:
    """Reads the notes of a run while it trains, and passes them on to `say` and to the trackers."""

    def __init__(self, folder: Path, settings: Settings, plan: Plan, say: Callable[[str], None]):
        self.plan, self.train, self.say = plan, settings.train, say
        self.factor = lr_factor(settings.train, plan.steps, plan.epochs)
        self.terms = registry.task_literals(settings.task)["TERMS"]
        self.notes = Notes(folder, plan.steps // settings.train.log_every + 2, len(self.terms))
        self.began = self.before = None  # the first row, and the previous one
        self.trackers = Trackers(folder, settings, say)

    def update(self) -> None:
        for row in self.notes.new():
            if self.began:
                self._tell(*row)
            self.before = row
            self.began = self.began or row

    def finish(self, dev: list[dict]) -> None:
        """Called after the run's end, however it ended; `dev`: the scores on the dev split, by step."""
        self.update()
        for scores in dev:
            figures = {f"dev/{name}": value for name, value in scores.items() if name not in ("step", "support")}
            self.trackers.add(scores["step"], figures)
        self.trackers.close()

    def _tell(self, step: int, seconds: float, rate: float, losses: list[float]) -> None:
        plan, (first, began, *_), (before, then, *_) = self.plan, self.began, self.before
        samples = int(plan.starts[step] - plan.starts[before])
        epoch, epochs = int(plan.epochs[step - 1]), int(plan.epochs[-1]) + 1
        of_epoch = np.searchsorted(plan.epochs, [epoch, epoch + 1])
        figures = {
            "epoch": epoch + float((step - of_epoch[0]) / (of_epoch[1] - of_epoch[0])),
            "loss": losses[0],
            "learning_rate": self.train.learning_rate * self.factor(step - 1) if math.isnan(rate) else rate,
            "samples_per_second": samples / (seconds - then),
        }
        terms = dict(zip(self.terms, losses[1:], strict=True))
        figures |= {f"loss/{name}": value for name, value in terms.items()}
        of_terms = f" ({', '.join(f'{name} {value:.4f}' for name, value in terms.items())})" if terms else ""
        left = (plan.steps - step) * (seconds - began) / (step - first)
        self.say(
            f"epoch {figures['epoch']:.2f}/{epochs}, step {step}/{plan.steps}: loss {losses[0]:.4f}{of_terms},"
            f" learning rate {figures['learning_rate']:.3g}, {figures['samples_per_second']:.0f} samples/s,"
            f" {time.strftime('%H:%M:%S', time.gmtime(left))} left"
        )
        self.trackers.add(step, figures)
