"""The plan as one rank trains it: batches, losses, and what is recorded of them, for any training loop.

The loop is a strategy's `train` (the plain one is in strategies/single.py); a framework with its own loop gets its
batches from here too. No step synchronises, prints or reduces anything: losses stay on the device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep.config import precisions, registry
from lockstep.config.fixed import factors
from lockstep.data.plan import Plan, share
from lockstep.errors import OtherWork, RunFailed
from lockstep.model.optimizer import make_schedule
from lockstep.model.schedule import lr_factor
from lockstep.rank import checkpoint, readback, warming
from lockstep.rank.dev_split import DevSplit
from lockstep.rank.losses import Losses
from lockstep.rank.resumption import Resumption
from lockstep.rank.snapshots import Snapshots
from lockstep.rank.training import Training
from lockstep.tasks._task import Labels, Samples, take_labels

# The initial loss scale of a trial in fp16. PyTorch begins with 65,536, with which gradients may overflow and a step is
# skipped. That is no mistake, but whether it happens depends on how many ranks share the loss.
TRIAL_LOSS_SCALE = 2.0**12


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    step: int
    ids: np.ndarray  # int64 [n], positions in the training split
    inputs: dict[str, torch.Tensor]  # the model's inputs by name, each [n, ...]
    labels: Labels  # [n, ...]
    last: bool  # whether it is the last of its optimizer step
    planned: bool = True  # whether all its samples belong to the plan's step


class Replay:
    """One rank's part of the plan, for the loop of a strategy or of a framework.

    The loop calls `begin`, then in each step `batches`, `loss`, `trained`, `gradients_ready` and `step_done`, and
    finally `end`.
    """

    def __init__(self, training: Training, plan: Plan, samples: Samples, dev_split: DevSplit):
        self.training, self.plan, self.samples, self.dev_split = training, plan, samples, dev_split
        self.weights = training.task.weights(samples)  # the weight of each sample in the mean loss
        self.steps = plan.steps
        self.done = 0  # the number of steps, including those before an interruption
        schedule = make_schedule(training.strategy.optimizer, training.train, plan.steps, plan.epochs)
        self.schedule = training.strategy.scheduled(schedule)
        self.rates: list[float] = []  # each step's learning rate, if the strategy steps the schedule itself
        dtype = getattr(torch, precisions.of(training.strategy.precision).weights)
        self.resumption = Resumption(self)
        self.snapshots = Snapshots(training, plan, len(samples))
        # This rank's part of each step's loss, [steps]; the mean over ranks that have one is the global batch's loss.
        self.losses = torch.zeros(plan.steps, dtype=dtype, device=training.strategy.world.device)
        # The same for each term of a loss with several terms, before it is multiplied by its factor: [terms, steps].
        self.terms = registry.task_literals(training.settings.task)["TERMS"]
        self.term_losses = self.losses.new_zeros(len(self.terms), plan.steps)
        self.loss_log = Losses(self)
        self.ahead = False  # whether this rank's workers make its next batches

    def batches(self, step: int) -> Iterator[Batch]:
        """This rank's share of the step, in micro-batches."""
        part, of = self.training.strategy.share()
        parts = self.plan.micro_batches(step, part, of, self.training.train.accumulation)
        for number, ids in enumerate(map(self._ordered, parts), 1):
            self.fetching()
            yield self._batch(step, ids, last=number == len(parts), ahead=self.ahead)

    def fetching(self) -> None:
        """Called before a batch is made or requested."""
        if self.training.profiler:
            self.training.profiler.mark("data")

    def brought(self, step: int, ids: np.ndarray, tensors: dict[str, torch.Tensor]) -> Batch:
        """This rank's only batch of a step, with whatever samples a framework's own loader has put into it."""
        labels = take_labels(tensors)
        planned = bool(np.isin(ids, self.plan.step_ids(step)).all())
        return Batch(step, ids, tensors, labels, last=True, planned=planned)

    def _batch(self, step: int, ids: np.ndarray, last: bool, ahead: bool = False) -> Batch:
        if ahead:
            ids, arrays = self.training.workers.next()  # the ledger records these, whatever was ordered
            tensors = self.training.strategy.inputs(arrays)
        else:
            tensors = self.training.strategy.batch(self.samples, ids, self.plan.widths[step])
        labels = take_labels(tensors)
        return Batch(step, ids, tensors, labels, last)

    def _begin_ahead(self) -> None:
        """Have this rank's workers make all remaining batches. Raises RunFailed if some workers are gone."""
        strategy, accumulation = self.training.strategy, self.training.train.accumulation
        make, (part, of) = strategy.collate(), strategy.share()
        self.training.workers.begin(
            (make, self._ordered(ids), strategy.padded_width(int(self.plan.widths[step])))
            for step in range(self.done, self.steps)
            for ids in self.plan.micro_batches(step, part, of, accumulation)
        )
        self.ahead = True
        self.live_settings["workers"] = there = len(self.training.workers.pids)
        if there != self.training.settings.hardware.workers:
            asked = f"workers: the row asks for {self.training.settings.hardware.workers}"
            raise RunFailed(f"{asked}, but only {there} are left; the others were killed, or ran out of memory")

    def one_of_each_shape(self) -> Iterator[tuple[int, Batch]]:
        """This rank's share of one micro-batch of each size and width in the plan, with its step; the widest first.

        Every rank gets equally many, from the same steps.
        """
        accumulation = self.training.train.accumulation
        widths = np.array([self.training.strategy.padded_width(int(width)) for width in self.plan.widths])
        _, firsts = np.unique(np.stack([-widths, np.diff(self.plan.starts)]), axis=1, return_index=True)
        part, of = self.training.strategy.share()
        for step in firsts.tolist():
            parts = np.array_split(self.plan.step_ids(step), accumulation)
            for size in dict.fromkeys(map(len, parts)):  # one or two
                first = next(ids for ids in parts if len(ids) == size)
                yield step, self._batch(step, self._ordered(share(first, part, of)), last=False)

    def _ordered(self, ids: np.ndarray) -> np.ndarray:
        """A batch's samples in the order of the run's settings; only references of the proof reorder them."""
        order = self.training.settings.order
        if order == "reversed":
            return ids[::-1].copy()
        if order == "rotated":
            return np.roll(ids, len(ids) // 2)
        return ids

    def loss(self, batch: Batch, outputs) -> torch.Tensor:
        """The batch's part of the mean loss over the global batch; `outputs` is what the model returned.

        Frameworks average gradients over ranks, whose shares may be unequal. So the mean is computed from sums: the sum
        of this rank's losses * the number of replicas (* the number of parts of a replica's loss) / the total weight of
        the global batch's samples. If a batch has samples that are not the plan's, each rank takes the mean over its
        own samples, as a loop without a plan does.
        """
        strategy, global_batch = self.training.strategy, self.plan.step_ids(batch.step)
        sums = self.training.task.loss(strategy.module, outputs, batch.labels, self.losses.dtype)
        _, of = strategy.share()
        parts = max(1, strategy.world.loss_parts)
        counted, times = (global_batch, of * parts) if batch.planned else (batch.ids, 1)
        if not self.terms:
            return strategy.whole_loss(sums) * (times / self.weights[counted].sum())
        means = [sums[name] * (times / self.weights[name][counted].sum()) for name in self.terms]
        self.last_means = torch.stack(means).detach()  # kept until `trained` records them
        counts = factors(self.training.train.loss_weights, self.terms)
        return sum(factor * mean for factor, mean in zip(counts, means, strict=True))

    def trained(self, batch: Batch, loss: torch.Tensor | None) -> None:
        """Called when a batch's gradients are computed: add its samples to the ledger, and its loss if there is one."""
        if self.training.strategy.world.loss_parts:
            there = self.losses.device  # a framework may compute the loss on another GPU
            self.losses[batch.step] += loss.detach().to(there)
            if self.terms:
                self.term_losses[:, batch.step] += self.last_means.to(there)
        self.training.files.consume(batch.step, batch.ids)

    def mean_losses(self) -> list[float]:
        """The mean loss over each step's global batch. Call on every rank.

        Raises RunFailed if a loss is not finite, and OtherWork if ranks of one replica differ.
        """
        losses = self._of_ranks_with_a_loss(self.losses).mean(dim=0).tolist()
        wrong = next((step for step, loss in enumerate(losses, 1) if not np.isfinite(loss)), None)
        if wrong:
            failure = f"the loss is {losses[wrong - 1]} in step {wrong}"
            raise RunFailed(f"{failure}; lower train.learning_rate or set train.clip")
        return losses

    def mean_terms(self) -> dict[str, list[float]]:
        """The mean of each term over each step's global batch, if the loss has several terms. Call on every rank."""
        if not self.terms:
            return {}
        means = self._of_ranks_with_a_loss(self.term_losses).mean(dim=0).tolist()
        return dict(zip(self.terms, means, strict=True))

    def _of_ranks_with_a_loss(self, own: torch.Tensor) -> torch.Tensor:
        """The losses of all ranks that have one, [ranks, ..., steps], from each rank's own [..., steps].

        Ranks that hold a replica together and each have its whole loss must have computed it from the same samples,
        weights and dropout. Raises OtherWork if they differ in a single bit, as they do not hold one replica then.
        """
        strategy = self.training.strategy
        place = [strategy.world.replica, strategy.world.loss_parts]
        places = strategy.all_gather(torch.tensor(place, device=own.device)).cpu()
        losses = strategy.all_gather(own)
        if strategy.world.replicas < strategy.world.size:
            require_equal_in_replicas(losses.cpu(), places.tolist())
        return losses[(places[:, 1] > 0).to(losses.device)]

    def noted_losses(self, step: int) -> torch.Tensor:
        """This rank's part of a step's loss, and of each of its terms: [1 + terms]."""
        return torch.cat([self.losses[step, None], self.term_losses[:, step]])

    def gradients_ready(self, step: int) -> None:
        """Called when the step's gradients are complete and not yet clipped.

        Every strategy's loop calls this once per step, so whatever is recorded of gradients belongs here. It must not
        synchronise in a timed run; so the norm is computed in a trial only, in its first step. Raises RunFailed if the
        norm is not finite.
        """
        if not self.training.strategy.keeps_schedule:
            self.rates.append(readback.live_rate(self.training.strategy))
        if self.training.settings.kind.compared and step == 0:
            norm = self.training.strategy.gradient_norm().item()
            if not math.isfinite(norm):
                raise RunFailed(f"the gradient's norm is {norm} in step 1; take another precision or model")
            self.training.files.gradient_norm = norm

    def begin(self) -> None:
        """Open the timed window, after the model is wrapped. Raises RunFailed if it is not as the row asks for."""
        settings = self.training.settings
        if settings.kind.compared and precisions.of(settings.precision).scaled:
            self.training.strategy.start_loss_scale(TRIAL_LOSS_SCALE * settings.loss_times)
        first = next(self.batches(self.done))  # what a strategy makes for its first batch is not timed
        self.live_settings = readback.check(self.training.strategy, settings, first.inputs)
        if settings.saved:
            self.resumption.restore(Path(settings.saved))
        if self.training.workers:
            self._begin_ahead()
        self.training.clock.part("check")
        if settings.warm:
            warming.warm_up(self)
        self._open()
        self.loss_log.begin()

    def step_done(self, step: int) -> None:
        """Called when weights and learning rate are updated: the clock ticks; evaluate and save what is due."""
        self.training.clock.tick()
        self.done += 1
        self.training.progress.step()
        self.loss_log.step_done()
        if self.training.meter:
            self.training.meter.look()
        if self.training.profiler:
            self.training.profiler.step_done(step)
        evaluated, saved = self.dev_split.due(self.done), self.resumption.due(self.done)
        kept = self.snapshots.due(self.done)
        if evaluated or kept or saved:
            self.end()
            if evaluated:
                self.dev_split.look(self.done)
            if kept:
                self.snapshots.take(self.done, self.dev_split.history)
            if saved:
                self.resumption.save(self.done)
            self._open()

    def end(self) -> None:
        """Close the timed window. Raises RunFailed if the learning rate must be the schedule's and is not."""
        self.training.clock.close()
        self.loss_log.hand_over()
        if self.training.meter:
            self.training.meter.stop()
        if self.training.gauge:
            self.training.gauge.stop()
        if not self.training.strategy.keeps_schedule:
            return
        factor = lr_factor(self.training.train, self.steps, self.plan.epochs)
        readback.check_rate(self.training.strategy, self.training.settings, factor, self.done)

    def _open(self) -> None:
        strategy = self.training.strategy
        if self.training.gauge:
            self.training.gauge.start()
        if self.training.meter:
            self.training.meter.start()
        self.training.clock.open(lambda: checkpoint.barrier(strategy))


def require_equal_in_replicas(losses: torch.Tensor, places: list[list[int]]) -> None:
    """Raises OtherWork unless ranks that each have the whole loss of a replica have the same losses, bit for bit.

    losses: [ranks, ..., steps]; places: each rank's replica, and the number of parts of its loss.
    """
    first: dict[int, int] = {}
    for rank, (replica, parts) in enumerate(places):
        if parts != 1:
            continue
        other = first.setdefault(replica, rank)
        # NaN differs from itself; it is reported elsewhere.
        differing = (losses[rank] != losses[other]) & ~(losses[rank].isnan() & losses[other].isnan())
        if differing.any():
            step = int(differing.reshape(-1, losses.shape[-1]).any(dim=0).nonzero()[0])
            raise OtherWork(
                f"ranks {other} and {rank} hold replica {replica} together, but their losses differ from step"
                f" {step + 1} on: their dropout, their weights or their samples are not the same"
            )
