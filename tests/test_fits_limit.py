"""The cases of benchmarks/fits_limit.py: named before they are measured, and told as they came out."""

import json

import pytest

from benchmarks import fits_limit
from benchmarks.common import PROJECT, markdown
from benchmarks.fits_limit import CASES, COUNTED_ALONE, ENDED, TRAINED, WITH_ANOTHER
from lockstep.config import reading
from lockstep.forecast import memory

MIB = 2**20
NAMES = [f"{model}, {row}" for model, (*_, rows) in CASES.items() for row in rows]


def line(case: str, **more) -> dict:
    counted = {"case": case, "tokens": 64, "samples": 8, "tensors": 50 * MIB, "segments": 54 * MIB}
    measured = {"at_limit": TRAINED, "at_below": ENDED, "took": 50 * MIB, "trains": COUNTED_ALONE}
    return counted | {"below": 49 * MIB} | measured | more


def test_there_are_thirty_cases_which_can_all_be_counted(tmp_path):
    assert len(NAMES) == len(set(NAMES)) == 30
    for config, keys, rows in CASES.values():
        file = tmp_path / "case.yaml"
        file.write_text(json.dumps(fits_limit.configuration(keys, rows)), encoding="utf-8")
        files = [PROJECT / reading.DEFAULT, *([PROJECT / config] if config else []), file]
        read = reading.read(files, fits_limit.HERE)
        assert read.rows.keys() == rows.keys()
        for row in read.rows.values():
            memory.countable(row)
            assert row.hardware.device == "cuda"
            assert row.train.attention == "math"  # as pretended GPUs compute


def test_a_false_fits_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fits_limit, "TABLE", tmp_path / "limits.csv")
    monkeypatch.setattr(fits_limit, "PAGE", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("\n".join(fits_limit.MARKS), encoding="utf-8")
    false = line(NAMES[1], at_limit=ENDED, took="", trains="")
    late = line(NAMES[2], at_below=TRAINED, took=40 * MIB)
    short = line(NAMES[3], at_limit=ENDED, trains=WITH_ANOTHER)
    fits_limit.write({each["case"]: each for each in (short, late, false, line(NAMES[0]))})
    there = fits_limit.read()
    assert list(there) == NAMES[:4]
    assert there[NAMES[1]] == {name: str(value) for name, value in false.items()}
    fits_limit.tell(list(there.values()))
    said = capsys.readouterr().out
    assert f"2 of 4 trained in what is counted; not so: {NAMES[1]}, {NAMES[3]}" in said
    assert f"3 of 4 trained where they fit; not so: {NAMES[1]}" in said
    assert f"3 of 4 ended out of memory below; not so: {NAMES[2]}" in said
    assert "counted 0.00 % off in the median, at most 25.00 %" in said
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| out of memory; with another segment, too |" in page
    assert "| out of memory; trained with another segment |" in page


def test_the_page_shows_the_table_that_is_there():
    """Else: python -m benchmarks.fits_limit"""
    lines = fits_limit.read()
    assert list(lines) == NAMES
    table = markdown(fits_limit.HEADER, list(map(fits_limit.cells, lines.values())))
    assert table in fits_limit.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_row_trains_where_it_is_said_to_fit_and_ends_out_of_memory_below(tmp_path):
    config, keys, rows = CASES["bert"]
    machine = fits_limit.Machine(tmp_path, "bert", config, keys, {"ddp": rows["ddp"]})
    counted = machine.count("ddp")
    found = machine.measure("ddp", counted)
    assert (found["at_limit"], found["at_below"]) == (TRAINED, ENDED)
    assert found["took"] == pytest.approx(counted["tensors"], rel=0.02)
