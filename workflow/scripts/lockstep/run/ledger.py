"""The ledger: the samples that each rank trained in each step, checked against the plan; and the steps' times."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np

from lockstep.data.plan import Plan
from lockstep.errors import OtherWork
from lockstep.files import atomic_file
from lockstep.paths import rank_arrays


def gather_ledger(folder: Path, world_size: int) -> dict[str, np.ndarray]:
    """The ledgers of all ranks that count, as three columns of equal length (rank, step, id) by step, then by rank.

    Raises OtherWork if any other rank has not trained the same samples, in every step, as the counting rank of its
    replica.
    """
    ranks = [_of_rank(folder, rank) for rank in range(world_size)]
    counting = {int(arrays["replica"]): rank for rank, arrays in enumerate(ranks) if arrays["counts"]}
    columns = {"rank": [], "step": [], "id": []}
    for rank, arrays in enumerate(ranks):
        if arrays["counts"]:
            columns["rank"].append(np.full(len(arrays["id"]), rank, dtype=np.int64))
            columns["step"].append(arrays["step"])
            columns["id"].append(arrays["id"])
        else:
            _require_same_samples(ranks, rank, counting.get(int(arrays["replica"])))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.lexsort((joined["rank"], joined["step"]))
    return {name: column[order] for name, column in joined.items()}


def _of_rank(folder: Path, rank: int) -> dict[str, np.ndarray]:
    with np.load(rank_arrays(folder, rank), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in ("step", "id", "replica", "counts")}


def _require_same_samples(ranks: list[dict[str, np.ndarray]], rank: int, counting: int | None) -> None:
    ours, replica = ranks[rank], int(ranks[rank]["replica"])
    if counting is None:
        raise OtherWork(f"rank {rank} belongs to replica {replica}, but no rank of this replica counts for the ledger")
    theirs = ranks[counting]
    if not all(np.array_equal(ours[name], theirs[name]) for name in ("step", "id")):
        raise OtherWork(
            f"ranks {counting} and {rank} hold replica {replica} together, but have not trained the same samples"
        )


def gather_steps(folder: Path, world_size: int) -> np.ndarray:
    """The seconds that each step took each rank, float32 [ranks, steps]."""
    seconds = []
    for rank in range(world_size):
        with np.load(rank_arrays(folder, rank), allow_pickle=False) as arrays:
            seconds.append(arrays["seconds"])
    return np.stack(seconds)


def check_ledger(ledger: dict[str, np.ndarray], plan: Plan, times: int = 1) -> None:
    """Raises OtherWork unless the ranks trained exactly the plan's samples in each step; names the first other step.

    times: how often each sample must have been trained. It is above 1 for a published flaw by which every rank trains
    every sample.
    """
    bounds = np.searchsorted(ledger["step"], np.arange(plan.steps + 1))
    if bounds[-1] != len(ledger["step"]):
        raise OtherWork(f"the ledger has steps beyond the plan's {plan.steps}")
    for step in range(plan.steps):
        consumed = ledger["id"][bounds[step] : bounds[step + 1]]
        planned = np.tile(plan.step_ids(step), times)
        if not np.array_equal(np.sort(consumed), np.sort(planned)):
            wanted, got = Counter(planned.tolist()), Counter(consumed.tolist())
            missing, extra = (wanted - got).total(), (got - wanted).total()
            raise OtherWork(
                f"the ledger differs from the plan in step {step + 1}: {missing} of {len(planned)} samples were"
                f" not trained, {extra} were trained that should not have been, or more than once"
            )


def departures(ledger: dict[str, np.ndarray], plan: Plan) -> str:
    """In how many steps the ranks trained other samples than the plan's, and with what effect; empty if in none."""
    bounds = np.searchsorted(ledger["step"], np.arange(plan.steps + 1))
    trained = [np.sort(ledger["id"][begin:end]) for begin, end in itertools.pairwise(bounds)]
    other = [step for step in range(plan.steps) if not np.array_equal(trained[step], np.sort(plan.step_ids(step)))]
    if not other:
        return ""
    wanted, got = Counter(plan.ids.tolist()), Counter(ledger["id"].tolist())
    return (
        f"in {len(other)} of {plan.steps} steps, from step {other[0] + 1} on, it trained other samples than the plan's:"
        f" over all, {(got - wanted).total()} more often than planned, {(wanted - got).total()} less often, and"
        f" {_repeated(trained)} again before all others had been trained"
    )


def _repeated(trained: list[np.ndarray]) -> int:
    """How many samples, given by step, were trained again before every trained sample had been trained once."""
    everyone, seen, repeated = len(np.unique(np.concatenate(trained))), set(), 0
    for ids in trained:
        new = set(ids.tolist()) - seen
        repeated += len(ids) - len(new)
        seen |= new
        if len(seen) == everyone:
            seen = set()
    return repeated


def write_ledger(path: Path, ledger: dict[str, np.ndarray]) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **ledger)


def write_steps(path: Path, seconds: np.ndarray) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, seconds)
