"""The plan: for each optimizer step, the samples of the global batch, in order, and the length they are padded to.

The plan is fixed before any strategy runs. Replica r of n trains the r-th share of every global batch. So every
strategy does the same work in the same order at any world size, and the ledgers can be checked against the plan.
"""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config.sections import Train
from lockstep.errors import BadInput, brief
from lockstep.files import atomic_file, hash_arrays
from lockstep.paths import lengths_file, require

# The number of batches whose texts are sorted by length together. More batches mean less padding; fewer batches mix
# lengths better over time.
POOL = 100


@dataclass(frozen=True)
class Plan:
    """All arrays are int64. Sample ids are positions in the training split."""

    ids: np.ndarray  # [samples] the ids of every step, one step after the other
    starts: np.ndarray  # [steps + 1] where each step's ids begin in `ids`
    widths: np.ndarray  # [steps] the padded length of each step, in tokens
    epochs: np.ndarray  # [steps] the epoch that each step belongs to, from 0
    dropped: np.ndarray  # [n, 2] epoch and id of each sample left out because its global batch would not be full

    @property
    def steps(self) -> int:
        return len(self.widths)

    @property
    def hash(self) -> str:
        return hash_arrays(vars(self))

    def step_ids(self, step: int) -> np.ndarray:
        """The ids of one global batch, shape [global batch]."""
        return self.ids[self.starts[step] : self.starts[step + 1]]

    def micro_batches(self, step: int, part: int, parts: int, accumulation: int) -> list[np.ndarray]:
        """The micro-batches of one replica in one optimizer step: `part` of `parts` of each of `accumulation` parts."""
        return [share(ids, part, parts) for ids in np.array_split(self.step_ids(step), accumulation)]

    def epoch_ends(self, samples: int) -> dict[int, int]:
        """The number of steps at the end of each epoch, by the epoch's number from 1; `samples` is the split's size.

        An epoch that `max_steps` cuts short has no end.
        """
        trained = np.bincount(self.epochs, np.diff(self.starts)).astype(int)
        seen = trained + np.bincount(self.dropped[:, 0], minlength=len(trained))[: len(trained)]
        ends = np.searchsorted(self.epochs, np.arange(len(trained)), side="right")
        return {int(epoch) + 1: int(ends[epoch]) for epoch in np.flatnonzero(seen == samples)}

    def padding_efficiency(self, lengths: np.ndarray) -> float:
        """The share of tokens that are not padding, 0 to 1."""
        return float(lengths[self.ids].sum() / (np.diff(self.starts) * self.widths).sum())

    def first(self, steps: int) -> "Plan":
        """The plan of the first `steps` steps only."""
        return Plan(
            ids=self.ids[: self.starts[steps]],
            starts=self.starts[: steps + 1],
            widths=self.widths[:steps],
            epochs=self.epochs[:steps],
            dropped=self.dropped,
        )

    def excerpt(self, warmup: int, count: int) -> "Plan":
        """The first `warmup` steps, then the same `count` steps twice, whose widths represent those of all steps.

        The steps are sorted by width and divided into `count` equal parts; one step is taken from each. If the plan has
        fewer steps, some are repeated.
        """
        middles = (np.arange(count) + 0.5) * self.steps / count
        chosen = np.sort(np.argsort(self.widths, kind="stable")[middles.astype(int)])
        steps = np.concatenate([np.arange(warmup) % self.steps, chosen, chosen])
        sizes = np.diff(self.starts)[steps]
        return Plan(
            ids=np.concatenate([self.step_ids(step) for step in steps]),
            starts=np.concatenate([[0], np.cumsum(sizes)]),
            widths=self.widths[steps],
            epochs=self.epochs[steps],
            dropped=self.dropped,
        )

    def save(self, path: Path) -> None:
        with atomic_file(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **vars(self))

    @staticmethod
    def load(path: Path) -> "Plan":
        """Load a stored plan. Raises BadInput if the file is damaged."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Plan(**arrays)
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(f"{path}: is damaged ({brief(error)}). Remove it, and run plan.py again.") from None


def save_lengths(data: Path, lengths: np.ndarray) -> None:
    """Write the length of each sample of the training split, which plans need, into a folder of prepared data."""
    np.save(lengths_file(data), lengths)


def load_lengths(data: Path) -> np.ndarray:
    """Read the lengths that `save_lengths` wrote: int64 [n]."""
    return np.load(require(lengths_file(data), "prepare.py"), allow_pickle=False)


def share(ids: np.ndarray, part: int, parts: int) -> np.ndarray:
    """Share `part` of `parts` of `ids`. Shares are contiguous, in order, and differ in size by at most 1."""
    return np.array_split(ids, parts)[part]


def of_training(train: Train, lengths: np.ndarray, longest: int) -> Plan:
    """The plan of a training with these settings; the other arguments are those of `make`."""
    return make(
        lengths,
        global_batch=train.global_batch,
        epochs=train.epochs,
        seed=train.seed,
        batching=train.batching,
        max_steps=train.max_steps,
        longest=longest,
    )


def make(
    lengths: np.ndarray,
    *,
    global_batch: int,
    epochs: int,
    seed: int,
    batching: str,
    max_steps: int | None = None,
    longest: int = 0,
) -> Plan:
    """Plan the training of samples of these `lengths` (int, tokens).

    Each epoch shuffles all ids by a seed of its own and drops the last ones that do not fill a global batch. `batching`
    says how the others become batches: `plain` keeps their order; `bucketed` sorts pools of them by length, so that a
    batch needs little padding, and shuffles the batches; `padded` is plain, with every text padded to `longest` tokens.

    Raises BadInput if there are fewer samples than one global batch.
    """
    count, batches = len(lengths), len(lengths) // global_batch
    if not batches:
        raise BadInput(
            f"train.global_batch: {global_batch}, but the training split has only {count} samples."
            " Lower it, or give more data."
        )
    if max_steps:
        epochs = min(epochs, math.ceil(max_steps / batches))  # skip epochs that max_steps never reaches
    ids, dropped = [], []
    for epoch in range(epochs):
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(count)
        order, tail = order[: batches * global_batch], order[batches * global_batch :]
        if batching == "bucketed":
            order = _bucketed(order, lengths, global_batch, random)
        ids.append(order.reshape(batches, global_batch))
        dropped += [(epoch, sample) for sample in sorted(tail)]
    ids = np.concatenate(ids)[:max_steps]
    steps = len(ids)
    return Plan(
        ids=ids.reshape(-1).astype(np.int64),
        starts=np.arange(steps + 1, dtype=np.int64) * global_batch,
        widths=np.maximum(lengths[ids].max(axis=1), longest if batching == "padded" else 0).astype(np.int64),
        epochs=np.arange(steps, dtype=np.int64) // batches,
        dropped=np.array(dropped, dtype=np.int64).reshape(-1, 2),
    )


def _bucketed(order: np.ndarray, lengths: np.ndarray, global_batch: int, random: np.random.Generator) -> np.ndarray:
    pools = np.split(order, np.arange(POOL * global_batch, len(order), POOL * global_batch))
    batches = np.concatenate(
        [pool[np.argsort(lengths[pool], kind="stable")].reshape(-1, global_batch) for pool in pools]
    )
    # Every share of a batch, of a rank or of a micro-batch, then has both short and long texts.
    return random.permutation(batches)[:, _spread(global_batch)].reshape(-1)


def _spread(count: int) -> np.ndarray:
    """A permutation of 0 to count - 1 in which any run of neighbours is spread evenly over the whole range.

    The order is that of van der Corput's sequence (1935): the binary digits of 0, 1, 2, ... reversed.
    """
    digits = max(1, (count - 1).bit_length())
    mirrored = sum(((np.arange(count) >> digit) & 1) << (digits - 1 - digit) for digit in range(digits))
    return np.argsort(np.argsort(mirrored))
