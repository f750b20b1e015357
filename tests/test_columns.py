"""The table's columns: declared once, shown everywhere, with words, and held to what there can be."""

import csv
import dataclasses
import io
from types import SimpleNamespace

import pytest
import yaml

from lockstep import columns
from lockstep.columns import Column
from lockstep.report import page, paper, words
from tests import made

ENTRIES = yaml.safe_load(words.FILE.read_text(encoding="utf-8"))
# What users script against; see the docstring of columns.py.
NAMES = (
    *("row", "strategy", "division", "device", "world_size", "devices", "nodes", "precision", "global_batch", "steps"),
    *("repeats", "train_seconds", "step_ms", "samples_per_second", "tokens_per_second", "startup_seconds", "speedup"),
    *("efficiency", "accuracy", "macro_f1", "final_loss", "peak_memory_mb", "proof", "status", "reason", "rank"),
    *("disturbed", "train_seconds_low", "train_seconds_high", "speedup_low", "speedup_high", "total_seconds", "mfu"),
    *("mfu_padded", "proportional_memory_mb", "reserved_memory_mb", "energy_joules", "memory_before_mb"),
    *("memory_by_gpu_mb", "reserved_by_gpu_mb", "nvml_memory_by_gpu_mb", "utilisation_by_gpu", "sm_mhz_by_gpu"),
    *("evaluation_seconds", "evaluation_samples_per_second", "perplexity", "cold_seconds", "pixel_accuracy", "miou"),
)


def test_no_name_that_users_script_against_is_gone_and_none_stands_twice():
    assert set(NAMES) <= set(columns.KEYS)
    assert len(columns.KEYS) == len(set(columns.KEYS))
    assert tuple(columns.KEYS[:9]) == NAMES[:9]  # where `cut -f` finds them


@pytest.mark.parametrize(
    "column", [column for column in columns.COLUMNS if column.shown], ids=lambda column: column.key
)
def test_every_column_that_people_see_has_a_heading_and_says_what_it_means(column):
    assert column.key in ENTRIES
    assert f"about_{column.key}" in ENTRIES


@pytest.mark.parametrize(
    ("gpu", "cpu", "on_gpus", "told"),
    [(None, 5.0, False, 5.0), (7.0, 5.0, True, 12.0), (7.0, None, True, 7.0), (None, 5.0, True, None)],
)
def test_the_energy_of_the_cpu_is_not_that_of_a_run_on_gpus(gpu, cpu, on_gpus, told):
    """Parts of GPUs (MIG), virtual ones and AMD's are not counted."""
    run = made.run(energy={"gpu_joules": gpu, "cpu_joules": cpu}, memory_by_gpu=[10.0] if on_gpus else [])
    assert columns.BY_KEY["energy_joules"].measure(run) == told


def test_a_new_column_is_one_entry_and_stands_wherever_it_is_to_be_shown(monkeypatch):
    new = Column(
        "hops", measure=lambda run: run.test["hops"], digits=1, unit="km", most=9, shown=columns.AT_ONCE, terminal=0
    )
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, new))
    monkeypatch.setattr(columns, "MEASURED", [new])
    monkeypatch.setattr(columns, "KEYS", [*columns.KEYS, "hops"])
    monkeypatch.setattr(columns, "BY_KEY", columns.BY_KEY | {"hops": new})
    asked = SimpleNamespace(
        name="ddp",
        strategy="ddp",
        division="closed",
        precision="fp32",
        train=SimpleNamespace(global_batch=8),
        hardware=dataclasses.make_dataclass(
            "Hardware", [("device", str, "cpu"), ("devices", int, 2), ("nodes", int, 1)]
        )(),
    )
    asked_of_hardware = {"hardware": {"devices": 2}}
    runs = [made.run(test={"hops": hops}, asked=asked_of_hardware) for hops in (1.0, 2, 6)]
    row = columns.line(asked, runs) | {"proof": "equal", "status": "ok"}
    assert row["hops"] == 2  # the median
    (line,) = page.table([row])
    cell = next(cell for cell in line if cell.key == "hops")
    assert (cell.heading.en, cell.text.en) == ("hops km", "2.0")
    headings, lines = page.plain([row], width=60)
    assert dict(zip(headings, lines[0], strict=True))["hops km"] == "2.0"
    assert "hops km" in paper.latex([line], "caption")
    written = next(csv.DictReader(io.StringIO(page.as_csv([row]))))
    assert written["hops"] == "2.0"
    assert columns.out_of_range(row) == []
    assert columns.out_of_range(row | {"hops": 12.0}) == ["hops 12, which is not from 0 to 9"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"accuracy": 1.01}, "accuracy 1.01, which is not from 0 to 1"),
        ({"train_seconds_low": -1.0}, "train_seconds_low -1, which is not from 0 to inf"),
        ({"perplexity": float("nan")}, "perplexity nan, which is not from 1 to inf"),
        ({"mfu": 1.5}, "mfu 1.5, which is not from 0 to 1"),
    ],
)
def test_what_can_not_be_is_told(values, told):
    assert columns.out_of_range(values) == [told]


def test_what_can_be_is_not_told():
    assert columns.out_of_range({"accuracy": 1.0, "train_seconds": 0.5, "final_loss": -3.0, "mfu": None}) == []


def test_sorting_begins_with_what_is_best():
    highest = {column.key for column in columns.COLUMNS if column.shown and column.best == "highest"}
    assert {"speedup", "efficiency", "mfu", "samples_per_second", "accuracy", "macro_f1", "miou"} <= highest
    assert not highest & {"place", "train_seconds", "peak_memory_mb", "perplexity", "energy_joules"}
