"""Checkpoints: which weights a run keeps (`Kept`), and how they are written in a strategy's own format, with hashes.

A run has one checkpoint, in its folder `native`. Every checkpoint format loads a file with a flipped byte without an
error, so manifest.json, which is written last, holds the sha256 of each file and of the live weights that were saved.
The conversion (proof/conversion.py) is checked against both, and sealed in the same way.
"""

import math
import shutil
from pathlib import Path

from lockstep.config.qualities import KEPT_BY
from lockstep.data.plan import Plan
from lockstep.files import named_when_full, seal
from lockstep.model import models
from lockstep.paths import CHECKPOINT
from lockstep.rank.training import Training


class Kept:
    """The checkpoint that a run keeps, by `train.checkpoint`: the best weights by `train.best`, or the last ones."""

    def __init__(self, training: Training, plan: Plan):
        self.training, self.plan, self.best = training, plan, -math.inf

    def evaluated(self, step: int, scores: dict[str, float]) -> None:
        """Called with the dev scores after `step` steps; every rank has the same scores, so all decide alike."""
        train = self.training.train
        if train.checkpoint == "best":
            value = KEPT_BY[train.best].score(scores)
            if value > self.best:
                self.best = value
                self._save(step)

    def trained(self, step: int) -> None:
        """Called after the last of `step` steps."""
        if self.training.train.checkpoint == "last":
            self._save(step)

    def _save(self, step: int) -> None:
        save(self.training.strategy, self.training.folder, {"step": step, "plan": self.plan.hash})
        self.training.files.event("checkpoint", {"step": step})
        self.training.progress.alive()


def save(strategy, folder: Path, about: dict) -> None:
    """Write the strategy's checkpoint into a run's or snapshot's `folder`, replacing an older one. Call on every rank.

    `about` describes the checkpoint (step, plan); the hash of the live weights is added here.
    """
    main = strategy.world.rank == 0
    temporary, final = folder / f".{CHECKPOINT}.tmp", folder / CHECKPOINT
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    barrier(strategy)
    with named_when_full(final):
        strategy.save(temporary)
    tied = models.tied_names(strategy.module)
    live = models.with_tied(strategy.state_dict(), tied)
    barrier(strategy)
    if main:
        seal(temporary, about | {"weights": models.hash_weights(live), "tied": tied})
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
    barrier(strategy)


def barrier(strategy) -> None:
    """Wait until every rank has reached this point.

    The gathered numbers are copied to the host, because NCCL's collectives make only the GPUs wait for each other.
    """
    import torch

    strategy.all_gather(torch.zeros(1, device=strategy.world.device)).cpu()
