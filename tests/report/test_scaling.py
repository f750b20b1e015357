"""How rows scale: which belong together, what they are held against, and where efficiency is lost."""

import pytest

from lockstep.config import reading
from lockstep.report import charts, headline, scaling
from tests import made

HARDWARE = {"device": "cpu", "threads": 1, "oversubscribe": True}
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


def families(
    rows: dict, seconds: dict[str, float], width: float | None = 1.01, cores: int = 64, disturbed=(), **settings
) -> tuple[list, list]:
    """The families of rows that took so long, each ratio known to a factor of `width`; and the table's lines."""
    rows = reading.parse({"hardware": HARDWARE, "rows": rows} | settings).rows
    lines, runs = [], {}
    for name, row in rows.items():
        hardware = row.hardware
        samples = 100 * row.train.global_batch
        runs[name] = [
            made.run(
                clock={"train_seconds": seconds[name]},
                throughput={"samples_per_second": samples / seconds[name]},
                work={"samples": samples},
                asked=row.settings().of_row(),
                environment={"cores": cores},
                watch={"disturbed": ["another program ran"] if name in disturbed else []},
            )
        ]
        line = {
            "row": name,
            "strategy": row.strategy,
            "world_size": hardware.devices,
            "train_seconds": seconds[name],
            "proof": "equal",
        }
        lines.append(line | {"division": row.division})

    def between(ours: str, theirs: str) -> dict:
        ratio = seconds[ours] / seconds[theirs]
        ends = {"low": ratio / (width or 1), "high": ratio * (width or 1)}
        return {"value": ratio, "kind": "interval" if width else "", "n": 3} | ends

    return scaling.families(lines, runs, between), lines


def test_rows_are_one_family_where_they_differ_in_the_number_of_devices_only():
    found, _ = families(ROWS, dict.fromkeys(ROWS, 1.0))
    assert [[size["row"] for size in family["sizes"]] for family in found] == [
        ["one", "two", "four"],
        ["zero1", "zero1_four"],
    ]
    assert [family["kind"] for family in found] == ["strong", "strong"]


def test_a_family_is_held_against_the_best_row_on_one_device_and_not_against_its_own_start():
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4]}}
    (family,), _ = families(rows, {"single": 8.0, "ddp_1": 10.0, "ddp_2": 5.0, "ddp_4": 4.0})
    assert (family["name"], family["kind"], family["against"]) == ("ddp", "strong", "single")
    one, two, four = family["sizes"]
    assert one["gain"] == pytest.approx(0.8)
    assert (two["gain"], two["efficiency"]) == (pytest.approx(1.6), pytest.approx(0.8))
    assert (four["gain"], four["efficiency"]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert (four["gain_low"], four["gain_high"]) == (pytest.approx(2 / 1.01), pytest.approx(2 * 1.01))
    assert family["cliff"] == ["ddp_2", "ddp_4"]
    (told,) = headline._cliffs([family])
    assert told.en == "`ddp` keeps 80 % of `single`'s speed for each device on 2, and 50 % on 4."


def test_where_each_device_keeps_its_samples_the_samples_per_second_count():
    rows = {
        "single": {"strategy": "single"},
        "ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4], "device_batch": 32, "global_batch": None},
    }
    # The same number of steps, of 64 samples, and of 32, 64 and 128.
    seconds = {"single": 8.0, "ddp_1": 5.0, "ddp_2": 5.0, "ddp_4": 5.5}
    (family,), lines = families(rows, seconds)
    assert (family["kind"], family["against"]) == ("weak", "ddp_1")  # a step of single has twice as many
    assert [size["gain"] for size in family["sizes"]] == pytest.approx([1, 2, 4 / 1.1])
    efficiencies = [size["efficiency"] for size in family["sizes"]]
    assert efficiencies == pytest.approx([1, 1, 1 / 1.1])
    assert family["cliff"] is None  # less than is worth a sentence
    assert [line.get("weak_efficiency") for line in lines] == [None, *efficiencies]
    rows = rows | {"half": {"strategy": "single", "global_batch": 32}}
    (family,), _ = families(rows, seconds | {"half": 4.0})
    assert family["against"] == "half"
    rows["ddp"] |= {"device_batch": 16, "accumulation": 2}  # as many samples in a step
    (family,), _ = families(rows, seconds | {"half": 4.0})
    assert family["against"] == "half"


def test_a_row_that_trains_the_model_in_another_way_is_no_measure():
    rows = {
        "lora": {"strategy": "single", "lora": 4},
        "single": {"strategy": "single"},
        "ddp": {"strategy": "ddp", "world_sizes": [1, 2]},
        "weak": {"strategy": "ddp", "world_sizes": [1, 2], "device_batch": 64, "global_batch": None},
        "lora_ddp": {"strategy": "ddp", "lora": 4, "world_sizes": [2, 4]},
    }
    seconds = {"lora": 4.0, "single": 8.0, "ddp_1": 9.0, "ddp_2": 5.0, "weak_1": 9.0, "weak_2": 9.0}
    found, _ = families(rows, seconds | {"lora_ddp_2": 2.0, "lora_ddp_4": 1.0})
    assert [family["against"] for family in found] == ["single", "single", "lora"]
    found, _ = families(
        {name: rows[name] for name in rows if name != "lora"}, seconds | {"lora_ddp_2": 2.0, "lora_ddp_4": 1.0}
    )
    assert found[-1]["against"] == "lora_ddp_2"


def test_a_row_on_one_device_counts_even_if_it_was_disturbed():
    """Else two stages on two devices would be held against themselves, and seem to waste nothing."""
    rows = {
        "single": {"strategy": "single"},
        "ddp": {"strategy": "ddp", "processes": 1},
        "pp": {"strategy": "pp", "world_sizes": [2, 4]},
    }
    seconds = {"single": 4.0, "ddp": 8.0, "pp_2": 8.0, "pp_4": 4.0}
    (family,), _ = families(rows, seconds, disturbed=rows)
    assert (family["against"], [size["efficiency"] for size in family["sizes"]]) == ("single", [0.25, 0.25])
    (family,), _ = families(rows, seconds, disturbed=["single"])
    assert family["against"] == "ddp"


def test_ranks_that_share_cores_have_no_more_of_them():
    """Else four ranks of two cores would seem to waste half of four."""
    rows = {"ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4]}}
    (family,), _ = families(rows, {"ddp_1": 8.0, "ddp_2": 4.5, "ddp_4": 5.0}, cores=2)
    assert [size["efficiency"] for size in family["sizes"]] == pytest.approx([1, 8 / 9, 0.8])
    assert family["cliff"] is None


def test_a_step_from_one_machine_to_several_is_named():
    rows = {"ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4]}}
    hardware = HARDWARE | {"processes": 2, "nodes": 2}
    seconds = {"ddp_1": 8.0, "ddp_2": 4.1, "ddp_4": 5.0}
    (family,), _ = families(rows, seconds, hardware=hardware)
    assert [(size["devices"], size["nodes"]) for size in family["sizes"]] == [(1, 1), (2, 1), (4, 2)]
    (told,) = headline._cliffs([family])
    assert told.en.endswith("40 % on 4: that is the step from one machine to several.")
    assert told.zh.endswith("跨到了多台。")


@pytest.mark.parametrize("width", [None, 1.5])
def test_what_chance_may_have_is_no_cliff(width):
    rows = {"ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4]}}
    (family,), _ = families(rows, {"ddp_1": 8.0, "ddp_2": 4.1, "ddp_4": 3.0}, width)
    assert family["cliff"] is None
    assert headline._cliffs([family]) == []


def test_the_picture_has_the_ideal_the_rows_and_their_intervals():
    found, _ = families(ROWS, dict.fromkeys(ROWS, 1.0))
    drawn = charts.scaling("strong", found)
    lines = [list(line.get_xdata()) for line in drawn.figure.axes[0].lines]
    assert lines[0] == [1, 4]  # the ideal
    assert [1, 2, 4] in lines
    assert lines.count([4, 4]) == 2  # an interval of each family
    assert drawn.table[1][:5] == ["two", "2", "1", "1.00", "0.99 - 1.01"]
    charts.plt.close("all")
