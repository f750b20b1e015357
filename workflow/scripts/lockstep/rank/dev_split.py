"""Evaluation on the dev split during training; checkpoint.py decides by it which weights are kept."""

import math

import numpy as np
import torch

from lockstep.data.plan import Plan, share
from lockstep.errors import RunFailed
from lockstep.rank import checkpoint
from lockstep.rank.drawing import Drawing
from lockstep.rank.training import Training
from lockstep.strategies.single import Strategy
from lockstep.tasks._task import Labels, Samples, take_labels

SEED = 0  # for choosing `eval_samples`


class DevSplit:
    """When the dev split is evaluated, and the results."""

    def __init__(self, training: Training, plan: Plan, samples: Samples):
        self.training, self.plan = training, plan
        self.samples = chosen(samples, training.train.eval_samples)
        self.every, self.kept = training.train.eval_every, checkpoint.Kept(training, plan)
        self.drawing = Drawing(training, plan, self.samples, evaluated)
        self.history: list[dict] = []

    def due(self, step: int) -> bool:
        """Whether to evaluate or draw after `step` steps; what is due after the last step is done by `finish`."""
        return step < self.plan.steps and (self._evaluation_due(step) or self.drawing.due(step))

    def _evaluation_due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def look(self, step: int) -> None:
        """Evaluate and draw, as far as that is due after `step` steps."""
        if self._evaluation_due(step):
            self.evaluate(step)
        if self.drawing.due(step):
            self.drawing.draw(step)

    def finish(self) -> None:
        """Evaluate and draw after the last step, and keep the last weights if the run is to keep those."""
        if self.every:
            self.evaluate(self.plan.steps)
        if self.drawing.due(self.plan.steps):
            self.drawing.draw(self.plan.steps)
        self.kept.trained(self.plan.steps)

    def evaluate(self, step: int) -> None:
        clock = self.training.clock
        checkpoint.barrier(self.training.strategy)  # so that waiting for another rank is not timed as evaluation
        began = clock.now()
        results = gather_results(self.training, self.samples)
        figures = self.training.task.scores(results, self.samples)
        clock.evaluation += clock.now() - began
        scores = {"step": step, "support": len(results)} | figures
        self.history.append(scores)
        self.training.files.event("eval", scores)
        if self.training.strategy.world.rank == 0:
            numbers = ", ".join(f"dev {name} {figure:.4f}" for name, figure in figures.items())
            print(f"step {step}/{self.plan.steps}: {numbers}", flush=True)
        self.kept.evaluated(step, figures)


class Chosen:
    """Some samples of a split, renumbered from 0; `ids`: their positions in the split, int64 [n]."""

    def __init__(self, samples: Samples, ids: np.ndarray):
        self.samples, self.ids = samples, ids
        self.lengths, self.labels = samples.lengths[ids], samples.labels[ids]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        return self.samples.batch(self.ids[ids], width)

    def batches(self, size: int) -> list[np.ndarray]:
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))


def chosen(samples: Samples, most: int | None) -> Samples:
    """`most` random samples, or all if there are no more; every run has the same ones, whatever its seed."""
    if most is None or most >= len(samples):
        return samples
    return Chosen(samples, np.sort(np.random.default_rng(SEED).permutation(len(samples))[:most]))


def evaluated(strategy: Strategy, inputs: dict[str, torch.Tensor]) -> tuple[object, Labels]:
    """What the model returns for a batch, and the batch's labels. The caller sets the model to evaluation mode."""
    labels = take_labels(inputs)
    return strategy.forward(inputs), labels


def gather_results(training: Training, samples: Samples) -> torch.Tensor:
    """The task's results for every sample of a split, in order, on every rank: float32 on the CPU, [n, any].

    All ranks run equally many batches of equal size, because collectives inside a forward pass need that. Samples that
    only pad a share have the id -1 and are dropped; so are all results of a rank that does not count.

    Raises RunFailed unless each sample is there exactly once.
    """
    strategy, size = training.strategy, training.train.global_batch

    def results_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
        outputs, labels = evaluated(strategy, inputs)
        training.progress.alive()
        if outputs is None:
            return None
        # A copy, because the next replay of a CUDA graph (compile: static) overwrites the outputs of this one.
        return training.task.results(outputs, labels).clone()

    strategy.model.eval()
    with torch.no_grad():
        ids, results = strategy.gathered(samples, size, results_of) or _gathered(strategy, samples, size, results_of)
    strategy.model.train()
    order = ids.argsort()
    if not torch.equal(ids[order], torch.arange(len(samples))):
        raise RunFailed("the gathered predictions do not hold each sample of the split exactly once")
    return results[order]


def _gathered(strategy: Strategy, samples: Samples, size: int, results_of) -> tuple[torch.Tensor, torch.Tensor]:
    world, all_ids, all_results = strategy.world, [], []
    for ids in samples.batches(size):
        padded = np.full(math.ceil(len(ids) / world.replicas) * world.replicas, -1)
        padded[: len(ids)] = ids
        mine = share(padded, world.replica, world.replicas)
        width = strategy.padded_width(int(samples.lengths[ids].max()))
        inputs = strategy.inputs(samples.batch(np.where(mine < 0, ids[0], mine), width))
        all_ids.append(torch.from_numpy(mine if world.counts else np.full_like(mine, -1)).to(world.device))
        all_results.append(results_of(inputs))
    own = torch.cat(all_ids)
    ids = strategy.all_gather(own).flatten().cpu()
    results = strategy.all_gather(_results(strategy, all_results, len(own))).flatten(0, 1).cpu()
    return ids[ids >= 0], results[ids >= 0]


def _results(strategy: Strategy, of_batches: list[torch.Tensor | None], count: int) -> torch.Tensor:
    """This rank's results, [count, any]; zeros if it has none, because all ranks must gather equally many numbers."""
    world, there = strategy.world, of_batches[0] is not None
    if world.replicas == world.size:
        return torch.cat(of_batches)
    columns = strategy.all_gather(torch.tensor(of_batches[0].shape[1] if there else 0, device=world.device))
    return torch.cat(of_batches) if there else torch.zeros(count, int(columns.max()), device=world.device)
