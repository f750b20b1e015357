"""The report over results as they may be: none yet, some missing, hostile texts, several repetitions."""

import copy
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from lockstep import config, files, reporting, summary, verdict
from lockstep.errors import BadInput


@pytest.fixture
def results(benchmark, tmp_path, monkeypatch) -> Path:
    """A copy of the benchmark's results, to be spoilt. Logs are named relative to the folder above."""
    ignored = shutil.ignore_patterns("native", "model", "weights", "dataset")
    shutil.copytree(benchmark.path("results"), tmp_path / "results", ignore=ignored)
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "results" / "runs").glob("*/*/*/record.json"):
        change(file, disturbed=[])  # whatever else this machine did meanwhile
    return tmp_path / "results"


def change(file: Path, **watched) -> None:
    """Change what a record says of what was watched beside its run."""
    found = files.read_json(file)
    files.write_json(file, found | {"watch": found["watch"] | watched})


def made(results: Path, **changes) -> tuple[dict, dict[str, dict], str]:
    """The report of what is in `results`: the summary, its rows by name, and the page."""
    raw = config.read([results / "config.yaml"]).source
    found = summary.gather(config.parse(copy.deepcopy(raw) | changes), results)
    reporting.write(found, results / "report", results / "predict" / "predictions.csv")
    page = (results / "report" / "report.html").read_text(encoding="utf-8")
    return (
        found | {"headline": [line.en for line in verdict.lines(found)]},
        {row["row"]: row for row in found["rows"]},
        page,
    )


def test_before_any_run(results):
    shutil.rmtree(results / "runs")
    shutil.rmtree(results / "predict")
    found, rows, page = made(results)
    assert found["headline"] == ["Nothing to compare yet: no row has a result."]
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("skipped", "not run yet")}
    assert "Nothing to compare yet" in page
    assert "<svg" not in page


def test_without_data_it_says_what_to_do(results):
    shutil.rmtree(results / "data")
    with pytest.raises(BadInput, match=r"data\.json does not exist\. Run workflow/scripts/prepare\.py first\."):
        made(results)


def test_a_row_that_was_not_tested_yet_is_not_compared(results):
    shutil.rmtree(results / "runs/ddp/n2/rep1/test")
    found, rows, _ = made(results)
    assert rows["ddp"]["status"] == "skipped"
    assert rows["ddp"]["reason"] == "trained, but not converted and tested yet"
    assert rows["ddp"]["speedup"] is None
    assert rows["ddp_spawn"]["speedup"] > 0
    assert any(re.fullmatch(r"Partial: (9|10) of 12 runs have a result\.", line) for line in found["headline"])


def test_without_the_baseline_there_is_no_speed_up(results):
    shutil.rmtree(results / "runs/single")
    found, rows, _ = made(results)
    assert all(row["speedup"] is None for row in rows.values())
    assert "of single's time" not in " ".join(found["headline"])


def test_a_failed_row_shows_the_end_of_its_log(results):
    _, rows, page = made(results)
    assert rows["exploding"]["status"] == "failed"
    shown = page[page.index("End of its log") :]
    assert "RunFailed: the loss is" in shown[: shown.index("</details>")]
    assert "failed" in (results / "report" / "report.md").read_text()


def test_medians_are_over_repetitions_and_a_failed_one_is_told(results):
    """Repetition 2 took twice as long, and repetition 3 failed."""
    run = results / "runs/ddp/n2"
    for repeat in (2, 3):
        shutil.copytree(run / "rep1", run / f"rep{repeat}")
    record = json.loads((run / "rep1/record.json").read_text())
    first = record["clock"]["train_seconds"]
    record["clock"]["train_seconds"] = 3 * first
    files.write_json(run / "rep2/record.json", record)
    (run / "rep3/record.json").unlink()
    files.write_json(run / "rep3/failed.json", record | {"status": "failed", "reason": "rank 1 died"})
    _, rows, _ = made(results, repeats=3)
    assert rows["ddp"]["train_seconds"] == pytest.approx(2 * first)
    assert (rows["ddp"]["repeats"], rows["ddp"]["status"], rows["ddp"]["reason"]) == (2, "failed", "rank 1 died")


def repeat(results: Path, row: str, seconds: list[float]) -> None:
    """Make repetitions of a row that took so long each."""
    (run,) = (results / "runs" / row).glob("n*")
    found = files.read_json(run / "rep1/record.json")
    for number, one in enumerate(seconds, 1):
        if number > 1:
            shutil.copytree(run / "rep1", run / f"rep{number}")
        clock = found["clock"] | {"train_seconds": one}
        files.write_json(run / f"rep{number}/record.json", found | {"clock": clock, "repeat": number})


def test_rows_are_compared_block_by_block(results):
    """The machine was half as fast in block 2: that says nothing of either row, and ddp is a fifth faster each time."""
    repeat(results, "single", [10.0, 20.0, 11.0])
    repeat(results, "ddp", [8.0, 16.0, 8.8])
    repeat(results, "fsdp", [10.1, 19.0, 11.5])
    shutil.rmtree(results / "profile")  # it would say why fsdp is slower
    three = {name: {"strategy": name} for name in ("single", "ddp", "fsdp")}
    found, rows, _ = made(results, repeats=3, rows=three)
    assert rows["ddp"]["speedup"] == pytest.approx(1.25)
    assert (rows["ddp"]["speedup_low"], rows["ddp"]["speedup_high"]) == pytest.approx((1.25, 1.25))
    assert rows["ddp"]["train_seconds"] == pytest.approx(8.8)
    assert found["ratios"]["fsdp"]["single"]["low"] < 1 < found["ratios"]["fsdp"]["single"]["high"]
    assert rows["ddp"]["rank"] < rows["single"]["rank"] == rows["fsdp"]["rank"]
    assert found["headline"][0] == "On this machine (2 CPU processes), ddp trains fastest; fsdp takes 26 % longer."
    assert found["headline"][1] == "ddp takes 0.8 of single's time (95 %: 0.8 to 0.8; 8.8 s against 11 s; n = 3)."


def test_a_disturbed_run_is_shown_and_left_out(results):
    repeat(results, "ddp", [8.0, 30.0, 8.2])
    change(results / "runs/ddp/n2/rep2/record.json", disturbed=["other processes used 1.20 of 2 CPU cores"])
    found, rows, page = made(results, repeats=3)
    assert rows["ddp"]["train_seconds"] == pytest.approx(8.1)
    assert (rows["ddp"]["repeats"], rows["ddp"]["disturbed"]) == (2, 1)
    assert "run 2 was disturbed: other processes used 1.20 of 2 CPU cores" in page
    assert any("disturbed and left out: 1 of" in line for line in found["headline"])


def test_runs_of_another_machine_are_warned_of(results):
    """The same row in an image without DeepSpeed is no other machine; another processor is."""
    file = results / "runs/ddp/n2/rep1/env.json"
    environment = json.loads(file.read_text())
    for there, told in ((environment["packages"] | {"deepspeed": None}, False), ({"torch": "1.0"}, True)):
        file.write_text(json.dumps(environment | {"packages": there}))
        found, _, _ = made(results)
        assert any("not all runs come from the same torch" in line for line in found["headline"]) == told
    file.write_text(json.dumps(environment | {"cpu": "Z80"}))
    found, _, page = made(results)
    assert any("not all runs come from the same cpu" in line for line in found["headline"])
    assert page.count('class="mind"') == 1


def test_one_run_a_row_is_no_verdict(results):
    found, _, _ = made(results)
    assert "had the shortest time" in found["headline"][0]
    assert "one run a row can't tell that from chance" in found["headline"][0]


def test_a_row_with_another_recipe_is_not_ranked(results):
    found, rows, _ = made(results, rows={"ddp": {"strategy": "ddp", "learning_rate": 100.0}})
    assert (rows["ddp"]["division"], rows["ddp"]["rank"]) == ("open", None)
    assert any("train by another recipe" in line for line in found["headline"])


def test_the_open_division_says_what_it_gains_and_that_quality_was_not_shown(results):
    repeat(results, "single", [10.0, 11.0])
    repeat(results, "ddp", [5.0, 5.5])
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "recipe", "packed": True}}
    found, _, page = made(results, rows=rows, repeats=2)
    (rung,) = found["ladder"]["rungs"]
    assert (rung["row"], rung["changes"], rung["quality"]) == ("ddp", "packed: true", "too_few")
    assert rung["gain"] == pytest.approx(2.0, rel=0.01)
    assert "In the open division, no row is shown to be both faster than single and as good." in found["headline"]
    assert "The open division: what each change gains" in page
    assert "| ddp | packed: true | 2.0" in (results / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ['{"row": ', "NaN", '{"row": "ddp"}', ""])
def test_a_damaged_record_is_named(results, text):
    (results / "runs/ddp/n2/rep1/record.json").write_text(text)
    with pytest.raises(BadInput, match=r"runs/ddp/n2/rep1/record\.json: is "):
        made(results)


def test_a_row_whose_every_run_was_disturbed_has_no_rank(results):
    change(results / "runs/ddp/n2/rep1/record.json", disturbed=["a GPU was throttled"])
    found, rows, _ = made(results)
    assert rows["ddp"]["rank"] is None
    assert rows["ddp"]["train_seconds"] > 0
    assert any("no undisturbed run, so no trustworthy times: ddp" in line for line in found["headline"])


def test_figures_that_no_device_tells_are_not_guessed(results):
    _, rows, _ = made(results)
    assert rows["ddp"]["energy_joules"] is None or rows["ddp"]["energy_joules"] > 0
    (results / "data" / "peak.json").unlink()
    _, rows, _ = made(results)
    assert rows["ddp"]["mfu"] is None


def test_rows_that_do_other_work_are_not_compared(results):
    rows = config.read([results / "config.yaml"]).source["rows"]
    _, lines, page = made(results, rows=rows | {"ddp": {"strategy": "ddp", "max_steps": 5}})
    assert (lines["ddp"]["division"], lines["ddp"]["speedup"]) == ("open", None)
    assert lines["ddp_spawn"]["division"] == "closed"
    assert "rows marked open train by another recipe" in page


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_the_page_needs_nothing_from_outside(results):
    _, _, page = made(results)
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "iframe", "object")
        assert tag != "script" or not attributes
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert not re.search(r"url\((?!#)", page)
    assert len(page.encode()) < 500_000
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))


def test_texts_of_the_data_stay_texts(results):
    """The data is anybody's: a text must not become part of the page, of a table, or a spreadsheet's formula."""
    hostile = '<img src=x onerror=alert(1)>"|`[a](b)'
    predictions = pd.DataFrame({"text": [hostile], "truth": ["高兴"], "single": ["<b>"]})
    predictions.to_csv(results / "predict" / "predictions.csv", index=False)
    failed = json.loads((results / "runs/exploding/n1/rep1/failed.json").read_text())
    files.write_json(results / "runs/exploding/n1/rep1/failed.json", failed | {"reason": hostile})
    (results / "runs/exploding/n1/rep1/run.log").write_text(f"</pre>{hostile}\n")
    _, _, page = made(results)
    assert not any(tag in ("img", "b") and attributes for tag, attributes in Elements(page).found)
    assert page.count("&lt;img src=x") == 3
    markdown = (results / "report" / "report.md").read_text()
    assert "<img" not in markdown
    assert r"\|\`\[a\](b)" in markdown


def test_the_pictures_are_files_too(results):
    made(results)
    plots = sorted(os.listdir(results / "report" / "plots"))
    names = ("confusion", "losses", "memory", "quality", "setup", "step_parts", "train_seconds")
    assert plots == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    first = (results / "report/plots/losses.svg").read_bytes()
    made(results)
    assert (results / "report/plots/losses.svg").read_bytes() == first
