"""`world_sizes`: one row of the configuration becomes a row for each number of devices."""

import pytest

from lockstep.config import reading
from lockstep.errors import BadInput

HARDWARE = {"device": "cpu", "threads": 1, "oversubscribe": True}


def sizes(rows: dict, **hardware) -> dict[str, int]:
    config = reading.parse({"hardware": HARDWARE | hardware, "rows": rows})
    return {name: row.hardware.devices for name, row in config.rows.items()}


def test_a_row_becomes_one_for_each_size():
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp", "world_sizes": [4, 1, 2], "hook": "fp16"}}
    config = reading.parse({"hardware": HARDWARE, "rows": rows})
    assert list(config.rows) == ["single", "ddp_1", "ddp_2", "ddp_4"]
    assert {row.options["hook"] for row in config.rows.values() if row.strategy == "ddp"} == {"fp16"}
    assert {row.train.global_batch for row in config.rows.values()} == {64}  # the same work
    assert {row.division for row in config.rows.values()} == {"closed"}


def test_set_for_all_rows_it_leaves_those_as_they_are_that_have_one_device():
    rows = {
        "single": {"strategy": "single"},
        "tp": {"strategy": "tp"},
        "ddp": {"strategy": "ddp"},
        "own": {"strategy": "fsdp", "world_sizes": [3]},
        "none": {"strategy": "fsdp", "world_sizes": []},
        "published": {"strategy": "published_ddp"},
    }
    assert sizes(rows, world_sizes=[1, 2]) == {
        "single": 1,
        "none": 2,
        "published": 2,
        "tp_2": 2,
        "ddp_1": 1,
        "ddp_2": 2,
        "own_3": 3,
    }


def test_the_batch_grows_with_the_devices_where_each_keeps_its_samples():
    rows = {"ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4], "device_batch": 16, "global_batch": None}}
    config = reading.parse({"hardware": HARDWARE, "rows": rows})
    assert [row.train.global_batch for row in config.rows.values()] == [16, 32, 64]


def test_one_machine_is_filled_before_there_are_several():
    rows = {"ddp": {"strategy": "ddp", "world_sizes": [1, 2, 4, 8]}}
    config = reading.parse({"hardware": HARDWARE | {"processes": 2, "nodes": 4}, "rows": rows})
    assert [(row.hardware.devices, row.hardware.nodes) for row in config.rows.values()] == [
        (1, 1),
        (2, 1),
        (4, 2),
        (8, 4),
    ]


GPUS = {"device": "cuda", "node_gpus": 4, "node_cores": 8, "threads": "auto", "nodes": 2}


@pytest.mark.parametrize("oversubscribe", [True, False])
def test_one_process_has_no_size_beyond_the_gpus_of_one_machine(oversubscribe):
    rows = {"dataparallel": {"strategy": "dataparallel"}, "ddp": {"strategy": "ddp"}}
    asked = GPUS | {"oversubscribe": oversubscribe}
    devices = sizes(rows, **asked, world_sizes=[2, 4, 8])
    assert devices == {"dataparallel_2": 2, "dataparallel_4": 4, "ddp_2": 2, "ddp_4": 4, "ddp_8": 8}
    with pytest.raises(BadInput, match=r"dataparallel.world_sizes: \[8\], but dataparallel drives .* has 4 here"):
        sizes({"dataparallel": {"strategy": "dataparallel", "world_sizes": [4, 8]}}, **asked)
    with pytest.raises(BadInput, match="trains on none: its one process drives the devices of one machine"):
        sizes(rows, **asked, world_sizes=[8])


def test_the_configuration_in_the_results_is_read_as_the_same_rows():
    """Also over one that has the row: Snakemake merges files, and `ddp` would come back."""
    asked = {"hardware": HARDWARE, "rows": {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}}}
    config = reading.parse(asked | {"hardware": HARDWARE | {"world_sizes": [1, 2]}})
    again = reading.parse(config.source | {"rows": asked["rows"] | config.source["rows"]})
    assert list(again.rows) == list(config.rows)
    deciding = [{name: row.deciding() for name, row in each.rows.items()} for each in (config, again)]
    assert deciding[0] == deciding[1]


@pytest.mark.parametrize(
    ("rows", "hardware", "said"),
    [
        (
            {"one": {"strategy": "single", "world_sizes": [1, 2]}},
            {},
            "rows.one.world_sizes: single trains on one device",
        ),
        ({"ddp": {"strategy": "ddp", "world_sizes": [0]}}, {}, "world_sizes"),
        ({"ddp": {"strategy": "ddp", "world_sizes": [2, 2]}}, {}, "non-unique"),
        ({"ddp": {"strategy": "ddp", "world_sizes": "two"}}, {}, "world_sizes: expected array, not 'two'"),
        ({"ddp": {"strategy": "ddp", "world_sizes": [2]}, "ddp_2": {"strategy": "ddp"}}, {}, "ddp_2, which there is"),
        ({"ddp": {"strategy": "ddp", "world_sizes": [3]}}, {"processes": 2, "nodes": 2}, "3 devices can't be had"),
        ({"ddp": {"strategy": "ddp", "world_sizes": [8]}}, {"processes": 2, "nodes": 2}, "8 devices can't be had"),
        ({"ddp": {"strategy": "ddp", "world_sizes": [2], "processes": 3}}, {}, "processes is also set, to 3"),
        (
            {"tp": {"strategy": "tp"}},
            {"world_sizes": [1, 3]},
            r"rows.tp.world_sizes: hardware.world_sizes has \[1, 3\], of which this row trains on none: its ranks come"
            " in multiples of 2.",
        ),
    ],
)
def test_what_can_not_be_is_refused(rows, hardware, said):
    with pytest.raises(BadInput, match=said):
        reading.parse({"hardware": HARDWARE | hardware, "rows": rows})


def test_more_devices_than_there_are_are_refused_when_the_row_is_asked_for():
    config = reading.parse({"hardware": {"device": "cpu"}, "rows": {"ddp": {"strategy": "ddp", "world_sizes": [4096]}}})
    with pytest.raises(BadInput, match=r"rows\.ddp_4096\.processes: 4096, but there are"):
        config.rows["ddp_4096"].refuse()


def test_a_row_whose_options_need_more_ranks_is_refused_as_ever():
    config = reading.parse({"hardware": HARDWARE, "rows": {"tp": {"strategy": "tp", "world_sizes": [1]}}})
    with pytest.raises(BadInput, match="tensor: 2"):
        config.rows["tp_1"].refuse()
