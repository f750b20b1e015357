"""`repeats: auto`: which rows get another block, when it ends, and what that does to the claims of a report."""

import shutil

import numpy as np
import pytest
import yaml

from lockstep import files, paths, stats
from lockstep.analysis import blocks
from lockstep.config import configuration, reading, schema
from lockstep.config.configuration import Config
from lockstep.errors import BadInput
from lockstep.paths import decision_file
from lockstep.proof import fairness, verdicts
from lockstep.report import headline, summary
from tests import made
from tests.conftest import REAL_DATA, copy_project

ROWS = [f"row{number}" for number in range(12)]
SIGMA = 0.036  # of log times, as in a default benchmark on two cores


def adaptive(
    random: np.random.Generator, effects: dict[str, float], most: int, sigma: float = SIGMA
) -> tuple[stats.Fit, int]:
    """The fit at the end of a benchmark with `repeats: auto`, and how many blocks it took."""
    seconds: dict[str, dict] = {row: {} for row in effects}
    rows = list(effects)
    for block in range(1, most + 1):
        drift = random.normal(0, 0.05)
        for row in rows:
            seconds[row][block, "session"] = float(np.exp(effects[row] + drift + random.normal(0, sigma)))
        if block < configuration.FIRST_BLOCKS:
            continue
        fit = stats.Fit(seconds)
        if fit.freedom < blocks.LEAST_FREEDOM:
            continue
        rows = blocks.contending(fit, list(effects))
        if len(rows) < 2 or blocks.widest(fit, rows) <= configuration.PRECISE:
            break
    return fit, block


def test_looking_after_each_block_makes_few_false_claims():
    """Were rows dropped at the report's own 5 %, one report in ten would call equal rows unlike."""
    random, reports, wrong = np.random.default_rng(1), 120, 0
    for _ in range(reports):
        fit, _ = adaptive(random, dict.fromkeys(ROWS, 0.0), most=5)
        wrong += len(set(fit.ranks().values())) > 1
    assert wrong / reports <= 0.07


@pytest.mark.parametrize("rows", [2, 3])
def test_few_rows_make_few_false_claims_too(rows):
    """Their spread is often estimated too small in the first blocks, which would end the benchmark at that moment.

    Were it believed, 10 to 12 % of reports would make a false claim; in 2,000 simulated ones it is 5 and 6 %.
    """
    random, reports, wrong, missed = np.random.default_rng(3), 300, 0, 0
    for _ in range(reports):
        fit, _ = adaptive(random, dict.fromkeys(ROWS[:rows], 0.0), most=configuration.MOST_BLOCKS, sigma=0.02)
        wrong += len(set(fit.ranks().values())) > 1
        ratio = fit.ratio(*ROWS[:2])
        missed += not ratio.low <= 1 <= ratio.high
    assert wrong / reports <= 0.08
    assert missed / reports <= 0.08


def test_slow_rows_are_left_out_and_no_place_is_inverted():
    random = np.random.default_rng(2)
    effects = {row: 0.0 if number < 3 else 0.2 + 0.1 * number for number, row in enumerate(ROWS)}
    inverted = more = 0
    for _ in range(40):
        fit, used = adaptive(random, effects, most=6)
        assert {len(fit.seconds[row]) for row in ROWS[3:]} == {configuration.FIRST_BLOCKS}
        more += used > configuration.FIRST_BLOCKS
        ranks = fit.ranks()
        inverted += any(ranks[a] < ranks[b] and effects[a] > effects[b] for a in ROWS for b in ROWS)
    assert more > 30
    assert inverted / 40 <= 0.07


def test_it_ends_on_precision_and_not_on_significance():
    """Two rows that are known to a thousandth are known well enough, whether or not they differ."""
    for ours in ([10.0, 11.0, 10.502], [10.005, 11.004, 10.506]):
        times = {"a": ours, "b": [10.0, 11.001, 10.5]}
        seconds = {row: {(block, "s"): value for block, value in enumerate(values)} for row, values in times.items()}
        assert blocks.widest(stats.Fit(seconds), ["a", "b"]) <= configuration.PRECISE


DROPPED = dict.fromkeys(schema.of_configuration()["properties"]["rows"]["default"])


@pytest.fixture
def results(benchmark, tmp_path, monkeypatch):
    """Results of three rows, whose times can be set: `single`, `ddp` and `fsdp`; believed after two blocks."""
    monkeypatch.setattr(blocks, "LEAST_FREEDOM", 1)
    ignored = shutil.ignore_patterns("native", "model", "weights", "dataset")
    shutil.copytree(benchmark.path("results"), tmp_path / "results", ignore=ignored)
    return tmp_path / "results"


def asked(results, **changes) -> Config:
    rows = {name: {"strategy": name} for name in ("single", "ddp", "fsdp")}
    source = reading.read([results / "config.yaml"]).source
    return reading.parse(source | {"rows": rows, "repeats": "auto", "budget": 1000.0} | changes)


def train(results, row: str, seconds: list[float], disturbed: bool = False) -> None:
    """As if a row had been trained once in each block, taking so long."""
    (run,) = (results / "runs" / row).glob("n*")
    record = files.read_json(run / "rep1" / "record.json")
    for repeat, taken in enumerate(seconds, 1):
        if repeat > 1:
            shutil.copytree(run / "rep1", run / f"rep{repeat}")
        watch = record["watch"] | {"disturbed": ["a neighbour"] if disturbed else []}
        about = {"repeat": repeat, "wall_seconds": taken + 5, "watch": watch}
        clock = record["clock"] | {"train_seconds": taken}
        files.write_json(run / f"rep{repeat}" / "record.json", record | about | {"clock": clock})


def test_the_fastest_rows_are_trained_again(results):
    train(results, "single", [20.0, 20.4])
    train(results, "ddp", [10.0, 10.9])
    train(results, "fsdp", [10.4, 10.3])
    decided = blocks.decide(asked(results), results, 2, [])
    assert (decided["rows"], decided["why"]) == (["ddp", "fsdp"], "")
    assert decided["width"] > configuration.PRECISE
    assert decided["seconds"] == pytest.approx(20 + 20.4 + 10 + 10.9 + 10.4 + 10.3 + 30)
    assert decided["next_seconds"] == pytest.approx(10.9 + 10.4 + 10)


def test_a_fast_row_that_trains_another_model_ends_nobody_s_repetitions(tmp_path, monkeypatch):
    """The report does not compare it, so that the others were left with two repetitions."""
    times = {"single": [20.0, 20.4], "ddp": [19.0, 21.9], "wrong": [5.0, 5.1]}

    def run(config, row, folder, repeat):
        taken = dict(enumerate(times[row.name], 1)).get(repeat)
        return taken and made.record(row=row.name, repeat=repeat, clock={"train_seconds": taken})

    monkeypatch.setattr(blocks, "_run", run)
    monkeypatch.setattr(blocks, "LEAST_FREEDOM", 1)
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp"}, "wrong": {"strategy": "ddp"}}
    hardware = {"device": "cpu", "processes": 2, "oversubscribe": True}
    asked = reading.parse({"rows": rows, "hardware": hardware, "repeats": "auto", "budget": 1e6})
    assert blocks.decide(asked, tmp_path, 2, [])["why"] == "one row is fastest"
    decided = blocks.decide(asked, tmp_path, 2, ["wrong"])
    assert (decided["rows"], decided["left_out"]) == (["single", "ddp"], ["wrong"])


BATCH_NORM = {"ddp": {"strategy": "ddp"}, "synced": {"strategy": "ddp", "sync_batchnorm": True}}


@pytest.mark.parametrize(
    ("rows", "normalises", "left_out"),
    [
        ({"hooked": {"strategy": "ddp", "hook": "powersgd"}, "ddp": {"strategy": "ddp"}}, False, ["hooked"]),
        (BATCH_NORM, True, ["ddp"]),
        (BATCH_NORM, False, []),
    ],
)
def test_rows_that_train_another_model_by_design_are_not_compared(tmp_path, rows, normalises, left_out):
    files.write_json(paths.data_file(tmp_path), {"batch_statistics": normalises})
    hardware = {"device": "cpu", "processes": 2, "oversubscribe": True}
    assert verdicts.not_compared(reading.parse({"rows": rows, "hardware": hardware}), tmp_path) == left_out


@pytest.mark.parametrize(
    ("proof", "asked", "left_out"),
    [("unequal", {}, ["ddp"]), ("equal", {}, []), ("unequal", {"precision": "bf16"}, [])],  # the last one is stale
)
def test_a_row_with_a_wrong_verdict_is_not_compared(tmp_path, proof, asked, left_out):
    config = reading.parse({"rows": {"ddp": {"strategy": "ddp"}}, "hardware": {"device": "cpu"}})
    files.write_json(paths.data_file(tmp_path), {"batch_statistics": False, "hash": "d", "weights": "w"})
    folder = tmp_path / config.trial(config.rows["ddp"]).folder(1)
    files.write_json(folder / paths.SETTINGS, asked)
    verdict = {"proof": proof, "reason": "", "distances": None, "steps": 12, "world_size": 2}
    files.write_json(folder / paths.VERDICT, verdict)
    assert verdicts.not_compared(config, tmp_path) == left_out


def test_attempts_that_were_disturbed_count_as_time_spent(results):
    for row in ("single", "ddp", "fsdp"):
        train(results, row, [10.0, 10.2])
    undisturbed = blocks.decide(asked(results), results, 2, [])["seconds"]
    (file,) = (results / "runs" / "ddp").glob("n*/rep2/record.json")
    before = {
        "started": "2026-01-01T00:00:00+00:00",
        "wall_seconds": 77.0,
        "train_seconds": 70.0,
        "disturbed": ["noise"],
    }
    files.write_json(file, files.read_json(file) | {"disturbed_before": [before]})
    assert blocks.decide(asked(results), results, 2, [])["seconds"] == pytest.approx(undisturbed + 77)


def test_no_row_is_left_out_while_the_spread_is_hardly_known(results, monkeypatch):
    monkeypatch.undo()
    train(results, "single", [20.0, 20.4])
    train(results, "ddp", [10.0, 10.2])
    train(results, "fsdp", [10.0, 10.2])
    decided = blocks.decide(asked(results), results, 2, [])
    assert (decided["rows"], decided["why"]) == (["single", "ddp", "fsdp"], "")


def test_runs_that_are_there_cost_nothing(results):
    """As after a larger budget, or `repeats: 3`: what was measured counts, and is no reason to end."""
    train(results, "single", [20.0, 20.4])
    for row in ("ddp", "fsdp"):
        train(results, row, [10.0, 10.9, 10.2])
    now = asked(results, budget=1.0)
    for block, (rows, why) in ((2, (["ddp", "fsdp"], "")), (3, ([], "budget"))):
        decided = blocks.decide(now, results, block, [])
        assert (decided["rows"], decided["why"]) == (rows, why)
        files.write_json(decision_file(results, block), decided)
    assert [blocks.repetitions(now, now.rows[row], results) for row in ("single", "ddp")] == [[1, 2], [1, 2, 3]]


def test_one_row_is_faster_than_nothing(results):
    train(results, "single", [20.0, 20.4])
    alone = reading.parse(asked(results).source | {"rows": {"single": {"strategy": "single"}}})
    decided = blocks.decide(alone, results, 2, [])
    assert (decided["rows"], decided["why"]) == ([], "nothing to compare")
    files.write_json(decision_file(results, 2), decided)
    assert "No further blocks" not in " ".join(line.en for line in headline.lines(summary.gather(alone, results)))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"rows": 5}', '{"rows": "ddp", "contending": [], "why": "", "width": null, "seconds": 1}']
)
def test_a_damaged_decision_is_one_message(results, text):
    decision_file(results, 2).parent.mkdir()
    decision_file(results, 2).write_text(text)
    with pytest.raises(BadInput, match=r"2\.json: is damaged.*Remove it and start Snakemake again"):
        blocks.last(asked(results), results)


def test_a_decision_that_the_records_do_not_bear_out_is_found(results):
    for row, seconds in (("single", [20.0, 20.4]), ("ddp", [10.0, 10.9]), ("fsdp", [10.4, 10.3])):
        train(results, row, seconds)
    now = asked(results, budget=150.0)
    (results / "config.yaml").write_text(yaml.safe_dump(now.source | {"rows": DROPPED | now.source["rows"]}))
    decided = blocks.decide(now, results, 2, [])
    for changed in ({}, {"width": 0.001}, {"contending": ["ddp"]}):
        files.write_json(decision_file(results, 2), decided | changed)
        breaches = [what for where, what in fairness.check(results).breaches if where.endswith("blocks/2.json")]
        assert breaches == (["does not follow from the records"] if changed else [])


@pytest.mark.parametrize(
    ("ddp", "fsdp", "changes", "why"),
    [
        ([10.0, 10.9], [10.4, 10.3], {"budget": 130.0}, "budget"),
        ([10.0, 10.2], [10.0, 10.2], {}, "precise"),
        ([10.0, 10.2], [19.0, 19.4], {}, "one row is fastest"),
    ],
)
def test_why_it_ends(results, ddp, fsdp, changes, why):
    train(results, "single", [20.0, 20.4])
    train(results, "ddp", ddp)
    train(results, "fsdp", fsdp)
    now = asked(results, **changes)
    decided = blocks.decide(now, results, 2, [])
    assert (decided["rows"], decided["why"]) == ([], why)
    # Two repetitions a row are what its rule came to, and no breach; of `repeats: 2` they would be.
    files.write_json(decision_file(results, 2), decided)
    # A first look measures nothing, and says so.
    for repeats, quick, told in (("auto", False, False), (2, False, True), (2, True, False)):
        asked_for = now.source | {"rows": DROPPED | now.source["rows"], "repeats": repeats, "quick": quick}
        (results / "config.yaml").write_text(yaml.safe_dump(asked_for))
        breaches = [what for _, what in fairness.check(results).breaches]
        assert any("2 repetitions; at least 3" in what for what in breaches) == told


def test_a_row_that_was_always_disturbed_stays_in_contention(results):
    train(results, "single", [20.0, 20.4])
    train(results, "ddp", [10.0, 10.2])
    train(results, "fsdp", [90.0, 80.0], disturbed=True)
    decided = blocks.decide(asked(results), results, 2, [])
    assert (decided["rows"], decided["width"]) == (["ddp", "fsdp"], None)


def test_the_report_has_the_runs_that_were_decided_on_and_says_how_it_ended(results):
    train(results, "single", [20.0, 20.4])
    train(results, "ddp", [10.0, 10.9, 10.2])
    train(results, "fsdp", [10.4, 10.3])
    shutil.rmtree(results / "runs/ddp/n2/rep3")
    now = asked(results, budget=150.0)
    files.write_json(decision_file(results, 2), blocks.decide(now, results, 2, []))
    gathered = summary.gather(now, results)
    assert {row: len(runs) for row, runs in gathered.runs.items()} == {"single": 2, "ddp": 3, "fsdp": 3}
    said = " ".join(line.en for line in headline.lines(gathered))
    assert "Partial: 6 of 8 runs have a result." in said
    assert "No further blocks" not in said
    for row in ("ddp", "fsdp"):
        (run,) = (results / "runs" / row).glob("n*")
        shutil.copytree(run / "rep2", run / "rep3")
        record = files.read_json(run / "rep3/record.json")
        files.write_json(run / "rep3/record.json", record | {"repeat": 3})
    files.write_json(decision_file(results, 3), blocks.decide(now, results, 3, []))
    gathered = summary.gather(now, results)
    said = " ".join(line.en for line in headline.lines(gathered))
    assert "repetitions: 2 to 3" in said
    assert (
        "No further blocks were run, because their time was used up; of the rows still in contention, the widest"
        " interval between two was " in said
    )
    assert "3 undisturbed repetitions" not in said  # single is out of contention


def test_a_number_of_repetitions_is_no_matter_of_decision(run_script):
    code, _, said = run_script("decide", "--set", "repeats=1", "--block", "2")
    assert code == 2
    assert "repeats: is 1, so there is nothing to decide. Set it to auto." in said


SMALL = """
data: {limit: 600}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, max_steps: 4, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 0}
retries: 0
repeats: auto
"""


@pytest.mark.slow
def test_snakemake_trains_what_is_decided(tmp_path):
    """Two rows that are one program can't be told apart in two blocks of four steps, so a third follows."""
    place = copy_project(tmp_path / "project")
    default = schema.of_configuration()["properties"]["rows"]["default"]
    rows = dict.fromkeys(default) | {"single": {"strategy": "single"}, "dataparallel": {"strategy": "dataparallel"}}
    (place.folder / "small.yaml").write_text(SMALL + yaml.safe_dump({"rows": rows, "budget": 100000}))
    done = place.snakemake("results/blocks/3.json", "--cores", "all", "--configfile", "small.yaml")
    assert done.returncode == 0, done.stderr
    assert "repeats: auto: 2 blocks of 2 rows; then blocks of the fastest rows" in done.stderr
    assert "after block 2: the widest interval between the fastest is" in done.stdout
    second = files.read_json(place.path("results/blocks/2.json"))
    assert second["rows"] == ["single", "dataparallel"]
    made = sorted(
        str(file.parent.relative_to(place.path("results/runs")))
        for file in place.path("results/runs").glob("*/*/*/record.json")
    )
    assert made == [f"{row}/n1/rep{repeat}" for row in ("dataparallel", "single") for repeat in (1, 2, 3)]


TWO = """
model: {hidden_size: 64, layers: 1}
train: {epochs: 1, eval_every: 10}
hardware: {device: cpu, processes: 2, oversubscribe: true}
profile: {steps: 0}
retries: 0
"""


@pytest.mark.slow
def test_a_block_is_added_later_and_decided_on(tmp_path):
    """On real texts, where they are: two blocks, then a third, then as many as there is time for, which is none."""
    place = copy_project(tmp_path / "project")
    default = schema.of_configuration()["properties"]["rows"]["default"]
    rows = {name: None for name in default if name not in ("single", "ddp")}
    data = {"path": str(REAL_DATA), "limit": 2000} if REAL_DATA.is_file() else {"limit": 1500}
    place.path("two.yaml").write_text(TWO + yaml.safe_dump({"rows": rows, "data": data}), encoding="utf-8")

    def run(*asked: str) -> str:
        finished = place.snakemake("--cores", "all", "--configfile", "two.yaml", *asked)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout + finished.stderr

    run("--config", "repeats=2")
    assert run("--config", "repeats=3").count("repetition 3: train on") == 2
    summary_ = files.read_json(place.path("results/report/summary.json"))
    assert [(row["row"], row["status"]) for row in summary_["rows"]] == [("single", "ok"), ("ddp", "ok")]
    assert all(row["repeats"] + row["disturbed"] in (3, 6) for row in summary_["rows"])
    run("--config", "repeats=auto", "budget=1")
    assert files.read_json(place.path("results/blocks/3.json"))["why"] == "budget"
    assert "Nothing to be done" in run("--config", "repeats=auto", "budget=1")
    run("--config", "repeats=3", "--report", "results/report.zip")
    assert place.path("results/report.zip").stat().st_size > 0
