"""The open division: what a row gains, when its cold start has paid, and whether it is shown to be as good."""

import numpy as np
import pytest

from lockstep.config import reading
from lockstep.report import ladder
from lockstep.run.record import Tested
from tests import made


def run(repeat: int, seconds: float, macro_f1: float, stall: float = 0.0, disturbed: tuple = ()) -> Tested:
    return made.run(
        repeat=repeat,
        global_batch=64,
        work={"samples": 6400},
        clock={"train_seconds": seconds + stall, "stall_seconds": stall, "setup": {"imports": 3.0}},
        test={"macro_f1": macro_f1, "confusion_matrix": [[30, 10], [10, 50]]},
        watch={"disturbed": list(disturbed)},
        asked={"train": {"seed": repeat}},
    )


@pytest.fixture
def two_rows():
    fast = {"strategy": "recipe", "precision": "bf16", "packed": True}
    asked = reading.parse({"rows": {"single": {"strategy": "single"}, "fast": fast}})
    return asked, [
        {"row": name, "strategy": row.strategy, "division": row.division} for name, row in asked.rows.items()
    ]


def test_gain_is_of_warm_time_and_a_cold_start_must_be_paid(two_rows):
    runs = {
        "single": [run(repeat, 10.0, 0.5) for repeat in range(1, 6)],
        "fast": [run(repeat, 5.0, 0.5, stall=20.0) for repeat in range(1, 6)],
    }
    climbed = ladder.climb(*two_rows, runs, runs)
    (level,) = climbed["rungs"]
    assert level["changes"] == "precision: bf16, packed: true"
    assert level["gain"] == pytest.approx(2.0)
    assert level["cold_seconds"] == pytest.approx(23.0)
    assert level["pays_after"] == 400  # 20 s longer to start; each of 100 steps takes 0.1 s, and 0.05 s in this row
    assert (level["quality"], climbed["best"]) == ("as_good", "fast")


def test_a_slower_row_never_pays(two_rows):
    runs = {name: [run(k, seconds, 0.5) for k in range(1, 6)] for name, seconds in (("single", 5.0), ("fast", 6.0))}
    climbed = ladder.climb(*two_rows, runs, runs)
    assert climbed["rungs"][0]["pays_after"] is None
    assert climbed["best"] is None


def test_a_gain_that_may_be_chance_never_pays_and_is_not_the_best(two_rows):
    seconds = [9.0, 11.0, 9.5, 10.4, 9.8]
    runs = {
        "single": [run(repeat, 10.0, 0.5) for repeat in range(1, 6)],
        "fast": [run(repeat, seconds[repeat - 1], 0.5) for repeat in range(1, 6)],
    }
    climbed = ladder.climb(*two_rows, runs, runs)
    assert climbed["rungs"][0]["gain"] > 1 > climbed["rungs"][0]["gain_low"]
    assert climbed["rungs"][0]["pays_after"] is None
    assert climbed["best"] is None


def test_one_run_has_no_interval_and_pays_nothing_yet(two_rows):
    runs = {"single": [run(1, 10.0, 0.5)], "fast": [run(1, 5.0, 0.5)]}
    (level,) = ladder.climb(*two_rows, runs, runs)["rungs"]
    assert (level["gain"], level["gain_low"], level["pays_after"], level["n"]) == (pytest.approx(2.0), None, None, 1)


def test_a_row_is_not_as_good_as_one_that_learnt_nothing(two_rows):
    # 60 of 100 texts have one label: naming it always gives a macro-F1 of .375.
    runs = {name: [run(k, seconds, 0.375) for k in range(1, 6)] for name, seconds in (("single", 9.0), ("fast", 5.0))}
    climbed = ladder.climb(*two_rows, runs, runs)
    assert (climbed["rungs"][0]["quality"], climbed["best"]) == ("untrained", None)


def test_a_level_that_was_always_disturbed_is_marked_and_not_the_best(two_rows):
    runs = {
        "single": [run(k, 10.0, 0.5) for k in range(1, 6)],
        "fast": [run(k, 5.0, 0.5, disturbed=("a neighbour",)) for k in range(1, 6)],
    }
    climbed = ladder.climb(*two_rows, runs, runs)
    (level,) = climbed["rungs"]
    assert (level["disturbed"], level["quality"], climbed["best"]) == (True, "as_good", None)


def test_a_level_without_a_block_in_common_with_the_base_keeps_its_line(two_rows):
    runs = {"single": [run(1, 10.0, 0.5)], "fast": [run(2, 5.0, 0.5)]}
    (level,) = ladder.climb(*two_rows, runs, runs)["rungs"]
    assert (level["gain"], level["n"], level["macro_f1_difference"], level["quality"]) == (None, 0, None, "too_few")


def test_a_run_that_was_disturbed_counts_for_quality(two_rows):
    """Five seeds are five, whatever else the machine did meanwhile; of the time, four tell."""
    runs = {name: [run(k, seconds, 0.5) for k in range(1, 6)] for name, seconds in (("single", 10.0), ("fast", 5.0))}
    runs["single"][2] = run(3, 30.0, 0.5)
    timed = {"single": [slow_run for slow_run in runs["single"] if slow_run.repeat != 3], "fast": runs["fast"]}
    climbed = ladder.climb(*two_rows, runs, timed)
    assert climbed["rungs"][0]["gain"] == pytest.approx(2.0)
    assert (climbed["rungs"][0]["quality"], climbed["best"]) == ("as_good", "fast")


@pytest.mark.parametrize(
    ("differences", "seeds", "verdict"),
    [
        ([0.0, 0.002, -0.002, 0.001, -0.001], 5, "as_good"),
        ([0.1, 0.11, 0.09, 0.1, 0.1], 5, "as_good"),  # better is as good
        ([-0.015] * 4 + [-0.016], 5, "as_good"),  # a little worse, but surely by less than the margin
        ([-0.1, -0.11, -0.09, -0.1, -0.1], 5, "worse"),
        ([0.05, -0.06, 0.04, -0.05, 0.0], 5, "not_shown"),  # equal on average, and proven by nothing
        ([0.0] * 4, 4, "too_few"),
        ([0.0] * 9, 1, "too_few"),  # repetitions of one seed say nothing of others
    ],
)
def test_quality_must_be_shown(differences, seeds, verdict):
    assert ladder.quality(differences, seeds)["quality"] == verdict


def test_a_row_at_the_margin_is_rarely_called_as_good():
    random = np.random.default_rng(0)
    trials = [ladder.quality(random.normal(-ladder.MARGIN, 0.02, 5).tolist(), 5)["quality"] for _ in range(2000)]
    assert trials.count("as_good") / len(trials) == pytest.approx(ladder.SIGNIFICANCE, abs=0.015)


def test_of_many_rows_at_the_margin_rarely_one_is_called_as_good():
    """The chance of any false claim is that of one row alone, however many are tried."""
    random = np.random.default_rng(1)
    false = 0
    for _ in range(1000):
        levels = [ladder.quality(random.normal(-ladder.MARGIN, 0.02, 5).tolist(), 5) for _ in range(8)]
        alone = sum(level["quality"] == "as_good" for level in levels)
        ladder.choose(levels)
        chosen = sum(level["quality"] == "as_good" for level in levels)
        assert chosen <= alone
        false += chosen > 0
    assert false / 1000 < 0.07


def test_how_many_seeds_would_show_it():
    """At that many, rows without any loss are called as good about four times in five."""
    random = np.random.default_rng(2)
    for spread in (0.02, 0.04):
        seeds = ladder.seeds_needed(spread)
        trials = [ladder.quality(random.normal(0, spread, seeds).tolist(), seeds)["quality"] for _ in range(2000)]
        assert 0.75 < trials.count("as_good") / len(trials) < 0.9
    assert ladder.seeds_needed(0.0) == ladder.ENOUGH_SEEDS
    assert ladder.seeds_needed(10.0) is None
    assert ladder.quality([0.05, -0.06, 0.04, -0.05, 0.0], 5)["seeds_needed"] > 5


def test_without_open_rows_there_is_no_ladder():
    asked = reading.parse({})
    rows = [{"row": name, "strategy": row.strategy, "division": row.division} for name, row in asked.rows.items()]
    runs = {name: [run(1, 1.0, 0.5)] for name in asked.rows}
    assert ladder.climb(asked, rows, runs, runs) is None
