"""Medians, ratios and ranks, held against what is worked out by hand, and against what must hold in simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel, tukey_hsd

from lockstep import stats
from tests import made

times = st.dictionaries(st.integers(1, 9), st.floats(0.5, 50), min_size=1, max_size=9)
SIGMA = 0.036  # of log time, as seen in a default run
ROWS = 11


def experiment(random: np.random.Generator, blocks: int, *, rows: int = ROWS, lost: int = 1, effects=0.0) -> dict:
    """Seconds of rows that take e^effects each, in blocks of which each is faster or slower; some runs are lost."""
    logarithms = random.normal(0, SIGMA, (rows, blocks)) + random.normal(0, 0.03, blocks)
    logarithms += np.broadcast_to(np.reshape(effects, (-1, 1)), logarithms.shape)
    seconds = {f"row{row}": dict(enumerate(np.exp(logarithms[row]).tolist())) for row in range(rows)}
    for place in random.choice(rows * blocks, lost, replace=False).tolist():
        del seconds[f"row{place // blocks}"][place % blocks]
    return seconds


def test_quartiles():
    assert stats.spread([4.0, 1.0, 3.0, 2.0]) == stats.Spread(2.5, 1.75, 3.25, 4)


def test_a_ratio_is_taken_block_by_block():
    ratio = stats.ratio({1: 10, 2: 20, 3: 33}, {1: 5, 2: 8, 3: 30, 4: 1})
    # Student's t for two degrees of freedom is 4.303; the logarithms' mean .568, their standard deviation .425.
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.7652, 0.6149, 5.0671), rel=1e-4)
    assert (ratio.n, ratio.kind, ratio.distinct) == (3, "interval", False)


def test_two_rows_alone_are_a_paired_t_test():
    random = np.random.default_rng(0)
    ours, theirs = (np.exp(random.normal(0, 0.1, 6)) for _ in range(2))
    ratio = stats.ratio(dict(enumerate(ours)), dict(enumerate(theirs)))
    interval = ttest_rel(np.log(ours), np.log(theirs)).confidence_interval(0.95)
    assert (ratio.low, ratio.high) == pytest.approx(tuple(np.exp(interval)))


def test_one_block_proves_nothing():
    ratio = stats.ratio({1: 10}, {1: 5, 2: 5})
    assert (ratio.value, ratio.kind, ratio.distinct) == (pytest.approx(2.0), "", False)


def test_without_a_common_block_there_is_no_ratio():
    assert stats.ratio({1: 10}, {2: 5}) is None
    assert stats.ratio({}, {2: 5}) is None


def test_runs_of_another_session_are_in_another_block():
    """A row that was trained alone, later, is compared with none; one of whose blocks are whole, with all."""
    first, later = [made.run(repeat=1, session=session) for session in ("morning", "evening")]
    seconds = {"a": {stats.block(first): 10.0}, "b": {stats.block(first): 5.0}, "c": {stats.block(later): 9.0}}
    fit = stats.Fit(seconds)
    assert fit.groups() == [["a", "b"], ["c"]]
    assert fit.ratio("a", "c") is None
    seconds["a"][stats.block(later)] = 18.0
    fit = stats.Fit(seconds)
    assert fit.groups() == [["a", "b", "c"]]
    assert fit.ratio("a", "c").value == pytest.approx(2.0)


def test_rows_without_a_common_block_are_compared_through_a_third():
    seconds = {"a": {1: 10.0}, "b": {1: 5.0, 2: 6.0}, "c": {2: 12.0}}
    assert stats.Fit(seconds).ratio("a", "c").value == pytest.approx(1.0)


def test_a_row_that_lost_a_run_is_known_almost_as_well_as_the_others():
    """From its own runs alone its interval would be six times as wide, at two runs of three."""
    seconds = experiment(np.random.default_rng(3), 3, lost=0)
    whole = stats.Fit(seconds).ratio("row1", "row0")
    del seconds["row1"][0]
    less = stats.Fit(seconds).ratio("row1", "row0")
    assert 1 < np.log(less.high / less.low) / np.log(whole.high / whole.low) < 1.5


def test_without_blocks_tukeys_test_is_scipys():
    """One more block effect than none is fitted, so the two agree where blocks do not differ, and runs are many."""
    random = np.random.default_rng(5)
    rows = np.exp(random.normal([[0.0], [0.02], [0.08]], SIGMA, (3, 40)))
    fit = stats.Fit({str(row): dict(enumerate(rows[row])) for row in range(3)})
    scipys = tukey_hsd(*np.log(rows)).pvalue
    shown = [[fit.shown_faster(str(a), str(b)) or fit.shown_faster(str(b), str(a)) for b in range(3)] for a in range(3)]
    assert np.array_equal(shown, (scipys < 0.05) & ~np.eye(3, dtype=bool))


@pytest.mark.parametrize("blocks", [2, 3, 5, 7])
def test_equal_rows_are_rarely_told_apart(blocks):
    """At most one report in twenty, and what chance adds over 300, makes a false claim about any pair of 11 rows."""
    random, wrong = np.random.default_rng(blocks), 0
    for _ in range(300):
        wrong += len(set(stats.Fit(experiment(random, blocks)).ranks().values())) > 1
    assert wrong / 300 <= 0.07


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_ranks_never_contradict_the_times(blocks):
    random = np.random.default_rng(blocks)
    for lost in (0, 1, 1, 2):
        seconds = experiment(random, blocks, lost=lost, effects=np.linspace(0, 0.6, ROWS))
        fit = stats.Fit(seconds)
        ranks, effects = fit.ranks(), dict(zip(fit.rows, fit.effects, strict=False))
        medians = {row: np.median(list(times.values())) for row, times in seconds.items()}
        time = effects if lost else medians
        ordered = sorted(ranks, key=time.get)
        assert [ranks[row] for row in ordered] == sorted(ranks.values())
        assert len(set(ranks.values())) > 3


def test_a_row_does_not_gain_a_place_by_losing_a_run():
    """It once did: nothing was certainly faster than a row of two runs, whose interval was wide enough for anything."""
    random = np.random.default_rng(7)
    effects = np.linspace(0, 0.5, ROWS)
    for _ in range(20):
        seconds = experiment(random, 3, lost=0, effects=effects)
        before = stats.Fit(seconds).ranks()["row8"]
        times = seconds["row8"]
        middle = sorted(times, key=times.get)[1]  # so that its time stays what it was
        del times[middle]
        assert stats.Fit(seconds).ranks()["row8"] >= before - 1


def test_spreads_that_differ_fourfold_are_told():
    random = np.random.default_rng(1)
    alike = {str(row): dict(enumerate(np.exp(random.normal(0, 0.03, 7)))) for row in range(4)}
    assert not stats.Fit(alike).unlike_spreads()
    assert stats.Fit(alike | {"wild": dict(enumerate(np.exp(random.normal(0, 0.4, 7))))}).unlike_spreads()


@given(times, times)
def test_a_ratio_seen_from_the_other_row_is_its_inverse(ours, theirs):
    ratio, other = stats.ratio(ours, theirs), stats.ratio(theirs, ours)
    assert (ratio is None) == (other is None)
    if ratio:
        assert ratio.value * other.value == pytest.approx(1)
        assert ratio.low <= ratio.value * (1 + 1e-9)
        assert ratio.value <= ratio.high * (1 + 1e-9)
        assert ratio.n == len(ours.keys() & theirs.keys())


def test_rows_that_cannot_be_told_apart_share_a_rank():
    seconds = {
        "a": {1: 10.0, 2: 20.0, 3: 10.1},
        "b": {1: 10.1, 2: 19.9, 3: 10.0},
        "c": {1: 12.0, 2: 24.0, 3: 12.1},
    }
    assert stats.Fit(seconds).ranks() == {"a": 1, "b": 1, "c": 3}


def blocks(**rows: list[float]) -> stats.Times:
    return {row: {(k, None): seconds for k, seconds in enumerate(times)} for row, times in rows.items()}


def test_times_of_two_machines_have_no_blocks():
    few = stats.unpaired_ratio(blocks(a=[4.0, 6.0, 5.0]), blocks(a=[2.0, 2.5, 2.0]), "a")
    assert (few.value, few.n, few.kind, few.distinct) == (pytest.approx(2.289, abs=1e-3), 3, "interval", True)
    assert 1.2 < few.low < few.value < few.high < 4.5
    assert not stats.unpaired_ratio(blocks(a=[4.0, 6.0, 5.0]), blocks(a=[4.1, 5.9, 5.2]), "a").distinct
    assert stats.unpaired_ratio(blocks(a=[4.0]), blocks(a=[5.0]), "a").kind == ""


def test_other_rows_tell_how_far_apart_two_sessions_must_be_but_not_where_all_moved_together():
    """With three rows that vary by chance one is known better than alone; with three that moved as one, it is not."""
    alone = [blocks(a=[4.0, 4.2, 4.1]), blocks(a=[4.3, 4.5, 4.4])]
    others = {"b": [2.1, 2.0, 2.05], "c": [3.05, 3.1, 2.95]}
    together = {"b": [2.0, 2.1, 2.05], "c": [3.0, 3.15, 3.075]}  # as a: the machine did it
    width = {
        name: (ratio := stats.unpaired_ratio(*sides, "a")).high / ratio.low
        for name, sides in {
            "alone": alone,
            "others": [side | blocks(**others) for side in alone],
            "together": [side | blocks(**together) for side in alone],
        }.items()
    }
    assert width["others"] < width["alone"]
    assert width["together"] == pytest.approx(width["alone"], abs=0.01)


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_an_interval_of_two_sessions_holds_the_truth_as_often_as_it_says(drift):
    """Simulated: five rows in three blocks, each session with or without drift from block to block."""
    random, held = np.random.default_rng(5), 0
    for _ in range(200):
        sides = []
        for _side in range(2):
            of_blocks = random.normal(0, drift, 3)
            logarithms = of_blocks + random.normal(0, 0.02, (5, 3))
            sides.append(blocks(**{f"r{row}": np.exp(times).tolist() for row, times in enumerate(logarithms)}))
        ratio = stats.unpaired_ratio(*sides, "r0")
        held += ratio.low <= 1 <= ratio.high
    assert 0.90 <= held / 200 <= 0.99


def test_variance_between_launches_is_told_from_that_between_steps():
    """Simulated: 4 % between launches, 10 % from step to step, around steps that do unlike work."""
    random = np.random.default_rng(3)
    work = random.uniform(0.02, 0.08, 100)
    rows = [work * np.exp(random.normal(0, 0.04, (6, 1)) + random.normal(0, 0.1, (6, 100))) for _ in range(12)]
    variance = stats.variance(rows)
    assert variance.launch == pytest.approx(0.04, rel=0.2)
    assert variance.step == pytest.approx(0.1, rel=0.05)
    # A launch that costs 16 steps: 4 times .1 over .04.
    assert variance.best_steps(0.8, 0.05) == pytest.approx(4 * variance.step / variance.launch)


def test_where_launches_are_alike_a_longer_window_is_always_better():
    random = np.random.default_rng(4)
    variance = stats.variance([np.exp(random.normal(0, 0.1, (5, 50))) for _ in range(8)])
    assert variance.launch < 0.01
    assert stats.Variance(launch=0.0, step=0.1).best_steps(3.0, 0.05) == np.inf


def test_one_run_tells_nothing_of_variance():
    assert stats.variance([np.ones((1, 20))]) is None
    assert stats.variance([]) is None
