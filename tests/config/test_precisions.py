"""A precision is one entry, and an unknown precision is refused everywhere."""

from typing import get_args

import pytest
import torch
import transformers
from lightning_fabric import connector

from lockstep.config import precisions, schema
from lockstep.errors import BadInput
from lockstep.model import metrics
from lockstep.run import record_files
from lockstep.run.record import Record
from lockstep.strategies.single import autocast


def computed_in(precision: str) -> torch.dtype:
    with autocast(torch.device("cpu"), precision):
        return torch.nn.Linear(2, 2)(torch.zeros(1, 2)).dtype


def test_autocast_is_that_of_the_precision_and_an_unknown_one_is_never_full_precision():
    computed = {name: computed_in(name) for name in ("fp32", "bf16", "fp16")}
    assert computed == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for ask in (computed_in, metrics.measure_cpu_peak, precisions.of):
        with pytest.raises(BadInput, match=r"precision: 'fp8' is unknown\. Choose one of fp64, fp32, bf16, fp16\."):
            ask("fp8")


def test_rows_may_ask_for_the_declared_ones_and_records_hold_them():
    of_rows = [precision.name for precision in precisions.DECLARED if precision.of_rows]
    assert schema.of_configuration()["properties"]["train"]["properties"]["precision"]["enum"] == [*of_rows, "amp"]
    wrong = {
        name
        for name in (*precisions.PRECISIONS, "fp8")
        if "$.precision: " in str(record_files.invalid(Record, {"precision": name}))
    }
    assert wrong == {"fp8"}
    assert set(precisions.AMP.values()) <= set(of_rows)
    assert all(getattr(torch, precision.dtype).is_floating_point for precision in precisions.DECLARED)
    assert all(None not in (entry.least_floor, entry.tolerance, entry.matrix) for entry in precisions.DECLARED[1:])


def test_its_names_in_frameworks_are_names_that_they_have():
    assert {precision.fabric for precision in precisions.DECLARED} <= set(get_args(connector._PRECISION_INPUT_STR))
    assert precisions.switches("bf16") == {"bf16": True, "fp16": False}
    assert not any(precisions.switches("fp32").values())
    assert precisions.switches("fp32").keys() <= transformers.TrainingArguments.__dataclass_fields__.keys()
