"""What the parts of one rank's training have in common: strategy, task, settings, clock and files."""

from dataclasses import dataclass
from pathlib import Path

from torch.nn import Module

from lockstep.config import registry
from lockstep.config.sections import Train
from lockstep.config.settings import Settings
from lockstep.model.optimizer import make_optimizer
from lockstep.rank.clock import Clock
from lockstep.rank.energy import Meter
from lockstep.rank.memory import Gauge
from lockstep.rank.workers import Workers
from lockstep.run.progress import Progress, RankFiles
from lockstep.strategies.single import Strategy
from lockstep.tasks._task import Task


@dataclass
class Training:
    strategy: Strategy
    task: Task
    settings: Settings
    folder: Path  # the run's
    clock: Clock
    files: RankFiles
    progress: Progress
    workers: Workers | None = None  # which make its batches, if the row has any
    meter: Meter | None = None  # on one rank of each machine
    gauge: Gauge | None = None  # reads memory; None in a trial's variations
    profiler: "Profiler | None" = None  # noqa: F821 - only in a profile (lockstep/rank/profiling.py)

    @property
    def train(self) -> Train:
        return self.settings.train

    def wrap(self, model: Module) -> None:
        """Have the strategy wrap `model` and make its optimizer."""
        self.strategy.set_up(model, lambda wrapped: make_optimizer(wrapped, self.train))


def set_up(
    strategy: Strategy,
    settings: Settings,
    folder: Path,
    progress: Progress,
    clock: Clock | None = None,
    files: RankFiles | None = None,
    workers: Workers | None = None,
) -> Training:
    """The training of a rank whose strategy has started, by `settings`; its files go to `folder`.

    The model is wrapped later, because a run, a trial's variation and a profile each begin with a different one.
    """
    task = registry.load_task(settings.task)(settings.train)
    clock, files = clock or Clock(), files or RankFiles(folder, strategy.world.rank)
    files.replica, files.counts = strategy.world.replica, strategy.world.counts
    clock.device = strategy.world.device
    return Training(strategy, task, settings, folder, clock, files, progress, workers)
