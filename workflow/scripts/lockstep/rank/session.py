"""What the parts of one rank's training share."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config.sections import Train
from lockstep.config.settings import Settings
from lockstep.rank.clock import Clock
from lockstep.rank.energy import Meter
from lockstep.rank.memory import Gauge
from lockstep.run.progress import Progress, RankFiles
from lockstep.strategies.single import Strategy
from lockstep.tasks._task import Task


@dataclass
class Session:
    strategy: Strategy
    task: Task
    settings: Settings
    folder: Path  # of the run
    clock: Clock
    files: RankFiles
    progress: Progress
    meter: Meter | None = None  # on one rank of each machine
    gauge: Gauge | None = None  # where memory is read: not where the same is trained once more
    profiler: "Profiler | None" = None  # noqa: F821 - in a run of that kind only, lockstep/rank/profiling.py

    @property
    def train(self) -> Train:
        return self.settings.train
