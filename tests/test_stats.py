"""Medians, ratios and ranks, held against what is worked out by hand, and against what must always hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import stats
from lockstep.comparison import unpaired

times = st.dictionaries(st.integers(1, 9), st.floats(0.5, 50), min_size=1, max_size=9)


def test_quartiles():
    assert stats.spread([4.0, 1.0, 3.0, 2.0]) == stats.Spread(2.5, 1.75, 3.25, 4)


def test_a_ratio_is_taken_block_by_block():
    found = stats.ratio({1: 10, 2: 20, 3: 33}, {1: 5, 2: 8, 3: 30, 4: 1})
    # Student's t for two degrees of freedom is 4.303; the logarithms' mean .568, their standard deviation .425.
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 0.6149, 5.0671), rel=1e-4)
    assert (found.n, found.kind, found.distinct) == (3, "interval", False)


def test_one_block_proves_nothing():
    found = stats.ratio({1: 10}, {1: 5, 2: 5})
    assert (found.value, found.kind, found.distinct) == (2.0, "", False)


def test_without_a_common_block_there_is_no_ratio():
    assert stats.ratio({1: 10}, {2: 5}) is None


def test_five_blocks_make_a_bootstrap_interval_that_is_narrower_than_the_range():
    ours = dict(enumerate([1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.3]))
    found = stats.ratio(ours, dict.fromkeys(ours, 2.0))
    assert found.kind == "interval"
    assert 0.49 <= found.low <= found.value <= found.high < 0.65
    assert found == stats.ratio(ours, dict.fromkeys(ours, 2.0))  # seeded


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_few_blocks_rarely_tell_apart_what_is_the_same(blocks):
    random, told = np.random.default_rng(blocks), 0
    for _ in range(400):
        ours, theirs = (dict(enumerate(np.exp(random.normal(0, 0.05, blocks)).tolist())) for _ in range(2))
        told += stats.ratio(ours, theirs).distinct
    assert told / 400 < 0.09


def test_a_bootstrap_interval_holds_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        ours = dict(enumerate(np.exp(random.normal(np.log(2), 0.05, 12)).tolist()))
        found = stats.ratio(ours, dict.fromkeys(ours, 1.0))
        hits += found.low <= 2 <= found.high
    assert hits >= 88


@given(times, times)
def test_a_ratio_seen_from_the_other_row_is_its_inverse(ours, theirs):
    found, other = stats.ratio(ours, theirs), stats.ratio(theirs, ours)
    assert (found is None) == (other is None)
    if found:
        assert found.value * other.value == pytest.approx(1)
        assert found.low <= found.value * (1 + 1e-9)
        assert found.value <= found.high * (1 + 1e-9)
        assert found.n == len(ours.keys() & theirs.keys())


def test_rows_that_cannot_be_told_apart_share_a_rank():
    seconds = {
        "a": {1: 10.0, 2: 20.0, 3: 10.1},
        "b": {1: 10.1, 2: 19.9, 3: 10.0},
        "c": {1: 12.0, 2: 24.0, 3: 12.1},
    }
    assert stats.ranks(seconds) == {"a": 1, "b": 1, "c": 3}


def test_times_of_two_machines_have_no_blocks():
    few = unpaired([4.0, 6.0, 5.0], [2.0, 2.5, 2.0])
    assert (few.value, few.n, few.kind, few.distinct) == (2.5, 3, "interval", True)
    assert 1.2 < few.low < 2.5 < few.high < 4.5
    assert not unpaired([4.0, 6.0, 5.0], [4.1, 5.9, 5.2]).distinct
    many = unpaired([4.0, 6.0, 5.0, 5.0, 5.1], [2.0, 2.5, 2.0, 2.1, 2.0])
    assert many.kind == "interval"
    assert 1.6 <= many.low <= 2.5 <= many.high <= 3.0
