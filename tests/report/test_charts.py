"""What the report's pictures put together."""

from types import SimpleNamespace

import pytest

from lockstep.config import reading
from lockstep.report import charts

ROWS = {
    "four": {"strategy": "ddp", "processes": 4},
    "one": {"strategy": "ddp", "processes": 1, "checkpoint_every": 5},  # which decides nothing of its time
    "two": {"strategy": "ddp", "processes": 2, "seed": 7},
    "hook": {"strategy": "ddp", "processes": 2, "hook": "fp16"},
    "launch": {"strategy": "ddp", "processes": 2, "launcher": "launch"},
    "parts": {"strategy": "ddp", "processes": 2, "accumulation": 2},
    "batch": {"strategy": "ddp", "processes": 2, "global_batch": 16},
    "bf16": {"strategy": "ddp", "processes": 2, "precision": "bf16"},
    "threads": {"strategy": "ddp", "processes": 2, "threads": 2},
    "fsdp": {"strategy": "fsdp", "processes": 3},
    "zero1": {"strategy": "deepspeed", "processes": 1, "stage": 1},
    "zero1_four": {"strategy": "deepspeed", "processes": 4, "stage": 1},
}


def test_rows_are_one_line_where_they_differ_in_the_number_of_devices_only():
    hardware = {"device": "cpu", "threads": 1, "oversubscribe": True}
    rows = reading.parse({"hardware": hardware, "rows": ROWS}).rows
    runs = {
        name: [{"status": "ok", "watch": {"disturbed": []}, "clock": {"train_seconds": 1}, "asked": row.deciding()}]
        for name, row in rows.items()
    }
    sizes = {name: row.hardware.devices for name, row in rows.items()}
    done = [{"row": name, "world_size": size, "speedup": 0.9 * size} for name, size in sizes.items()]
    groups = charts.scaling_groups(done, SimpleNamespace(runs=runs))
    assert list(groups) == ["one, two, four", "zero1, zero1_four"]
    drawn = charts.scaling(groups)
    lines = drawn.figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[1, 4], [1, 2, 4], [1, 4]]  # the ideal first
    assert drawn.table[:2] == [["one", "1", "0.90"], ["two", "2", "1.80"]]
    assert drawn.table[-1] == ["zero1_four", "4", "3.60"]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    charts.plt.close("all")
