"""Evaluation on the dev split while training. Which weights are kept follows from it, in checkpoint.py."""

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

SEED = 0  # of the choice of `eval_samples`


class DevSplit:
    """When the dev split is evaluated, and what came of it."""

    def __init__(self, training: Training, plan: Plan, samples: Samples):
        self.training, self.plan = training, plan
        self.samples = chosen(samples, training.train.eval_samples)
        self.every, self.kept = training.train.eval_every, checkpoint.Kept(training, plan)
        self.drawing = Drawing(training, plan, self.samples, evaluated)
        self.history: list[dict] = []

    def due(self, step: int) -> bool:
        """Whether something is to be done after so many steps; what the last one calls for, `finish` does."""
        return step < self.plan.steps and (self._evaluation_due(step) or self.drawing.due(step))

    def _evaluation_due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def look(self, step: int) -> None:
        """Evaluate and draw what is due after `step` steps."""
        if self._evaluation_due(step):
            self.evaluate(step)
        if self.drawing.due(step):
            self.drawing.draw(step)

    def finish(self) -> None:
        """After the last step."""
        if self.every:
            self.evaluate(self.plan.steps)
        if self.drawing.due(self.plan.steps):
            self.drawing.draw(self.plan.steps)
        self.kept.trained(self.plan.steps)

    def evaluate(self, step: int) -> None:
        clock = self.training.clock
        checkpoint.barrier(self.training.strategy)  # no rank's waiting for another one is evaluation
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
    """Some samples of a split, numbered anew; `ids`: their positions in it, int64 [n]."""

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
    """`most` samples at random, or all where there are no more; the same ones in every run, whatever its seed."""
    if most is None or most >= len(samples):
        return samples
    return Chosen(samples, np.sort(np.random.default_rng(SEED).permutation(len(samples))[:most]))


def evaluated(strategy: Strategy, inputs: dict[str, torch.Tensor]) -> tuple[object, Labels]:
    """What the model returns of a batch, and its labels. It is set to evaluation by whoever calls this."""
    labels = take_labels(inputs)
    return strategy.forward(inputs), labels


def gather_results(training: Training, samples: Samples) -> torch.Tensor:
    """The task's results of every sample of a split, each once, in order, on every rank: float32 on the CPU, [n, any].

    All ranks run the same number of equally large batches, as collectives inside a forward pass need. What fills up a
    share is marked by the id -1, and dropped again; so is all that a rank has which does not count.
    """
    strategy, size = training.strategy, training.train.global_batch

    def results_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
        outputs, labels = evaluated(strategy, inputs)
        training.progress.alive()
        if outputs is None:
            return None
        # A copy, as the next replay of a CUDA graph (compile: static) overwrites what this one has put out.
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
    """This rank's results, [count, any], which are zeros where it has no outputs: all ranks gather as many numbers."""
    world, there = strategy.world, of_batches[0] is not None
    if world.replicas == world.size:
        return torch.cat(of_batches)
    columns = strategy.all_gather(torch.tensor(of_batches[0].shape[1] if there else 0, device=world.device))
    return torch.cat(of_batches) if there else torch.zeros(count, int(columns.max()), device=world.device)
