"""Several reports side by side: what differs is told first, and texts of the folders stay texts."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep import files, paths, stats
from lockstep.errors import BadInput
from lockstep.report import comparison, comparison_page
from tests import made
from tests.test_stats import blocks

HOSTILE = "</table><script>alert(1)</script>"


def folder(place: Path, cpu: str, torch: str, rows: dict[str, list[float]], **changed) -> Path:
    """A results folder with a report in it, as far as a comparison reads it; what is `changed` is so in each run."""
    about = {
        "watch": {"disturbed": []},
        "environment": {"cpu": cpu, "commit": "abc"},
        "asked": {"train": {"epochs": 1}},
    }
    runs = {
        name: [
            made.raw(**about | {"repeat": k} | changed | {"clock": {"train_seconds": value}})
            for k, value in enumerate(seconds)
        ]
        for name, seconds in rows.items()
    }
    summary = {
        "rows": [{"row": name, "train_seconds": seconds[0] if seconds else None} for name, seconds in rows.items()],
        "runs": runs,
        "environment": {"cpu": cpu, "cores": 2, "packages": {"torch": torch}, "commit": "abc"},
        "config": {"train": {"epochs": 1}, "rows": dict.fromkeys(rows)},
    }
    files.write_json(paths.report_folder(place) / paths.SUMMARY, summary)
    return place


def test_what_differs_is_listed_with_hardware_first_and_nothing_else(tmp_path):
    two = [folder(tmp_path / "a", "Z80", "1", {}), folder(tmp_path / "b", "6502", "2", {})]
    assert comparison.beside([comparison.read_report(folder) for folder in two]) == [
        ("hardware", "cpu", ["Z80", "6502"]),
        ("software", "packages.torch", ["1", "2"]),
    ]
    assert comparison.beside([comparison.read_report(two[0])] * 2) == []


def test_each_folder_stands_beside_the_first(tmp_path):
    rows = {"ddp": [2.0, 2.1, 1.9], "single": [3.0, 3.1, 2.9]}
    three = [
        folder(tmp_path / "a", "Z80", "1", rows),
        folder(tmp_path / "b", "Z80", "1", rows | {"ddp": [1.0, 1.05, 0.95], "only": [1.0]}),
        folder(tmp_path / "c", HOSTILE, "1", rows),
    ]
    compared = []
    for seconds in ([1.0, 1.05, 0.95], rows["ddp"]):
        ratio = stats.unpaired_ratio(blocks(a=seconds), blocks(a=rows["ddp"]), "a")
        line = comparison.Line("ddp", ratio, (2.0, seconds[0]), {"hardware": HOSTILE} if ratio.value == 1 else {})
        compared.append(comparison.Comparison([line], [HOSTILE], ["only"]))
    written = comparison_page.page(three, compared)
    assert "1 of 1 rows take a different time in" in written
    assert "0 of 1 rows take a different time in" in written
    assert "0.500" in written
    assert "only one of the folders has it" in written
    assert HOSTILE not in written
    assert written.count("<script>") == 1
    assert written.index('id="differs"') < written.index('id="rows-side-by-side"')


def test_a_folder_and_its_own_copy_are_told_so(tmp_path):
    rows = {"ddp": [2.0, 2.1, 1.9]}
    mine, copy = (folder(tmp_path / name, "Z80", "1", rows) for name in ("mine", "copy"))
    later = folder(tmp_path / "later", "Z80", "1", rows, started="2026-01-02T00:00:00+00:00")
    for other, copied in ((copy, True), (later, False)):
        compared = comparison.compare(mine, other, {"rules"})
        assert compared.copied == copied
        written = comparison_page.page([mine, other], [compared])
        assert ("one is a copy of the other" in written) == copied
        assert ("rows take a different time in" in written) != copied


def test_a_wider_confidence_is_asked_of_many_looks():
    sides = blocks(a=[1.0, 1.05, 0.95]), blocks(a=[2.0, 2.1, 1.9])
    once = stats.unpaired_ratio(*sides, "a")
    many = stats.unpaired_ratio(*sides, "a", confidence=1 - (1 - stats.CONFIDENCE) / 100)
    assert many.low < once.low < once.high < many.high


def test_two_folders_are_compared_by_one_spread_for_all_rows_as_a_report_is(tmp_path):
    """ddp's own runs happen to agree to the last digit, which a statistic of its own would take for certainty."""
    rows = {"ddp": [2.0, 2.0, 2.0], "single": [3.0, 3.3, 2.7]}
    two = [
        folder(tmp_path / name, "Z80", "1", rows | {"ddp": [seconds] * 3}) for name, seconds in (("a", 2), ("b", 2.1))
    ]
    reports = [comparison.read_report(place) for place in two]
    ratio = comparison.ratio(*reports[::-1], "ddp")
    assert ratio.value == pytest.approx(1.05)
    assert ratio.low < 0.97 < 1.03 < ratio.high
    other = comparison.ratio(*reports[::-1], "single")
    assert ratio.high / ratio.low == pytest.approx(other.high / other.low)
    # A row of another plan has a spread of its own.
    for report in reports:
        report["runs"]["single"] = [replace(run, hashes={"plan": "another"}) for run in report["runs"]["single"]]
    alone = comparison.ratio(*reports[::-1], "ddp")
    assert alone.low == pytest.approx(alone.value) == pytest.approx(alone.high)


def test_a_first_look_is_compared_with_no_full_benchmark(tmp_path):
    full, quick = (folder(tmp_path / name, "Z80", "1", {"ddp": [1.0]}) for name in ("full", "quick"))
    file = paths.report_folder(quick) / paths.SUMMARY
    summary = files.read_json(file)
    files.write_json(file, summary | {"config": summary["config"] | {"quick": True}})
    for pair in ((full, quick), (quick, full)):
        with pytest.raises(BadInput, match=f"{quick}: is a first look, which can.t be compared with a full benchmark"):
            comparison.compare(*pair, set(comparison.KINDS))


def test_a_page_is_written_over_nothing_but_a_page(run_script, tmp_path):
    """Before anything is compared."""
    (tmp_path / "mine.csv").write_text("text,label\n")
    for place, said in (("mine.csv", "is not a page of compare.py"), ("config", "is a folder")):
        code, _, errors = run_script("compare", "a", "b", "--page", place)
        assert (code, errors.count("\n")) == (2, 1)
        assert said in errors
    assert (tmp_path / "mine.csv").read_text() == "text,label\n"
