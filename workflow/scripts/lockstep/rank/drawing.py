"""Pictures of a model's predictions for a few samples, drawn every few epochs, outside the timed window."""

from collections.abc import Callable

import numpy as np
import torch

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.files import atomic_file
from lockstep.rank.training import Training
from lockstep.tasks._task import Samples

SHOWN = 4  # how many samples of the dev split are drawn, always the same ones


class Drawing:
    """When pictures are due, by `train.pictures_every`, and how they are drawn.

    evaluate: a function that returns the model's outputs for a batch (rank/dev_split.py: evaluated).
    """

    def __init__(self, training: Training, plan: Plan, samples: Samples, evaluate: Callable):
        self.training, self.samples, self.evaluate = training, samples, evaluate
        self.ids = np.unique(np.linspace(0, len(samples) - 1, SHOWN).astype(np.int64))
        every = training.train.pictures_every
        self.epochs = _ends(plan, every) if every else {}  # by the number of steps done at their end

    def due(self, step: int) -> bool:
        return step in self.epochs

    def draw(self, step: int) -> None:
        """Draw the pictures. Call on every rank, as a forward pass may need all; the rank that `tells` writes them."""
        training, strategy = self.training, self.training.strategy
        strategy.model.eval()
        with torch.no_grad():
            width = strategy.padded_width(int(self.samples.lengths[self.ids].max()))
            outputs, _ = self.evaluate(strategy, strategy.inputs(self.samples.batch(self.ids, width)))
        strategy.model.train()
        if strategy.world.tells:
            file = paths.picture_file(training.folder, self.epochs[step])
            file.parent.mkdir(exist_ok=True)
            with atomic_file(file) as temporary:
                temporary.write_bytes(training.task.draw(self.samples, self.ids, outputs))
        training.progress.alive()


def _ends(plan: Plan, every: int) -> dict[int, int]:
    """The number of steps done at the end of each `every`-th epoch and of the last one: steps -> epoch, from 1."""
    ends = np.append(np.flatnonzero(np.diff(plan.epochs)) + 1, plan.steps).tolist()
    return {step: epoch for epoch, step in enumerate(ends, 1) if epoch % every == 0 or epoch == len(ends)}
