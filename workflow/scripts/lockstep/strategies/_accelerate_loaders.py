"""Accelerate's own data loaders, over the plan's order of samples and over a split; used by accelerate.py.

A DataLoader yields positions in an order of samples, and Accelerate decides which rank gets which of them, as in any
loop whose loaders went through `accelerator.prepare`. Each batch carries the samples that a rank was given, as `ids`.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.plan import Plan


class InOrder(Sampler):
    """Positions in an order of samples, one epoch after another; `ends` says where in the order each epoch ends."""

    def __init__(self, ends: list[int]):
        self.bounds, self.epoch = [0, *ends], 0

    def set_epoch(self, epoch: int) -> None:  # Accelerate calls it too
        self.epoch = epoch

    def __iter__(self):
        return iter(range(*self.bounds[self.epoch : self.epoch + 2]))

    def __len__(self):
        return self.bounds[self.epoch + 1] - self.bounds[self.epoch]


def divided(accelerator, samples, ids: np.ndarray, widths: np.ndarray, sampler: Sampler, size: int, drop_last: bool):
    """A loader of `samples` (tasks/_task.py) in the order `ids`, divided among ranks by Accelerate.

    Args:
        ids, widths: int64 [n], the samples in order, and the width to which the batch of each is padded.
        size: samples in a batch of all ranks together; Accelerate is told the number that it expects.
        drop_last: whether samples that do not fill a batch are left out.
    """

    def collate(places: list[int]) -> dict:
        arrays = samples.batch(ids[places], int(widths[places].max()))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        # As an array, ids stay on the host, so no GPU delays reading them. Dispatched batches can hold tensors only.
        return tensors | {"ids": torch.from_numpy(ids[places]) if accelerator.dispatch_batches else ids[places]}

    one = size if accelerator.split_batches else size // accelerator.num_processes
    loader = DataLoader(range(len(ids)), batch_size=one, sampler=sampler, drop_last=drop_last, collate_fn=collate)
    return accelerator.prepare(loader)


class Training:
    """The batches of a plan as Accelerate gives them to this rank, one per step."""

    def __init__(self, accelerator, samples, plan: Plan, drop_last: bool):
        self.accelerator, self.size, self.drop_last = accelerator, int(plan.starts[1]), drop_last
        ids, widths, ends = self._order(plan, samples)
        self.sampler = InOrder(ends)
        self.loader = divided(accelerator, samples, ids, widths, self.sampler, self.size, drop_last)
        self.batches: Iterator[dict] | None = None

    def _order(self, plan: Plan, samples) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The plan's samples, the widths of their batches, and where each epoch ends.

        Unless `drop_last` is set, each whole epoch ends with the samples that the plan leaves out because they do not
        fill a batch.
        """
        ids, widths, ends = [], [], []
        firsts = np.flatnonzero(np.diff(plan.epochs, prepend=-1))
        for first, end in zip(firsts, [*firsts[1:], plan.steps], strict=True):
            ids.append(plan.ids[plan.starts[first] : plan.starts[end]])
            widths.append(np.repeat(plan.widths[first:end], self.size))
            left = plan.dropped[plan.dropped[:, 0] == plan.epochs[first], 1]
            if not self.drop_last and len(ids[-1]) + len(left) == len(samples):
                ids[-1] = np.concatenate([ids[-1], left])
                widths[-1] = np.concatenate([widths[-1], samples.lengths[left]])
            ends.append(len(ids[-1]) + (ends[-1] if ends else 0))
        return np.concatenate(ids), np.concatenate(widths), ends

    def next(self, done: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """This rank's batch for the step that follows `done` steps: its ids, int64 [n], and its tensors."""
        if self.batches is None:
            self.batches = self._after(done)
        return _ids_and_inputs(next(self.batches))

    def _after(self, done: int) -> Iterator[dict]:
        for epoch in range(len(self.sampler.bounds) - 1):
            self.loader.set_epoch(epoch)
            self.sampler.set_epoch(epoch)
            whole, rest = divmod(len(self.sampler), self.size)
            steps = whole + bool(rest and not self.drop_last)
            if done >= steps:
                done -= steps
                continue
            yield from _quietly(self._skipped(done))
            done = 0

    def _skipped(self, steps: int):
        """The loader without its first steps. Accelerate's own function skips them; it counts what rank 0 reads."""
        if not steps:
            return self.loader
        dispatched = self.accelerator.dispatch_batches and not self.accelerator.split_batches
        batches = steps * (self.accelerator.num_processes if dispatched else 1)
        return self.accelerator.skip_first_batches(self.loader, batches)


def evaluation(accelerator, samples, size: int) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """A split in batches of `size` samples of similar length, divided among ranks by Accelerate: ids and tensors."""
    batches = samples.batches(size)
    ids = np.concatenate(batches)
    widths = np.concatenate([np.full(len(batch), samples.lengths[batch].max()) for batch in batches])
    loader = divided(accelerator, samples, ids, widths, InOrder([len(ids)]), size, drop_last=False)
    yield from map(_ids_and_inputs, _quietly(loader))


def _quietly(loader) -> Iterator[dict]:
    """A loader's batches, with the random state restored after the first of them.

    A loader draws a seed for its workers when iteration begins, which no other row does.
    """
    random, batches = torch.get_rng_state(), iter(loader)
    first = next(batches)
    torch.set_rng_state(random)
    yield first
    yield from batches


def _ids_and_inputs(batch: dict) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    ids = batch.pop("ids")
    return (ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids), batch
