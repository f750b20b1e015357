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

from lockstep import config, files, reporting
from lockstep.errors import BadInput


@pytest.fixture
def results(benchmark, tmp_path, monkeypatch) -> Path:
    """A copy of the benchmark's results, to be spoilt. Logs are named relative to the folder above."""
    ignored = shutil.ignore_patterns("native", "model", "weights", "dataset")
    shutil.copytree(benchmark.path("results"), tmp_path / "results", ignore=ignored)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def made(results: Path, **changes) -> tuple[dict, dict[str, dict], str]:
    """The report of what is in `results`: the summary, its rows by name, and the page."""
    raw = config.read([results / "config.yaml"]).source
    summary = reporting.gather(config.parse(copy.deepcopy(raw) | changes), results)
    reporting.write(summary, results / "report", results / "predict" / "predictions.csv")
    page = (results / "report" / "report.html").read_text(encoding="utf-8")
    return summary, {row["row"]: row for row in summary["rows"]}, page


def test_before_any_run(results):
    shutil.rmtree(results / "runs")
    shutil.rmtree(results / "predict")
    summary, rows, page = made(results)
    assert summary["headline"] == ["Nothing to compare yet: no row has a result."]
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("skipped", "not run yet")}
    assert "Nothing to compare yet" in page
    assert "<svg" not in page


def test_without_data_it_says_what_to_do(results):
    shutil.rmtree(results / "data")
    with pytest.raises(BadInput, match=r"data\.json does not exist\. Run workflow/scripts/prepare\.py first\."):
        made(results)


def test_a_row_that_was_not_tested_yet_is_not_compared(results):
    shutil.rmtree(results / "runs/ddp/n2/rep1/test")
    summary, rows, _ = made(results)
    assert rows["ddp"]["status"] == "skipped"
    assert rows["ddp"]["reason"] == "trained, but not converted and tested yet"
    assert rows["ddp"]["speedup"] is None
    assert rows["ddp_spawn"]["speedup"] > 0
    assert any(re.fullmatch(r"Partial: (9|10) of 12 rows have a result\.", line) for line in summary["headline"])


def test_without_the_baseline_there_is_no_speed_up(results):
    shutil.rmtree(results / "runs/single")
    summary, rows, _ = made(results)
    assert all(row["speedup"] is None for row in rows.values())
    assert "of single's time" not in " ".join(summary["headline"])


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


def test_rows_that_do_other_work_are_not_compared(results):
    rows = config.read([results / "config.yaml"]).source["rows"]
    _, lines, page = made(results, rows=rows | {"ddp": {"strategy": "ddp", "max_steps": 5}})
    assert (lines["ddp"]["division"], lines["ddp"]["speedup"]) == ("open", None)
    assert lines["ddp_spawn"]["division"] == "closed"
    assert "rows marked open do other work" in page


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
        assert tag not in ("script", "link", "iframe", "object")
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
    assert plots == ["losses.png", "losses.svg", "train_seconds.png", "train_seconds.svg"]
    first = (results / "report/plots/losses.svg").read_bytes()
    made(results)
    assert (results / "report/plots/losses.svg").read_bytes() == first
