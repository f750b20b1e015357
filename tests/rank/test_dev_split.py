"""Evaluation on the dev split: on which samples, and how long it took."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lockstep.config.hardware import World
from lockstep.data.tokens import Tokens
from lockstep.errors import RunFailed
from lockstep.rank import dev_split
from lockstep.rank.clock import Clock
from lockstep.rank.dev_split import Chosen, DevSplit, chosen, gather_results


def split(count: int) -> Tokens:
    """Texts of 1 to 7 tokens; each text's tokens are its number."""
    lengths = np.arange(count) % 7 + 1
    return Tokens(np.repeat(np.arange(count), lengths), lengths, np.arange(count) % 3, pad_id=0)


@given(count=st.integers(1, 60), most=st.integers(1, 80), size=st.integers(1, 9))
def test_a_choice_holds_so_many_samples_each_once_as_they_are_in_the_split(count, most, size):
    whole = split(count)
    some = chosen(whole, most)
    assert len(some) == min(count, most)
    assert sorted(np.concatenate(some.batches(size))) == list(range(len(some)))
    assert all(len(ids) <= size for ids in some.batches(size))
    numbers = [int(some.batch(np.array([place]), 1)["input_ids"][0, 0]) for place in range(len(some))]
    assert numbers == sorted(set(numbers))
    assert some.lengths.tolist() == whole.lengths[numbers].tolist()
    assert some.labels.tolist() == whole.labels[numbers].tolist()


def test_all_are_taken_where_no_fewer_are_asked_for():
    whole = split(5)
    assert chosen(whole, None) is chosen(whole, 5) is chosen(whole, 9) is whole


def test_the_choice_is_the_same_each_time_and_no_head_of_the_split():
    first, again = (chosen(split(50), 10) for _ in range(2))
    assert first.ids.tolist() == again.ids.tolist() != list(range(10))


class Echo(torch.nn.Module):
    """Says of each text its first token and its length."""

    def forward(self, input_ids, attention_mask):
        return torch.stack([input_ids[:, 0], attention_mask.sum(dim=1)], dim=1).float()


def training(now, batch: int = 4) -> SimpleNamespace:
    """One of one rank, by a clock of its own, which goes on by a second with each batch, and 5 while others are met."""
    clock = Clock(lambda: now[0])

    def inputs(arrays):
        now[0] += 1
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def all_gather(tensor):
        now[0] += 5 if tensor.shape == (1,) else 0  # the barrier's
        return tensor[None]

    strategy = SimpleNamespace(
        model=Echo(),
        world=World(0, 0, 1, torch.device("cpu"), None),
        forward=lambda inputs: strategy.model(**inputs),
        inputs=inputs,
        padded_width=lambda width: width,
        all_gather=all_gather,
        gathered=lambda *_: None,
    )
    return SimpleNamespace(
        strategy=strategy,
        clock=clock,
        train=SimpleNamespace(eval_every=2, eval_samples=None, global_batch=batch, checkpoint="last", pictures_every=0),
        task=SimpleNamespace(
            results=lambda outputs, labels: outputs, scores=lambda results, samples: {"loss": float(len(samples))}
        ),
        files=SimpleNamespace(event=lambda *_: None),
        progress=SimpleNamespace(alive=lambda: None),
    )


def test_of_a_choice_each_result_is_gathered_once_and_in_order():
    some = Chosen(split(30), np.array([3, 9, 10, 28]))
    results = gather_results(training([0.0], batch=3), some)
    assert results.tolist() == [[3, 4], [9, 3], [10, 4], [28, 1]]


@pytest.mark.parametrize(("most", "support", "batches"), [(None, 30, 8), (10, 10, 3)])
def test_evaluation_is_timed_by_itself(capsys, most, support, batches):
    now = [100.0]
    made = training(now)
    made.train.eval_samples = most
    dev_split = DevSplit(made, SimpleNamespace(steps=4), split(30))
    assert [step for step in range(1, 5) if dev_split.due(step)] == [2]
    for step in (2, 4):
        dev_split.evaluate(step)
        now[0] += 60  # saving
    assert [scores["support"] for scores in dev_split.history] == [support] * 2
    assert made.clock.evaluation == 2 * batches  # neither saving, nor waiting for others before it
    assert "step 4/4: dev loss" in capsys.readouterr().out


def on_ranks(world_size: int, samples: Tokens) -> list[torch.Tensor]:
    """What each of so many ranks, here threads, gathers of a split."""
    together, slots = threading.Barrier(world_size), [None] * world_size

    def rank(number: int) -> torch.Tensor:
        def all_gather(tensor):
            slots[number] = tensor
            together.wait(60)
            gathered = torch.stack(slots)
            together.wait(60)
            return gathered

        made = training([0.0], batch=100)
        made.strategy.all_gather = all_gather
        made.strategy.world = World(number, number, world_size, torch.device("cpu"), None)
        return gather_results(made, samples)

    with ThreadPoolExecutor(world_size) as threads:
        return [done.result() for done in [threads.submit(rank, number) for number in range(world_size)]]


def as_distributed_sampler(ids: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """A rank's share as PyTorch's sampler gives it: samples are repeated until all shares are equal."""
    known = ids[ids >= 0]
    return known[list(DistributedSampler(known, world_size, rank, shuffle=False))]


@pytest.mark.parametrize(("world_size", "counted"), [(3, 10_002), (7, 10_003)])
def test_ten_thousand_samples_are_counted_once_each(world_size, counted, monkeypatch):
    """Negative control: shared out as DistributedSampler does, some are counted twice, which is refused."""
    samples = Tokens(np.arange(10_000), np.ones(10_000, dtype=np.int64), np.zeros(10_000, dtype=np.int64), pad_id=0)
    for results in on_ranks(world_size, samples):
        assert results[:, 0].tolist() == list(range(10_000))
    shares = [as_distributed_sampler(np.arange(10_000), rank, world_size) for rank in range(world_size)]
    assert sum(map(len, shares)) == counted
    monkeypatch.setattr(dev_split, "share", as_distributed_sampler)
    with pytest.raises(RunFailed, match="each sample of the split exactly once"):
        on_ranks(world_size, samples)
