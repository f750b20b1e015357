"""A page that does not contradict itself: one ratio, one step time, a title that fits its curve, a fair efficiency."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep import columns, stats
from lockstep.config import reading
from lockstep.report import charts, headline, page, ranking, words
from lockstep.run.record import Tested
from tests import made

HARDWARE = {"device": "cpu", "oversubscribe": True}
ROWS = {
    "single": {"strategy": "single", "threads": 1},
    "all_threads": {"strategy": "single", "threads": 2},
    "ddp": {"strategy": "ddp", "processes": 2, "threads": 1},
    "twice": {"strategy": "ddp", "processes": 2, "threads": 1, "global_batch": 128},
}
SECONDS = {
    "single": [10.0, 10.4, 9.9],
    "all_threads": [7.0, 7.1, 7.2],
    "ddp": [6.0, 6.1, 6.05],
    "twice": [5.0, 5.3, 5.1],
}
CONFIG = reading.parse({"hardware": HARDWARE, "rows": ROWS})


def run(row: str, repeat: int, seconds: float, **changes) -> Tested:
    about = {
        "repeat": repeat,
        "clock": {"train_seconds": seconds},
        "settings": {"dropout": [0.1]},
        "asked": {"hardware": CONFIG.rows[row].deciding()["hardware"]},
        "environment": {"cores": 2},
    }
    return made.run(**about | changes)


RUNS = {name: [run(name, k, taken) for k, taken in enumerate(several)] for name, several in SECONDS.items()}


def rows_of() -> list[dict]:
    return [
        dict.fromkeys(columns.KEYS)
        | {"row": name, "strategy": row.strategy, "division": row.division, "device": "cpu", "proof": "equal"}
        | {"train_seconds": float(np.median(SECONDS[name]))}
        for name, row in CONFIG.rows.items()
    ]


@pytest.fixture
def compared() -> tuple[dict[str, dict], dict]:
    """The rows by name, and their ratios."""
    rows = rows_of()
    ratios, _, _ = ranking.compare(rows, RUNS, CONFIG)
    return {row["row"]: row for row in rows}, ratios


@pytest.mark.parametrize("failed", [{"train_seconds": None}, {"proof": "failed"}])
def test_no_other_row_becomes_the_baseline_where_that_failed(failed):
    """all_threads is `single`, too, and the report would call its speed that of single."""
    rows = rows_of()
    rows[0] |= failed
    ratios, _, _ = ranking.compare(rows, RUNS, CONFIG)
    assert {row["speedup"] for row in rows} == {None}
    assert "all_threads" in ratios["ddp"], "which are compared all the same"
    assert headline._baseline(rows[1:], rows) is None


def test_the_baseline_is_no_other_row_where_all_its_runs_were_disturbed(compared):
    rows = list(compared[0].values())
    assert headline._baseline(rows, rows)["row"] == "single"
    assert headline._baseline(rows[1:], rows) is None


def test_every_part_of_the_page_has_the_same_interval_of_the_same_two_rows(compared):
    """What the published section asks for is what stands in the table; the two rows alone would give another one."""
    rows, ratios = compared
    between = ranking.between(list(rows.values()), RUNS, ratios)
    told = between("ddp", "single")
    assert told == ratios["ddp"]["single"]
    assert (1 / told["high"], 1 / told["low"]) == (rows["ddp"]["speedup_low"], rows["ddp"]["speedup_high"])
    blocks = {name: {stats.block(each): each.clock.train_seconds for each in RUNS[name]} for name in RUNS}
    alone = stats.ratio(blocks["ddp"], blocks["single"])
    assert (alone.low, alone.high) != pytest.approx((told["low"], told["high"]), rel=1e-3)
    # Rows of two plans are not in the table's ratios; theirs is by the same model, of all rows.
    assert "single" not in ratios["twice"]
    whole = stats.Fit(blocks).ratio("twice", "single")
    assert (between("twice", "single")["low"], between("twice", "single")["high"]) == (whole.low, whole.high)
    assert between("gone", "single") is between(None, "single") is None


def test_efficiency_is_per_core_however_many_processes_share_them(compared):
    rows, _ = compared
    for name in ("all_threads", "ddp"):  # one process with two cores, two with one each
        assert rows[name]["efficiency"] == pytest.approx(rows[name]["speedup"] / 2)
    assert rows["single"]["efficiency"] == 1


def test_a_step_takes_the_training_time_over_the_steps():
    timed = run("ddp", 1, 6.0, clock={"train_seconds": 6.0, "step_seconds_median": 0.049})
    assert columns.BY_KEY["step_ms"].measure(timed) == pytest.approx(60.0)
    assert columns.BY_KEY["median_step_ms"].measure(timed) == pytest.approx(49.0)  # which has its own name


def test_the_parts_of_a_step_add_up_to_the_step_time_of_the_table():
    """Recording made the profiled steps longer, and they are of another run: they tell shares."""
    parts = {"forward": 0.02, "backward": 0.03, "optimizer": 0.004, "data": 0.001, "communication": 0.02, "idle": 0.01}
    profile = {"seconds": parts, "step_seconds": 0.072, "exposed_by_difference": 0.018}
    row = {"row": "ddp", "step_ms": 60.0}
    drawn = charts.step_parts([row], SimpleNamespace(profiles={"ddp": profile}))
    (name, *shown), *_ = drawn.table
    assert name == "ddp"
    assert sum(map(float, shown)) == pytest.approx(60.0, abs=0.05)
    assert float(shown[0]) / float(shown[1]) == pytest.approx(2 / 3, abs=0.01)
    assert drawn.title.en.startswith("ddp waits longest for communication: 14 to 15 ms")  # in two ways
    assert "ddp 15.0 ms" in drawn.note.en  # the other way, in the same terms: 18 of 72 are 15 of 60


def _ranked(names) -> list[dict]:
    """Rows as the report has them, each slower than the one before."""
    same = {"division": "closed", "world_size": 2, "repeats": 1}
    return [
        same | {"row": name, "strategy": name, "place": place, "train_seconds": 5.0 + place}
        for place, name in enumerate(names, 1)
    ]


def test_rows_whose_losses_coincide_share_a_line_and_all_have_one_over_seconds():
    falling = np.linspace(2, 1, 100)
    losses = {"single": falling, "ddp": falling, "horovod": falling + 1e-5, "fsdp": falling, "diloco": falling + 0.3}
    runs = {
        name: [run("ddp", 1, 6.0, losses=list(values), settings={"dropout": [0]})] for name, values in losses.items()
    }
    drawn = charts.losses(_ranked(losses), SimpleNamespace(runs=runs))
    over_steps, over_seconds = drawn.figure.axes
    assert [line.get_label() for line in over_steps.lines] == ["single, ddp +2", "diloco"]
    named = {line.get_label() for line in over_seconds.lines if not line.get_label().startswith("_")}
    assert named == {"single", "diloco", "the other rows"}  # the fastest is single itself
    assert sum(len(line.get_xdata()) > 0 for line in over_seconds.lines) == 5
    assert [line[0] for line in drawn.table] == list(losses)


def test_the_picture_of_start_up_has_the_times_of_the_table():
    """Its parts are of the run with the median training time, whose start-up may be another one."""
    clocks = {"single": (6.0, 10.0), "ddp": (4.0, 8.0)}

    def clock(first: float, seconds: float) -> dict:
        return {"setup": {"imports": first / 2}, "first_step_seconds": first, "train_seconds": seconds}

    runs = {name: [run("ddp", 1, seconds, clock=clock(first, seconds))] for name, (first, seconds) in clocks.items()}
    rows = [row | {"startup_seconds": seconds} for row, seconds in zip(_ranked(clocks), (5.0, 5.2), strict=True)]
    drawn = charts.setup(rows, SimpleNamespace(runs=runs))
    assert drawn.title.en == "single is ready soonest: 5.0 s from launch to the end of the first step"
    imports, first, training = (
        drawn.header.index(words.say(f"setup_{part}")) for part in ("imports", "first", "train")
    )
    for row, line in zip(rows, drawn.table, strict=True):
        assert line[0] == row["row"]
        parts = [float(line[at]) for at in (imports, first, training)]
        assert parts[0] + parts[1] == pytest.approx(row["startup_seconds"], abs=0.01)
        assert parts[1] + parts[2] == pytest.approx(row["train_seconds"], abs=0.01)


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_the_title_of_the_losses_is_of_the_curve_that_is_drawn_and_says_why(dropout):
    """One step is far off, and the curve is a mean over four."""
    losses = {"single": [1.0] * 100, "ddp": [1.0] * 50 + [1.8] + [1.0] * 49}
    runs = {
        name: [run(name, 1, 6.0, losses=values, settings={"dropout": [dropout]})] for name, values in losses.items()
    }
    drawn = charts.losses(_ranked(losses), SimpleNamespace(runs=runs))
    curve = max(float(np.abs(line.get_ydata()).max()) for line in drawn.figure.axes[0].lines)
    (said,) = re.findall(r"by ([\d.]+) at most, in means over 4 steps", drawn.title.en)
    assert float(said) == pytest.approx(curve, abs=0.01) == pytest.approx(0.2)
    assert ("dropout draws other numbers" in drawn.title.en) == bool(dropout)
    assert drawn.table[1][-2:] == ["0.2", "0.8"]  # and that of a single step, by its name


@pytest.mark.parametrize(
    ("changes", "known"),
    [({}, True), ({"steps": 3}, False), ({"watch": {"disturbed": ["others"]}}, False), ({"peak": None}, False)],
)
def test_utilisation_is_of_runs_that_tell_it(changes, known):
    about = {"peak": {"devices": 2, "flops_per_second": 1e9}, "work": {"flops": 1e9}}
    assert columns.BY_KEY["mfu"].measure(run("ddp", 1, 2.0, **about | changes)) == (0.25 if known else None)


def test_settings_are_those_that_differ_in_words_and_without_empty_ones():
    group = {"initial_lr": 0.1, "betas": [0.9, 0.999]}
    live = [
        {"device": "cpu", "hook": None, "options": {"fused": fused}, "groups": [group | {"initial_lr": rate}]}
        for fused, rate in ((True, 0.1), (False, 0.2))
    ]
    live[0]["backend"] = ""
    shown = page.settings([(name, made.run(settings=each)) for name, each in zip("ab", live, strict=True)])
    assert shown == {"fused": ["yes", "no"], "group 0.initial_lr": ["0.1", "0.2"]}


def test_a_setting_that_only_some_strategies_have_is_no_difference():
    live = [{"device": "cpu", "options": options} for options in ({}, {"bucket_mb": 25}, {"bucket_mb": 25, "zero": 2})]
    tested = [(name, made.run(settings=each)) for name, each in zip("abc", live, strict=True)]
    assert page.settings(tested) == {}
    assert page.own_settings(tested) == {"b": ["bucket_mb 25"], "c": ["bucket_mb 25", "zero 2"]}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    charts.plt.close("all")
