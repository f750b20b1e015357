"""The plan and its shares: whatever the data, every sample is trained at most once an epoch, by one rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import plan
from lockstep.errors import BadInput

lengths = st.lists(st.integers(2, 60), min_size=1, max_size=300).map(np.array)
batchings = st.sampled_from(["plain", "bucketed"])


@given(lengths, st.integers(1, 40), st.integers(1, 3), st.integers(0, 99), batchings)
def test_each_epoch_holds_every_sample_once_or_lists_it_as_dropped(lengths, batch, epochs, seed, batching):
    if len(lengths) < batch:
        with pytest.raises(BadInput, match=r"train\.global_batch"):
            plan.make(lengths, global_batch=batch, epochs=epochs, seed=seed, batching=batching)
        return
    made = plan.make(lengths, global_batch=batch, epochs=epochs, seed=seed, batching=batching)
    for epoch in range(epochs):
        trained = np.concatenate([made.step_ids(step) for step in np.flatnonzero(made.epochs == epoch)])
        dropped = made.dropped[made.dropped[:, 0] == epoch, 1]
        assert sorted([*trained, *dropped]) == list(range(len(lengths)))
        assert len(dropped) == len(lengths) % batch
    for step in range(made.steps):
        assert made.widths[step] == lengths[made.step_ids(step)].max()


@given(lengths.filter(lambda numbers: len(numbers) >= 4), st.integers(0, 99), batchings)
def test_the_seed_decides(lengths, seed, batching):
    first, same = (plan.make(lengths, global_batch=4, epochs=2, seed=seed, batching=batching) for _ in range(2))
    assert first.hash == same.hash


def test_another_seed_or_epoch_is_another_order():
    lengths = np.full(100, 7)
    first = plan.make(lengths, global_batch=10, epochs=2, seed=1, batching="plain")
    other = plan.make(lengths, global_batch=10, epochs=2, seed=2, batching="plain")
    assert first.hash != other.hash
    assert not np.array_equal(first.ids[:100], first.ids[100:])


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 5))
def test_shares_make_up_the_global_batch(count, world_size, accumulation):
    ids = np.arange(count)
    made = plan.Plan(ids, np.array([0, count]), np.array([1]), np.array([0]), np.empty((0, 2), dtype=int))
    ranks = [made.micro_batches(0, rank, world_size, accumulation) for rank in range(world_size)]
    assert sorted(np.concatenate([part for rank in ranks for part in rank])) == list(ids)
    assert all(len(rank) == accumulation for rank in ranks)
    sizes = [len(plan.share(ids, rank, world_size)) for rank in range(world_size)]
    assert max(sizes) - min(sizes) <= 1


def test_max_steps_cuts_the_plan():
    made = plan.make(np.full(100, 5), global_batch=10, epochs=3, seed=0, batching="plain", max_steps=13)
    assert made.steps == 13
    assert made.epochs.tolist() == [0] * 10 + [1] * 3


def test_buckets_pad_little_and_stay_in_random_order():
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(2.6, 0.8, 8000), 3, 128).astype(int)
    bucketed, plain = (
        plan.make(lengths, global_batch=64, epochs=1, seed=0, batching=batching) for batching in ("bucketed", "plain")
    )
    assert bucketed.padding_efficiency(lengths) > 0.92
    assert plain.padding_efficiency(lengths) < 0.5
    # The order of the batches does not follow their length, and within a batch no rank gets the shorter texts.
    assert abs(np.corrcoef(np.arange(bucketed.steps), bucketed.widths)[0, 1]) < 0.3
    halves = lengths[bucketed.ids].reshape(-1, 2, 32).sum(axis=2).sum(axis=0)
    assert abs(halves[0] / halves[1] - 1) < 0.02


@given(lengths.filter(lambda numbers: len(numbers) >= 16), st.integers(2, 4), st.integers(1, 2), st.integers(0, 99))
def test_ranks_get_like_many_tokens(lengths, world_size, accumulation, seed):
    made = plan.make(lengths, global_batch=16, epochs=1, seed=seed, batching="bucketed")
    for step in range(made.steps):
        texts = lengths[made.step_ids(step)]
        mean, spread = texts.mean(), texts.max() - texts.min()
        for rank in range(world_size):
            for part in made.micro_batches(step, rank, world_size, accumulation):
                # With texts drawn at random the mean would vary by the whole spread.
                assert abs(lengths[part].mean() - mean) <= 0.51 * spread


def test_buckets_do_not_order_labels():
    """If labels correlate with length, every part of training still has them in about equal shares."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 6, 12_800)
    lengths = np.clip(random.lognormal(2.2 + 0.2 * labels, 0.6), 3, 128).astype(int)
    made = plan.make(lengths, global_batch=64, epochs=1, seed=0, batching="bucketed")
    quarters = labels[made.ids].reshape(4, -1)
    shares = np.stack([np.bincount(quarter, minlength=6) / len(quarter) for quarter in quarters])
    assert np.abs(shares - shares.mean(axis=0)).max() < 0.04


def test_a_plan_is_the_same_after_saving(tmp_path):
    made = plan.make(np.arange(3, 60), global_batch=5, epochs=2, seed=3, batching="bucketed")
    made.save(tmp_path / "plan.npz")
    assert plan.Plan.load(tmp_path / "plan.npz").hash == made.hash


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_an_excerpt_stands_for_the_whole_plan(batches, count, seed):
    """After the warm-up, it has the same steps twice, with widths distributed like those of all steps."""
    lengths = np.random.default_rng(seed).integers(3, 100, batches * 4)
    whole = plan.make(lengths, global_batch=4, epochs=1, seed=seed, batching="bucketed")
    part = whole.excerpt(3, count)
    assert part.steps == 3 + 2 * count
    for step in range(part.steps):
        assert any(np.array_equal(part.step_ids(step), whole.step_ids(other)) for other in range(whole.steps))
        assert part.widths[step] == lengths[part.step_ids(step)].max()
    assert np.array_equal(part.widths[3 : 3 + count], part.widths[3 + count :])
    shares = (np.arange(count) + 0.5) / count
    quantiles = np.quantile(whole.widths, shares, method="inverted_cdf")
    assert (
        np.abs(np.sort(part.widths[3 : 3 + count]) - quantiles).max() <= np.diff(np.sort(whole.widths), prepend=0).max()
    )


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 99))
def test_the_first_steps_of_a_plan_are_its_own(batches, epochs, seed):
    whole = plan.make(np.arange(1, 4 * batches + 2), global_batch=4, epochs=epochs, seed=seed, batching="bucketed")
    for steps in {1, whole.steps // 2 or 1, whole.steps}:
        part = whole.first(steps)
        assert part.steps == steps
        assert np.array_equal(np.concatenate([part.step_ids(step) for step in range(steps)]), part.ids)
        for step in range(steps):
            assert np.array_equal(part.step_ids(step), whole.step_ids(step))
            assert (part.widths[step], part.epochs[step]) == (whole.widths[step], whole.epochs[step])
    assert whole.first(whole.steps).hash == whole.hash


@pytest.mark.parametrize("size", [0, 1, 300])
def test_a_plan_that_was_cut_off_is_one_message(tmp_path, size):
    file = tmp_path / "plan.npz"
    plan.make(np.arange(1, 100), global_batch=8, epochs=2, seed=1, batching="bucketed").save(file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(BadInput, match=r"plan\.npz: is damaged \(.+\)\. Remove it, and run plan\.py again\."):
        plan.Plan.load(file)
