"""The published table, answered: its ways from flawed rows to honest ones, what each flaw is worth, and the claims."""

import itertools

import numpy as np
import pytest
import yaml

from lockstep.config import reading, registry
from lockstep.report import ranking, studies
from lockstep.report.words import say
from lockstep.run.record import Tested
from tests import made
from tests.conftest import PROJECT

CONFIG = reading.read([PROJECT / "config" / "config.yaml", PROJECT / "config" / "published.yaml"])
published = studies.found()["published"]
TABLE = yaml.safe_load(published.FILE.read_text(encoding="utf-8"))
LINES = {line["name"]: line for line in TABLE["rows"]}


@pytest.mark.parametrize("name", LINES)
def test_each_way_takes_away_one_flaw_at_a_time_until_none_is_left(name):
    line = LINES[name]
    ways = [
        [published.flaw_between(CONFIG, before, after) for before, after in itertools.pairwise(way)]
        for way in line["ways"]
    ]
    for way, flaws in zip(line["ways"], ways, strict=True):
        assert (way[0], way[-1]) == (line["again"], line["ways"][0][-1])
        for flaw in flaws:
            assert say(f"axis_worth_{flaw}").zh  # it has one name, so one thing changes
    if len(ways) == 2:
        assert ways[1] == ways[0][::-1]
    again, clean, ours = (CONFIG.rows[row] for row in (line["again"], line["ways"][0][-1], line["ours"]))
    assert (again.division, clean.division, ours.division) == ("published", "published", "closed")
    assert again.strategy == clean.strategy == f"published_{ours.strategy}"
    assert clean.plan_name == ours.plan_name
    assert clean.precision == ours.precision
    if name != "transformers-Trainer":
        defaults = {key: option["default"] for key, option in registry.literals(ours.strategy)["OPTIONS"].items()}
        assert {key: clean.options.get(key, defaults[key]) for key in ours.options} == ours.options
    assert not any(clean.options.get(key) for key in ("tokenise_late", "print_loss", "barrier", "keep_gradients"))


def test_a_published_row_is_never_ranked_nor_in_the_open_division():
    asked = reading.parse(
        {"rows": {"x": {"strategy": "published_single", "print_loss": False, "tokenise_late": False}}}
    )
    assert asked.rows["x"].division == "published"


def test_every_row_of_the_configuration_is_on_a_way_or_a_level():
    named = {row for line in TABLE["rows"] for way in line["ways"] for row in way}
    named |= {line["ours"] for line in TABLE["rows"]} | {level["ours"] for level in TABLE["ladder"]}
    assert set(CONFIG.rows) == named | {"fabric"}


def run(row: str, repeat: int, seconds: float) -> Tested:
    asked = CONFIG.rows[row]
    return made.run(
        repeat=repeat,
        clock={"train_seconds": seconds},
        strategy=asked.strategy,
        work={"samples": 8384},
        asked={"options": asked.options, "hardware": {"processes": 2}},
    )


def answered(seconds: dict[str, list[float]]) -> dict:
    """The answer, where rows took these seconds in their blocks."""
    rows = [
        {
            "row": name,
            "strategy": CONFIG.rows[name].strategy,
            "accuracy": 0.5,
            "macro_f1": 0.4,
            "peak_memory_mb": 900.0,
            "proof": "equal",
            "steps": 262 if CONFIG.rows[name].train.global_batch == 32 else 131,
            "train_seconds": float(np.median(several)),
        }
        for name, several in seconds.items()
    ]
    runs = {name: [run(name, k, taken) for k, taken in enumerate(several, 1)] for name, several in seconds.items()}
    ratio = ranking.between(rows, runs, {})
    verdict = {"proof": "unequal", "by_nature": "it trains 64 samples a step, where the others train 32"}
    return published.answer(CONFIG, rows, runs, dict.fromkeys(seconds) | {"published_ddp": verdict}, ratio)


# Two flaws that gain more together than each alone: 10 s with both, 4 with either, 3 with none.
SPAWN = {
    "published_ddp_spawn": [10.0, 10.2, 9.8],
    "ddp_spawn_a": [4.0, 4.1, 3.9],
    "ddp_spawn_z": [4.0, 4.1, 3.9],
    "ddp_spawn_clean": [3.0, 3.0, 3.0],
    "ddp_spawn": [2.9, 2.9, 2.9],
}


def test_what_flaws_are_worth_adds_up_to_the_whole():
    lines = {line["name"]: line for line in answered(SPAWN)["rows"]}
    worth = lines["distributed-multiprocess"]["worth"]
    flaws = {part["flaw"]: part for part in worth["flaws"]}
    assert list(flaws) == ["habits", "global_batch"]
    assert flaws["habits"]["by_order"] == pytest.approx([-6.0, -1.0])
    assert flaws["habits"]["seconds"] == pytest.approx(-3.5)
    assert worth["rest"]["seconds"] == pytest.approx(-0.1)
    whole = sum(part["seconds"] for part in [*flaws.values(), worth["rest"]])
    assert whole == pytest.approx(worth["whole"]["seconds"]) == pytest.approx(-7.1)
    assert flaws["habits"]["seconds_low"] < -3.5 < flaws["habits"]["seconds_high"]
    assert (flaws["global_batch"]["steps"], flaws["habits"]["steps"]) == (131, 0)
    assert [name for name, line in lines.items() if line["worth"]] == ["distributed-multiprocess"]
    drawn = published.worth(lines["distributed-multiprocess"])
    assert [cells[0] for cells in drawn.table] == [say(f"axis_worth_{flaw}").en for flaw in (*flaws, "rest")]
    assert drawn.note.en.endswith("What no flaw explains: -0.1 s, 1 %.")


def test_samples_that_every_rank_trains_are_counted_for_each():
    names = [*LINES["deepspeed"]["ways"][0], *LINES["deepspeed"]["ways"][1], "deepspeed"]
    line = {line["name"]: line for line in answered({key: [5.0, 5.0] for key in names})["rows"]}["deepspeed"]
    flaws = {part["flaw"]: part["samples"] for part in line["worth"]["flaws"]}
    assert flaws == {"habits": 0, "no_sampler": -8384, "precision": 0}
    assert (line["accuracy"], line["macro_f1"], line["again_accuracy"]) == (0.57, 0.54, 0.5)


def test_one_block_has_no_interval_and_none_in_common_no_figure():
    once = {name: seconds[:1] for name, seconds in SPAWN.items()}
    worth = next(line["worth"] for line in answered(once)["rows"] if line["worth"])
    assert worth["whole"]["seconds"] == pytest.approx(-7.1)
    assert worth["whole"]["seconds_low"] is None


@pytest.mark.parametrize(
    ("honest", "stands"),
    [([2.0, 2.1, 1.9], False), ([0.64, 0.65, 0.63], True), ([0.7, 0.71, 0.69], True), ([2.0], None)],
)
def test_a_claim_stands_where_the_row_that_does_what_was_meant_bears_it_out(honest, stands):
    count = len(honest)
    seconds = {"single": [2.8, 2.81, 2.79][:count], "ddp_amp": honest, "published_single": [3.0] * count}
    seconds |= {"published_ddp_amp": [1.0] * count}
    claim = {claim["key"]: claim for claim in answered(seconds)["claims"]}["amp"]
    assert claim["published"] == pytest.approx(4.4628, abs=1e-4)
    assert claim["again_speed"] == pytest.approx(3.0)
    assert claim["stands"] is stands


def test_what_was_not_measured_is_left_out_and_the_default_configuration_names_its_rows():
    answer = answered({"single": [2.0, 2.1], "ddp": [1.0, 1.1]})
    by_name = {line["name"]: line for line in answer["rows"]}
    assert by_name["distributed"]["ours_ratio"]["value"] == pytest.approx(0.512, abs=1e-3)
    assert by_name["distributed"]["again_ratio"] is by_name["horovod"]["ours_ratio"] is None
    assert all(claim["stands"] is None for claim in answer["claims"])


def test_each_published_strategy_changes_its_sibling_in_options_that_can_be_taken_away():
    for name in (name for name in registry.names() if registry.study(name) == "published"):
        assert registry.literals(name)["DIVISION"] == "published"
        assert registry.literals(name)["NEEDS"] == registry.literals(name.removeprefix("published_"))["NEEDS"]
