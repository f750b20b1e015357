"""The report over results as they may be: none yet, some missing, hostile texts, several repetitions."""

import copy
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from lockstep import columns, files, paths
from lockstep.config import reading
from lockstep.config.hardware import shares_gpus
from lockstep.errors import BadInput
from lockstep.report import cautions, conditions, headline, page, reasons, words
from lockstep.report.summary import Summary, gather
from tests.made import run as one_run


@pytest.fixture
def results(benchmark, tmp_path, monkeypatch) -> Path:
    """A copy of the benchmark's results, to be spoilt. Logs are named relative to the folder above."""
    ignored = shutil.ignore_patterns("native", "model", "weights", "dataset")
    shutil.copytree(benchmark.path("results"), tmp_path / "results", ignore=ignored)
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "results" / "runs").glob("*/*/*/record.json"):
        change(file, disturbed=[])  # whatever else this machine did meanwhile
    return tmp_path / "results"


# All of summary.json beside its headline.
KEYS = (
    *("rows", "runs", "ratios", "statistics", "apart", "blocks", "variance", "verdicts", "not_in_trials"),
    *(
        "scaling",
        "ladder",
        "profiles",
        "stale",
        "data",
        "peak",
        "network",
        "foretold",
        "plans",
        "environment",
        "manifest",
        "damaged",
        "config",
        "published",
    ),
)


def change(file: Path, **watched) -> None:
    """Change what a record says of what was watched beside its run."""
    record = files.read_json(file)
    files.write_json(file, record | {"watch": record["watch"] | watched})


def gathered(results: Path, **changes) -> tuple[Summary, dict[str, dict]]:
    """The summary of what is in `results`, and its rows by name."""
    raw = reading.read([results / "config.yaml"]).source
    summary = gather(reading.parse(copy.deepcopy(raw) | changes), results)
    return summary, {row["row"]: row for row in summary.rows}


def first_lines(summary: Summary) -> list[str]:
    """The report's first lines."""
    lines = [line.en for line in headline.lines(summary)]
    assert len(lines[0].split()) <= 25, "the answer is one short sentence; all else stands below it"
    return lines


def made(results: Path, **changes) -> tuple[Summary, dict[str, dict], str]:
    """The same as `gathered`, and the page, whose pictures take seconds to draw."""
    summary, rows = gathered(results, **changes)
    page.write(summary, results / "report", results / "predict" / "predictions.csv")
    return summary, rows, (results / "report" / "report.html").read_text(encoding="utf-8")


def test_a_table_of_several_builds_says_so_at_once_and_lists_them(results):
    for number, file in enumerate(sorted((results / "runs").glob("*/*/rep1/env.json"))):
        about = {"image": "lockstep/bench:cpu", "image_digest": f"sha256:{'ab'[number % 2] * 64}"}
        files.write_json(file, files.read_json(file) | about | {"python": f"3.11.{number % 2}"})
    summary, _, page = made(results)
    assert "not all runs come from the same python, build of an image: check.py says which" in first_lines(summary)[-1]
    assert set(summary.environment["images"]["lockstep/bench:cpu"]) == {f"sha256:{64 * letter}" for letter in "ab"}
    assert sorted(summary.environment["python"].split(" / ")) == ["3.11.0", "3.11.1"]
    assert all(f"sha256:{12 * letter}" in page for letter in "ab")


def test_summary_json_has_the_keys_that_users_script_against(results):
    summary, _, _ = made(results)
    written = files.read_json(results / "report" / "summary.json")
    assert list(written) == ["headline", *KEYS]
    assert written["headline"] == first_lines(summary)


def test_before_any_run(results):
    shutil.rmtree(results / "runs")
    shutil.rmtree(results / "predict")
    summary, rows, page = made(results)
    assert first_lines(summary) == ["Nothing to compare yet: no row has a result."]
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("skipped", "not run yet")}
    assert "Nothing to compare yet" in page
    assert "<svg" not in page


def test_without_data_it_says_what_to_do(results):
    shutil.rmtree(results / "data")
    with pytest.raises(BadInput, match=r"data\.json does not exist\. Run workflow/scripts/prepare\.py first\."):
        made(results)


def test_a_first_look_says_so_wherever_its_figures_stand(results):
    _, _, page = made(results, quick=True)
    assert 'class="badge"><span class="en" lang="en">first look</span>' in page
    assert "this is a first look: it shows that everything works here" in page
    assert "A first look (few rows, a small model, one run each)" in (results / "report/report.md").read_text()


def test_a_row_that_was_not_tested_yet_is_not_compared(results):
    shutil.rmtree(results / "runs/ddp/n2/rep1/test")
    summary, rows = gathered(results)
    assert rows["ddp"]["status"] == "skipped"
    assert rows["ddp"]["reason"] == "trained, but not converted and tested yet"
    assert rows["ddp"]["speedup"] is None
    assert rows["ddp_spawn"]["speedup"] > 0
    assert any(re.fullmatch(r"Partial: (9|10) of 12 runs have a result\.", line) for line in first_lines(summary))


def test_without_the_baseline_there_is_no_speed_up(results):
    shutil.rmtree(results / "runs/single")
    summary, rows = gathered(results)
    assert all(row["speedup"] is None for row in rows.values())
    assert "of single's time" not in " ".join(first_lines(summary))


def test_a_failed_row_shows_the_end_of_its_log(results):
    _, rows, page = made(results)
    assert rows["exploding"]["status"] == "failed"
    shown = page[page.index("End of its log") :]
    assert "RunFailed: the loss is" in shown[: shown.index("</details>")]
    assert "failed" in (results / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("device", "nccl", "said"), [("cuda:0", False, True), ("cuda:0", True, False), ("cpu", False, False)]
)
def test_horovod_without_nccl_on_gpus_is_a_condition(results, device, nccl, said):
    """On a CPU it has none, and needs none."""
    file = results / "runs" / "ddp" / "n2" / "rep1" / "record.json"
    record = files.read_json(file)
    live = record["settings"] | {"device": device}
    live["options"] |= {"nccl_built": nccl}
    files.write_json(file, record | {"settings": live})
    summary, _ = gathered(results)
    (conditions,) = [line for line in first_lines(summary) if "global batch 31" in line]
    assert ("Horovod was built without NCCL, so the GPUs of ddp exchanged data through the CPU" in conditions) == said


@pytest.mark.parametrize("shown", [True, False, None])
def test_a_row_is_called_slower_only_if_that_is_shown(shown):
    row = {"device": "cpu", "place": 1, "repeats": 1, "devices": 2, "division": "closed", "world_size": 2}
    rows = [
        row | {"row": name, "strategy": name, "train_seconds": time} for name, time in (("ddp", 1.0), ("fsdp", 2.0))
    ]
    ratios = {"ddp": {"fsdp": {"value": 0.5, "shown": shown}}}
    said = [line.en for line in headline.answer(rows[0], rows, SimpleNamespace(ratios=ratios, profiles={}))]
    assert said[1:] == (["fsdp takes 2.00 times as long as ddp."] if shown else [])
    assert "fsdp" not in said[0]


@pytest.mark.parametrize(("value", "named"), [(0.8, True), (1.25, False)])
def test_a_later_place_is_put_down_to_a_row_that_is_faster_and_never_to_a_slower_one(value, named):
    """fsdp is not shown to be slower than ddp, and has a later place; horovod differs from it, one way or the other."""
    row = {"repeats": 3, "train_seconds": 5.0}
    rows = [row | {"row": name, "place": place} for name, place in (("ddp", 1), ("horovod", 1), ("fsdp", 2))]
    alike = {"value": 0.97, "shown": False}
    ratios = {"ddp": {"fsdp": alike}, "horovod": {"fsdp": {"value": value, "shown": True}}}
    said = [line.en for line in headline._later(rows[0], rows, SimpleNamespace(ratios=ratios))]
    expected = "The place of fsdp is later than that of ddp, because horovod is shown to be faster."
    assert said == ([expected] if named else [])


def test_runs_that_tell_hardly_any_rows_apart_give_no_figure():
    assert "differ by less than 8.5 %" in conditions.resolution(0.085).en
    assert "22" not in conditions.resolution(22.0).en


def test_where_single_wins_the_devices_are_those_of_all_rows():
    rows = [
        {"row": name, "device": "cpu", "place": None, "repeats": 1, "devices": devices, "train_seconds": devices}
        | {"division": "closed", "world_size": devices, "strategy": name}
        for name, devices in (("single", 1), ("ddp", 2))
    ]
    (said,) = headline.answer(rows[0], rows, SimpleNamespace(ratios={}, profiles={}))
    assert said.en.startswith("On this machine (2 CPU devices), single had the shortest time")


def test_a_run_of_three_steps_praises_no_row_and_says_that_nothing_was_learnt(results):
    """Whatever the milliseconds say."""
    for file in (results / "runs").glob("*/*/*/record.json"):
        files.write_json(file, files.read_json(file) | {"steps": 3})
    summary, rows = gathered(results)
    lines = first_lines(summary)
    assert lines[0] == (
        "It is unknown which row is faster: after only 3 optimizer steps, differences of milliseconds mean nothing."
    )
    assert not any("of single's time" in line for line in lines)
    assert "no model has learnt anything yet" in lines[-1]
    assert {row["mfu"] for row in rows.values()} == {None}
    assert not any("speed-up" in figure.label.en for figure in headline.figures(summary))


def test_a_model_that_learnt_is_not_said_to_have_learnt_nothing(results):
    assert "no model has learnt anything yet" in first_lines(gathered(results)[0])[-1]
    file = results / "runs/ddp/n2/rep1/test/report.json"
    files.write_json(file, files.read_json(file) | {"macro_f1": 0.9})
    assert "no model has learnt anything yet" not in first_lines(gathered(results)[0])[-1]


def test_results_of_an_earlier_version_may_lack_a_later_figure(results):
    file = results / "runs/ddp/n2/rep1/test/report.json"
    scores = files.read_json(file)
    del scores["accuracy"]
    files.write_json(file, scores)
    _, rows, page = made(results)
    assert (rows["ddp"]["status"], rows["ddp"]["accuracy"]) == ("ok", None)
    assert rows["ddp"]["macro_f1"] == scores["macro_f1"]
    assert f"macro-F1 {scores['macro_f1']:.4f}" in page


def test_the_markdown_tells_nobody_to_click(results):
    _, _, page = made(results)
    assert "Click a heading" in page
    assert "Click" not in (results / "report" / "report.md").read_text()


def test_ranks_that_share_a_gpu_are_told_of():
    """A row of three ranks on one GPU is fastest; single has one to itself."""
    best = {"row": "ddp", "device": "cuda", "world_size": 3, "devices": 1, "place": None, "repeats": 2}
    summary = SimpleNamespace(ratios={}, profiles={})
    assert headline.answer(best, [best], summary)[0].en == "On this machine (1 GPU), ddp trains fastest."
    assert "(4 GPUs)" in headline.answer(best, [best, best | {"devices": 4}], summary)[0].en
    used = ({"processes": 3, "gpu_count": 1}, {"processes": 2, "gpu_count": 2}, {"processes": 2, "gpu_count": 0})
    assert [shares_gpus(hardware) for hardware in (*used, {"processes": 3})] == [True, False, False, False]


def test_a_row_without_a_run_has_empty_cells():
    rows = [
        dict.fromkeys(columns.KEYS) | {"row": name, "proof": "not-run", "status": "ok"} for name in ("ran", "did_not")
    ]
    rows[0]["utilisation_by_gpu"] = "50 / 51"
    said = [{cell.key: cell.text.en for cell in line} for line in page.table(rows)]
    assert [line["utilisation_by_gpu"] for line in said] == ["50 / 51", ""]


def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_words():
    figures = {"train_seconds": 1.5, "startup_seconds": 4.0, "samples_per_second": 900.0, "accuracy": 0.5}
    rows = [
        dict.fromkeys(columns.KEYS) | {"row": name, "proof": "equal"} | figures for name in ("single", "all_threads")
    ]
    wide, _ = page.plain(rows)
    narrow, lines = page.plain(rows, 70)
    assert set(wide) - set(narrow) == {"start-up s"}
    assert narrow[:3] == ["row", "same model?", "train s"]
    assert sum(max(len(line[k]) for line in [narrow, *lines]) + 3 for k in range(len(narrow))) < 70


def test_a_terminal_has_how_far_runs_are_from_the_median_beside_it():
    figures = {"train_seconds": 4.5, "train_seconds_low": 4.45, "train_seconds_high": 4.75, "repeats": 3}
    figures |= {"speedup": 1.59, "speedup_low": 1.44, "speedup_high": 1.77, "proof": "within-tolerance", "place": 1}
    rows = [dict.fromkeys(columns.KEYS) | {"row": "ddp_amp"} | figures]
    for width, told in ((80, ["4.50 ± 0.25", "1.59 (1.44–1.77)"]), (60, ["4.50", "1.59"])):
        headings, (line,) = page.plain(rows, width)
        shown = dict(zip(headings, line, strict=True))
        assert [shown["train s"], shown["speed-up"]] == told
        assert sum(max(len(heading), len(cell)) + 3 for heading, cell in shown.items()) < width


def test_what_would_tell_the_rows_apart_is_a_command_with_its_minutes():
    """Three blocks of two rows, of 40 s a run; an interval is half as wide over four times as many."""
    done = [dict.fromkeys(columns.KEYS) | {"row": name, "strategy": name, "world_size": 2} for name in ("ddp", "fsdp")]
    done = [row | {"place": 1, "repeats": 3, "train_seconds": 4.0} for row in done]
    runs = [one_run(wall_seconds=40.0)] * 3
    about = {"runs": {"ddp": runs, "fsdp": runs}, "succeeded_runs": [*runs, *runs], "blocks": None}
    about["manifest"] = {"command": "snakemake --cores all --configfile 'my own.yaml' --config repeats=3"}
    (said,) = headline._further(done[0], done, SimpleNamespace(config={"quick": False}, **about))
    again = "lockstep bench --configfile 'my own.yaml' --config repeats=12"
    assert said.en == f"More runs may tell them apart: {again} (about 12 minutes more)."
    blocks = {"why": "budget", "width": 0.1, "next_seconds": 60.0, "block": 3, "seconds": 330.0}
    about |= {"blocks": blocks, "manifest": None}
    (said,) = headline._further(done[0], done, SimpleNamespace(config={"quick": False}, **about))
    assert said.en.endswith(" apart: lockstep bench --config budget=900 (about 9 minutes more).")
    about |= {"blocks": blocks | {"why": "precise"}}
    assert headline._further(done[0], done, SimpleNamespace(config={"quick": False}, **about)) == []


def test_what_is_left_out_of_a_list_is_counted():
    assert words.some(list("abcdef"), 2).en == "a, b and 4 more"
    assert words.some(list("abcdef"), 2).zh == "a、b 及另外 4 个"
    assert words.some(list("abc"), 2).en == "a, b and c"


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
    _, rows = gathered(results, repeats=3)
    assert rows["ddp"]["train_seconds"] == pytest.approx(2 * first)
    assert (rows["ddp"]["repeats"], rows["ddp"]["status"], rows["ddp"]["reason"]) == (2, "failed", "rank 1 died")


def repeat(results: Path, row: str, seconds: list[float]) -> None:
    """Make repetitions of a row that took so long each."""
    (run,) = (results / "runs" / row).glob("n*")
    record = files.read_json(run / "rep1/record.json")
    for number, train_seconds in enumerate(seconds, 1):
        if number > 1:
            shutil.copytree(run / "rep1", run / f"rep{number}")
        clock = record["clock"] | {"train_seconds": train_seconds, "stall_seconds": 0.0}  # whatever stalled here
        files.write_json(run / f"rep{number}/record.json", record | {"clock": clock, "repeat": number})


def test_rows_are_compared_block_by_block(results):
    """The machine was half as fast in block 2: that says nothing of either row, and ddp is a fifth faster each time."""
    repeat(results, "single", [10.0, 20.0, 11.0])
    repeat(results, "ddp", [8.0, 16.0, 8.8])
    repeat(results, "fsdp", [10.1, 19.0, 11.5])
    shutil.rmtree(results / "profile")  # it would say why fsdp is slower
    three = {name: {"strategy": name} for name in ("single", "ddp", "fsdp")}
    summary, rows = gathered(results, repeats=3, rows=three)
    assert rows["ddp"]["speedup"] == pytest.approx(1.25)
    # The spread is that of all three rows, though ddp and single alone would agree to the last digit.
    assert (rows["ddp"]["speedup_low"], rows["ddp"]["speedup_high"]) == pytest.approx((1.173, 1.332), abs=1e-3)
    assert rows["ddp"]["train_seconds"] == pytest.approx(8.8)
    assert summary.ratios["fsdp"]["single"]["low"] < 1 < summary.ratios["fsdp"]["single"]["high"]
    assert rows["ddp"]["rank"] < rows["single"]["rank"] == rows["fsdp"]["rank"]
    lines = first_lines(summary)
    assert lines[0] == f"Use ddp: 1.25 times as fast as single{share(summary)} (1.17 to 1.33), the same model."
    assert lines[1] == "fsdp takes 1.25 times as long as ddp."
    assert (
        lines[2]
        == "ddp (2 CPU devices) takes 0.800 of single's time (95 %: 0.751 to 0.852; 8.8 s against 11 s; n = 3)."
    )
    assert "These runs can't tell two rows apart that differ by less than 8.5 %." in lines[4]


def test_rows_that_are_alike_share_the_first_place(results):
    repeat(results, "single", [10.0, 10.2, 10.1])
    repeat(results, "ddp", [8.0, 8.2, 8.1])
    repeat(results, "fsdp", [8.1, 8.0, 8.2])
    shutil.rmtree(results / "profile")
    three = {name: {"strategy": name} for name in ("single", "ddp", "fsdp")}
    summary, rows = gathered(results, repeats=3, rows=three)
    assert {name: row["rank"] for name, row in rows.items()} == {"single": 3, "ddp": 1, "fsdp": 1}
    assert first_lines(summary)[:2] == [
        f"Use ddp: 1.25 times as fast as single{share(summary)} (1.21 to 1.28), the same model.",
        "Not shown to be faster or slower than ddp: fsdp.",
    ]


def test_of_rows_that_tie_the_first_of_the_table_is_named_though_another_was_faster(results):
    """Which of them had the shorter time is chance."""
    repeat(results, "single", [10.0, 10.2, 10.1])
    repeat(results, "ddp", [8.2, 8.1, 8.3])
    repeat(results, "fsdp", [8.1, 8.0, 8.2])
    three = {name: {"strategy": name} for name in ("single", "ddp", "fsdp")}
    summary, rows = gathered(results, repeats=3, rows=three)
    assert rows["fsdp"]["train_seconds"] < rows["ddp"]["train_seconds"]
    assert first_lines(summary)[0].startswith("Use ddp: 1.2")
    assert first_lines(summary)[1] == "Not shown to be faster or slower than ddp: fsdp."


def test_rows_behind_the_first_ones_that_are_not_shown_to_be_slower_are_named(results):
    """ddp_amp is shown to be faster than fsdp, and not than ddp; ddp is not shown to be faster than fsdp."""
    repeat(results, "single", [10.0, 10.3, 10.1])
    repeat(results, "ddp", [8.05, 8.2, 8.1])
    repeat(results, "fsdp", [8.1, 8.25, 8.2])
    repeat(results, "ddp_amp", [8.0, 8.1, 8.0])
    four = {name: {"strategy": name} for name in ("single", "ddp", "ddp_amp", "fsdp")}
    summary, rows = gathered(results, repeats=3, rows=four)
    assert [rows[name]["place"] for name in ("ddp", "ddp_amp", "fsdp")] == [1, 1, 2]
    assert first_lines(summary)[1] == "Not shown to be faster or slower than ddp: ddp_amp and fsdp."
    shown = {name: ratio["shown"] for name, ratio in summary.ratios["ddp"].items()}
    assert shown == {"single": True, "ddp": False, "ddp_amp": False, "fsdp": False}
    assert summary.ratios["ddp_amp"]["fsdp"]["shown"] is True
    later = "The place of fsdp is later than that of ddp, because ddp_amp is shown to be faster."
    assert [line for line in first_lines(summary) if "is later" in line] == [later]


def test_a_proof_that_a_mild_mistake_would_pass_is_a_caution(results):
    (file,) = (results / "parity" / "ddp").rglob(paths.VERDICT)
    verdict = files.read_json(file)
    assert verdict["mistake_of_limit"] > 1

    def cautioned() -> list[str]:
        """The rows of which the last line says so; in half precision a row may be among them."""
        found = re.search(r"in the precision of (.+?) rounding is so large", cautions.warning(gathered(results)[0]).en)
        return re.split(", | and ", found[1]) if found else []

    assert "ddp" not in cautioned()
    files.write_json(file, verdict | {"mistake_of_limit": 0.9})
    assert "ddp" in cautioned()


def test_where_single_is_not_shown_slower_it_is_what_to_use(results):
    repeat(results, "single", [10.0, 10.2, 10.1])
    repeat(results, "ddp", [10.1, 10.0, 10.2])
    summary, _ = gathered(results, repeats=3, rows={name: {"strategy": name} for name in ("single", "ddp")})
    assert first_lines(summary)[:2] == [
        "Use single: no other row is shown to be faster when all are compared at once.",
        "Not shown to be faster or slower than single: ddp.",
    ]


def share(summary) -> str:
    """What the first sentence says of the cores that single has, where it has not all of them."""
    of_cores = conditions.baseline_cores(summary)
    return f" on {of_cores[1]} of the {of_cores[2]} cores" if of_cores else ""


def profiled(steps: float, communication: float, exposed: float) -> dict:
    """One row's profile, in seconds; what is not communication is backward."""
    parts = {"backward": steps - communication, "communication": communication}
    return {"step_seconds": steps, "seconds": parts, "exposed_by_difference": exposed}


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (
            profiled(0.050, 0.030, 0.024),
            "30 ms longer than fast's, of which 24 to 30 ms are exposed communication",
        ),
        (profiled(0.050, 0.030, 0.009), ""),  # the two ways of finding it disagree
        (profiled(0.050, 0.030, 0.002), ""),  # no more than where nothing is communicated
        (profiled(0.050, 0.030, 0.024) | {"step_seconds": 0.022}, ""),  # recording it made it slower
        (profiled(0.050, 0.002, 0.0), "30 ms longer than fast's, of which 28 ms are backward"),
        (profiled(0.050, 0.030, None), ""),  # ranks hold a replica together, and no device does the same work alone
        (None, ""),
    ],
)
def test_a_cause_is_named_where_two_ways_of_finding_it_agree(ours, said):
    profiles = {"slow": ours, "fast": profiled(0.020, 0.0, 0.0), "single": profiled(0.03, 0.0, -0.0026)}
    steps = {name: profile["step_seconds"] for name, profile in profiles.items() if profile}
    text = reasons.because("slow", "fast", profiles, steps)
    assert text.en == (f"A step of slow takes {said}, by one profiled run of each." if said else "")
    if said:  # in terms of the rows' step times, which the page has everywhere
        twice = reasons.because("slow", "fast", profiles, {name: 1.5 * seconds for name, seconds in steps.items()})
        assert twice.en.startswith("A step of slow takes 45 ms longer than fast's")


def test_a_cause_is_named_where_no_gpu_could_hold_another_row_s_model_twice():
    profiles = {"slow": profiled(0.050, 0.030, 0.024), "fast": profiled(0.020, 0.0, 0.0)}
    steps = {"slow": 0.05, "fast": 0.02}
    known = reasons.because("slow", "fast", profiles, steps)
    profiles["single"] = profiled(0.03, 0.0, None)
    assert reasons.because("slow", "fast", profiles, steps) == known
    assert known.en


@pytest.mark.parametrize(
    ("seconds", "said"), [([0.0012], "1.2"), ([0.0012, 0.00118], "1.2"), ([0.0025, 0.0015], "1.5 to 2.5")]
)
def test_a_time_that_was_found_in_one_way_only_is_told(seconds, said):
    """As of `tp` and `pp`, whose work no single device does alone."""
    assert reasons.milliseconds(seconds).en == said


def test_a_disturbed_run_is_shown_and_left_out(results):
    repeat(results, "ddp", [8.0, 30.0, 8.2])
    change(results / "runs/ddp/n2/rep2/record.json", disturbed=["other processes used 1.20 of 2 CPU cores"])
    summary, rows, page = made(results, repeats=3)
    assert rows["ddp"]["train_seconds"] == pytest.approx(8.1)
    assert (rows["ddp"]["repeats"], rows["ddp"]["disturbed"]) == (2, 1)
    assert "run 2 was disturbed: other processes used 1.20 of 2 CPU cores" in page
    assert any("disturbed and left out: 1 of" in line for line in first_lines(summary))


def test_runs_of_another_machine_are_warned_of(results):
    """The same row in an image without DeepSpeed is no other machine; another processor is."""
    file = results / "runs/ddp/n2/rep1/env.json"
    environment = json.loads(file.read_text())
    for there, told in ((environment["packages"] | {"deepspeed": None}, False), ({"torch": "1.0"}, True)):
        file.write_text(json.dumps(environment | {"packages": there}))
        summary, _ = gathered(results)
        assert any("not all runs come from the same torch" in line for line in first_lines(summary)) == told
    file.write_text(json.dumps(environment | {"cpu": "Z80"}))
    summary, _, page = made(results)
    assert any("not all runs come from the same cpu" in line for line in first_lines(summary))
    assert page.count('class="mind"') == 1


def test_it_says_by_whose_settings_a_row_is_proven(results):
    summary, _ = gathered(results)
    named = {row: settings for row, settings in summary.not_in_trials.items() if settings}
    assert named == {"exploding": ["learning_rate", "clip"]}
    none, own = replace(summary, not_in_trials={}), replace(summary, not_in_trials={"ddp": ["optimizer"]})
    assert "the proof tests the strategy" not in " ".join(first_lines(none))
    assert "For ddp, the proof tests the strategy with the table's settings" in " ".join(first_lines(own))


def test_one_run_a_row_is_no_verdict(results):
    summary, _ = gathered(results)
    assert "had the shortest time" in first_lines(summary)[0]
    assert "which may be chance, as it has only one undisturbed run" in first_lines(summary)[0]


def ask(results: Path, row: str, **settings) -> None:
    """Change what a row's runs were asked for: keys of a run's settings, of which `train` and the like are added to."""
    for file in (results / "runs" / row).glob("*/*/record.json"):
        record = files.read_json(file)
        asked = record["asked"]
        for key, value in settings.items():
            asked[key] = asked[key] | value if isinstance(value, dict) and key != "options" else value
        files.write_json(file, record)


OTHER = {"weight_decay": 0.5}  # what the configuration asks for after all but one row were trained


@pytest.fixture
def mixed(results) -> tuple[dict, dict, str]:
    """The report after `snakemake ddp --config 'train={weight_decay: 0.5}'`, the other rows being of before."""
    ask(results, "ddp", train=OTHER)
    return made(results, train=reading.read([results / "config.yaml"]).source["train"] | OTHER)


def test_results_of_other_settings_are_shown_as_such(mixed, results):
    summary, rows, page = mixed
    why = "made with other settings: train.weight_decay 0.01, now 0.5"
    assert (rows["single"]["status"], rows["single"]["reason"]) == ("stale", why)
    assert rows["ddp"]["status"] == "ok"
    assert why in page
    assert f"- **single** stale: {why}" in (results / "report" / "report.md").read_text(encoding="utf-8").replace(
        "\\", ""
    )
    assert "made with other settings than the row has now, so left out: single" in first_lines(summary)[-1]
    assert f"Partial: 1 of {len(rows)} runs have a result." in first_lines(summary)


def test_results_of_other_settings_are_in_no_ratio_rank_or_sentence(mixed):
    summary, rows, _ = mixed
    assert list(summary.ratios) == ["ddp"]
    assert list(summary.ratios["ddp"]) == ["ddp"]
    for name, row in rows.items():
        assert (row["train_seconds"] is None, row["rank"] is None) == (name != "ddp", name != "ddp")
    assert rows["ddp"]["speedup"] is None  # its baseline is of other settings
    assert first_lines(summary)[0].startswith(
        "On this machine (2 CPU devices), ddp had the shortest time, which may be chance"
    )


def test_a_proof_and_a_profile_of_other_settings_do_not_count(mixed):
    summary, rows, page = mixed
    assert {row["proof"] for row in rows.values()} == {"not-run"}
    assert set(summary.profiles.values()) == {None}
    for what in ("proof", "profile"):
        assert f"its {what} is left out: made with other settings: train.weight_decay 0.01, now 0.5" in page


def test_results_of_other_data_are_shown_as_such(results):
    file = results / "data" / "data.json"
    about = files.read_json(file)
    files.write_json(file, about | {"hash": 64 * "0"})
    _, rows = gathered(results)
    assert rows["ddp"]["reason"] == "made with other settings: data that have changed since"
    files.write_json(file, about)
    _, rows = gathered(results, data=reading.read([results / "config.yaml"]).source["data"] | {"limit": 5})
    assert rows["ddp"]["reason"] == "made with other settings: data.limit 700, now 5"


def test_what_decides_no_result_makes_none_stale(results):
    """A timeout, a port, and what else stands in the table."""
    asked = reading.read([results / "config.yaml"]).source
    hardware = asked["hardware"] | {"timeout": 7, "port": 29600}
    _, rows = gathered(results, hardware=hardware, rows=asked["rows"] | {"more": {"strategy": "ddp", "clip": 0}})
    assert rows["ddp"]["status"] == "ok"
    assert rows["more"]["status"] == "skipped"


def test_a_row_with_another_recipe_is_not_ranked(results):
    ask(results, "ddp", train={"learning_rate": 100.0})
    summary, rows = gathered(results, rows={"ddp": {"strategy": "ddp", "learning_rate": 100.0}})
    assert (rows["ddp"]["division"], rows["ddp"]["rank"]) == ("open", None)
    assert any("train by another recipe" in line for line in first_lines(summary))


def test_the_open_division_says_what_it_gains_and_that_quality_was_not_shown(results):
    repeat(results, "single", [10.0, 11.0])
    repeat(results, "ddp", [5.0, 5.5])
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "recipe", "packed": True}}
    ask(results, "ddp", strategy="recipe", options={})
    summary, _, page = made(results, rows=rows, repeats=2)
    (level,) = summary.ladder["rungs"]
    assert (level["row"], level["changes"], level["quality"]) == ("ddp", "packed: true", "too_few")
    assert level["gain"] == pytest.approx(2.0, rel=0.01)
    assert "In the open division, no row is shown to be both faster than single and as good." in first_lines(summary)
    assert "The open division: what each change gains" in page
    assert "| ddp | packed: true | 2.0" in (results / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ['{"row": ', "NaN", '{"row": "ddp"}', "", "[" * 100_000])
def test_a_damaged_record_costs_its_row_only(results, text):
    (results / "runs/ddp/n2/rep1/record.json").write_text(text)
    summary, rows, page = made(results)
    assert rows["ddp"]["status"] == "failed"
    assert re.search(r"runs/ddp/n2/rep1/record\.json: is .*Remove it, and ", rows["ddp"]["reason"])
    assert rows["single"]["status"] == "ok"
    assert "runs/ddp/n2/rep1/record.json: is " in page
    assert any(
        "failed: exploding and ddp" in line or "failed: ddp and exploding" in line for line in first_lines(summary)
    )


@pytest.mark.parametrize("file", ["env.json", "test/report.json", "test/report.txt"])
def test_a_damaged_file_of_a_run_costs_its_row_only(results, file):
    (results / "runs/ddp/n2/rep1" / file).unlink()
    (results / "runs/ddp/n2/rep1" / file).mkdir()
    _, rows = gathered(results)
    assert rows["ddp"]["status"] == ("skipped" if file == "test/report.json" else "failed")
    assert rows["single"]["status"] == "ok"


@pytest.mark.parametrize(
    ("file", "status"),
    [("runs/ddp/n2/rep1/env.json", "failed"), ("runs/ddp/n2/rep1/test/report.json", "failed")]
    + [(file, "ok") for file in ("data/peak.json", "manifest.json", "parity/ddp/n2/rep1/verdict.json")],
)
@pytest.mark.parametrize("text", ["{}", "[]", '{"proof": "equal"}', '{"x": '])
def test_a_file_that_is_not_as_it_was_written_costs_no_more_than_it_holds(results, file, status, text):
    (results / file).write_text(text)
    summary, rows = gathered(results)
    assert rows["ddp"]["status"] == status
    assert rows["single"]["status"] == "ok"
    told = [rows["ddp"]["reason"], *summary.damaged, (summary.verdicts["ddp"] or {}).get("reason", "")]
    assert any(f"{results / file}: is damaged" in reason for reason in told)
    if "verdict" in file:
        assert (rows["ddp"]["proof"], rows["ddp"]["rank"]) == ("failed", None)


def test_what_is_damaged_beside_the_runs_is_noted_on_the_page(results):
    (results / "data/peak.json").write_text("{}")
    (results / "predict/predictions.csv").write_bytes("text,truth\n好,坏\n".encode("gbk"))
    _, _, page = made(results)
    assert "peak.json: is damaged" in page
    assert "predictions.csv: is damaged" in page


def test_a_row_that_can_not_be_converted_says_why(results):
    shutil.rmtree(results / "runs/ddp/n2/rep1/test")
    files.write_json(results / "runs/ddp/n2/rep1/untested.json", {"reason": "can't be read as a checkpoint of ddp"})
    _, rows = gathered(results)
    assert (rows["ddp"]["status"], rows["ddp"]["reason"]) == ("failed", "can't be read as a checkpoint of ddp")


@pytest.mark.parametrize("disturbed", [[], ["a GPU was throttled"]])
def test_a_row_of_another_session_is_compared_with_none(results, disturbed):
    """Trained alone, later, it would gain or lose by what the machine has become since."""
    file = results / "runs/ddp/n2/rep1/record.json"
    change(file, disturbed=disturbed)
    files.write_json(file, files.read_json(file) | {"session": "later"})
    summary, rows = gathered(results)
    assert summary.apart == ["ddp"]
    assert (rows["ddp"]["speedup"], rows["ddp"]["rank"]) == (None, None)
    assert rows["fsdp"]["speedup"]
    said = "timed in another session than the other rows, so not compared with them until `make again` has repeated"
    assert said in first_lines(summary)[-1]


def test_where_every_run_was_disturbed_no_winner_is_named(results):
    for file in (results / "runs").glob("*/*/*/record.json"):
        change(file, disturbed=["other processes used 1.20 of 2 CPU cores"])
    summary, rows, page = made(results)
    assert {row["rank"] for row in rows.values()} == {None}
    first, *others = first_lines(summary)
    assert first.startswith("It is unknown which row trains fastest on this machine, because every run was disturbed.")
    assert not any("'s time (" in line or "fastest" in line for line in others)
    assert "Training times, every run disturbed" in page
    assert "had the shortest" not in page


def test_what_all_rows_share_is_noted(results):
    data = files.read_json(results / "data" / "data.json")
    files.write_json(results / "data" / "data.json", data | {"notes": ["a new head replaces it"]})
    _, _, page = made(results)
    assert '<span class="en" lang="en">all rows</span><span class="zh" lang="zh">所有行</span></b>: a new head' in page
    assert "- **all rows**: a new head replaces it" in (results / "report" / "report.md").read_text(encoding="utf-8")


def test_a_row_whose_every_run_was_disturbed_has_no_rank(results):
    change(results / "runs/ddp/n2/rep1/record.json", disturbed=["a GPU was throttled"])
    summary, rows = gathered(results)
    assert rows["ddp"]["rank"] is None
    assert rows["ddp"]["train_seconds"] > 0
    assert any("no undisturbed run, so no trustworthy times: ddp" in line for line in first_lines(summary))


def test_figures_that_no_device_tells_are_not_guessed(results):
    _, rows = gathered(results)
    assert rows["ddp"]["energy_joules"] is None or rows["ddp"]["energy_joules"] > 0
    (results / "data" / "peak.json").unlink()
    _, rows = gathered(results)
    assert rows["ddp"]["mfu"] is None


def test_rows_that_do_other_work_are_not_compared(results):
    ask(results, "ddp", train={"max_steps": 5})
    rows = reading.read([results / "config.yaml"]).source["rows"]
    _, lines, page = made(results, rows=rows | {"ddp": {"strategy": "ddp", "max_steps": 5}})
    assert (lines["ddp"]["division"], lines["ddp"]["speedup"]) == ("open", None)
    assert lines["ddp_spawn"]["division"] == "closed"
    assert "rows marked open train by another recipe" in page


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_needs_nothing_from_outside(results):
    _, _, page = made(results)
    for tag, attributes in Elements(page).tags:
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
    assert not any(tag in ("img", "b") and attributes for tag, attributes in Elements(page).tags)
    assert page.count("&lt;img src=x") == 3
    markdown = (results / "report" / "report.md").read_text()
    assert "<img" not in markdown
    assert r"\|\`\[a\](b)" in markdown


def test_the_pictures_are_files_too(results):
    made(results)
    plots = sorted(os.listdir(results / "report" / "plots"))
    names = ("card", "confusion", "losses", "memory", "quality", "ranks", "setup", "step_parts", "train_seconds")
    assert plots == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    first = (results / "report/plots/losses.svg").read_bytes()
    made(results)
    assert (results / "report/plots/losses.svg").read_bytes() == first


def test_a_paper_gets_its_files_written_from_the_records(results):
    """The whole environment is there once, and not in the file of all values, once for each run."""
    summary, _, page = made(results)
    report = results / "report"
    assert f"random order from seed {summary.config['train']['seed']}" in (report / "methods.md").read_text()
    table = (report / "table.tex").read_text()
    assert r"ddp\_spawn & " in table
    runs = pd.read_csv(report / "runs.csv", encoding="utf-8-sig")
    assert len(runs) == sum(map(len, summary.runs.values()))
    assert set(runs.status) == {"ok", "failed"}
    installed = (report / "environment.txt").read_text()
    assert re.search(r"^torch==", installed, re.MULTILINE)
    assert "PyTorch built with" in installed
    assert "PyTorch built with" not in (report / "summary.json").read_text()
    assert all(name in page for name in ("methods.md", "table.tex", "runs.csv", "lockstep.bib"))


def test_every_link_within_the_page_leads_to_its_section(benchmark):
    page = benchmark.path("results/report/report.html").read_text(encoding="utf-8")
    links = re.findall(r'href="#([\w-]+)"', page)
    assert {"every-row", "own-script", "paper"} <= set(links)
    assert [link for link in links if f'id="{link}"' not in page] == []


def test_the_page_has_what_an_own_script_needs_for_each_finished_row_the_fastest_first(benchmark):
    page = benchmark.path("results/report/report.html").read_text(encoding="utf-8")
    summary = json.loads(benchmark.path("results/report/summary.json").read_text(encoding="utf-8"))
    section = page.partition('id="own-script"')[2].partition('id="paper"')[0]
    rows = [row for row in summary["rows"] if row["status"] == "ok"]
    expected = [row["row"] for row in sorted(rows, key=lambda row: row["train_seconds"])]
    assert re.findall(r"<summary>(\w+)</summary>", section) == expected
    for what in (
        "--nproc-per-node 2",
        "DistributedDataParallel(",
        "deepspeed.json",
        "zero_optimization",
        "accelerate.yaml",
    ):
        assert what in section, what


def test_figures_stand_beside_the_first_sentence(benchmark):
    page = benchmark.path("results/report/report.html").read_text(encoding="utf-8")
    (figures,) = re.findall(r'<dl class="figures">(.*?)</dl>', page, re.DOTALL)
    # The speed-up is none where single is the fastest, as it may be on a busy machine.
    assert figures.count("<dt>") == 4 - ("training time of single" in figures)
    summary = json.loads(benchmark.path("results/report/summary.json").read_text(encoding="utf-8"))
    done = [row for row in summary["rows"] if row["status"] == "ok"]
    proven = [row for row in done if row["proof"] in ("equal", "within-tolerance")]
    assert f"{len(proven)} of {len(done)}" in figures
