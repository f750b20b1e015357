"""Warm-up: what happens once for each shape is done before the window opens, and leaves nothing in the model."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep import paths
from tests.conftest import HOROVOD, copy_project

# One of each way of wrapping, and what has a state of its own that a backward pass could change.
ROWS = {
    "single": "{strategy: single}",
    "single_fp16": "{strategy: single, precision: fp16}",
    "dataparallel": "{strategy: dataparallel, precision: bf16}",
    "ddp": "{strategy: ddp, accumulation: 2}",
    "ddp_static": "{strategy: ddp, static_graph: true}",
    "ddp_powersgd": "{strategy: ddp, hook: powersgd}",
    "ddp_join": "{strategy: ddp, join: true}",
    "ddp_spawn": "{strategy: ddp_spawn, find_unused_parameters: true}",
    "ddp_amp": "{strategy: ddp_amp}",
    "zero_redundancy": "{strategy: zero_redundancy}",
    "local_sgd": "{strategy: local_sgd, every: 3}",
    "diloco": "{strategy: diloco, every: 3}",
    "horovod": "{strategy: horovod, accumulation: 2}",
    "deepspeed0": "{strategy: deepspeed, stage: 0}",
    "deepspeed0_bf16": "{strategy: deepspeed, stage: 0, precision: bf16}",
    "deepspeed1_bf16": "{strategy: deepspeed, stage: 1, precision: bf16, native_precision: true}",
    "deepspeed1": "{strategy: deepspeed, stage: 1, accumulation: 2}",
    "deepspeed2_fp16": "{strategy: deepspeed, stage: 2, precision: fp16, native_precision: true}",
    "deepspeed3": "{strategy: deepspeed, stage: 3, accumulation: 2, precision: bf16}",
    "accelerate": "{strategy: accelerate}",
    "trainer": "{strategy: trainer, accumulation: 2, precision: bf16}",
    "fabric": "{strategy: fabric, accumulation: 2}",
    "fsdp": "{strategy: fsdp, accumulation: 2}",
    "fsdp_bf16": "{strategy: fsdp, precision: bf16, mixed_precision: policy}",
    "recipe_packed": "{strategy: recipe, packed: true}",
    "recipe_bf16": "{strategy: recipe, precision: bf16, weights: bf16}",
    "recipe_compiled": "{strategy: recipe, compile: dynamic}",
    "recipe_static": "{strategy: recipe, compile: static}",
    "recipe_lora": "{strategy: recipe, lora: 4}",
    "published_ddp": "{strategy: published_ddp}",
    "published_ddp_amp": "{strategy: published_ddp_amp}",
    "published_trainer": "{strategy: published_trainer}",
}
IN_CI = ("single_fp16", "ddp", "ddp_powersgd", "deepspeed1", "deepspeed3", "trainer", "horovod", "fsdp")
SMALL = """
data: {limit: 500}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, global_batch: 31, max_steps: 12, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 120, oversubscribe: true}
"""


# Appended to model/attention.py, which every rank imports: a backend that plans each new shape, and a note of when; and
# of when programs are compiled.
PLANNER = """
import os, time
import torch.nn.functional as _functional
from torch._dynamo import callback as _compiling

_attend, _planned = _functional.scaled_dot_product_attention, set()

def _plan(what):
    with open(os.environ["LOCKSTEP_PLANS"], "a") as file:
        file.write(f"{time.perf_counter()} {os.environ.get('RANK', '0')} {what}\\n")

def _planning(query, key, value, attn_mask=None, *rest, **options):
    shape = (tuple(query.shape), query.dtype, torch.is_grad_enabled())
    if not torch.compiler.is_compiling() and shape not in _planned:
        _planned.add(shape)
        _plan(tuple(query.shape))
        time.sleep(0.05)
    return _attend(query, key, value, attn_mask, *rest, **options)

_functional.scaled_dot_product_attention = _planning
_compiling.on_compile_start(lambda *_: _plan("a program"))
"""
# Trains a row's trial, and once more with dropout, after a warm-up and without one.
TRIAL = """
import sys
from dataclasses import replace
from pathlib import Path
from lockstep.config import reading
from lockstep.run import runs

config = reading.read(["config/config.yaml", "small.yaml"])
row = config.trial(config.rows[sys.argv[1]])
again = {"warm": {"dropout": 0.2}, "cold": {"dropout": 0.2, "warm": False}}
runs.run(config, replace(row, variations=again), 1, Path("results"))
print(row.folder(1))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with the planner in it, prepared data, and a configuration with all ROWS."""
    place = copy_project(tmp_path_factory.mktemp("warming"))
    rows = "".join(f"  {name}: {row}\n" for name, row in ROWS.items())
    place.path("small.yaml").write_text(f"{SMALL}rows:\n{rows}", encoding="utf-8")
    for script in ("prepare", "plan"):
        finished = place.script(script, "--config=small.yaml")
        assert finished.returncode == 0, finished.stderr
    with place.path("workflow/scripts/lockstep/model/attention.py").open("a") as file:
        file.write(PLANNER)
    return place


def trial(place, name: str):
    """The folder of a row's trial, its clock, and when anything was planned: lists of (time, rank, what)."""
    plans = place.path(f"{name}.plans")
    finished = place.run("python", "-c", TRIAL, name, PYTHONPATH="workflow/scripts", LOCKSTEP_PLANS=str(plans))
    assert finished.returncode == 0, finished.stderr[-2000:]
    folder = place.path("results") / finished.stdout.splitlines()[-1]
    clock = json.loads((folder / paths.RANKS / "0.json").read_text())["clock"]
    planned = [line.split(" ", 2) for line in plans.read_text().splitlines()]
    return folder, clock, [(float(when), rank, what) for when, rank, what in planned]


def different(folder) -> list[str]:
    """The weights that are not bit for bit the same after a warm-up and without one."""
    warm, cold = (load_file(folder / name / paths.FINAL_WEIGHTS) for name in ("warm", "cold"))
    assert warm.keys() == cold.keys()
    return [name for name in warm if not np.array_equal(warm[name], cold[name])]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.ci] * (name in IN_CI)) for name in ROWS])
def test_nothing_is_planned_in_the_window_and_the_model_is_bit_for_bit_the_one_without_a_warm_up(place, name):
    """With dropout, so that random states matter; in the precision of the row, with its options."""
    if name == "horovod" and not HOROVOD:
        pytest.skip("Horovod can't be built here: it needs g++ and cmake")
    folder, clock, planned = trial(place, name)
    opened, closed = clock["window"]
    assert [what for when, _, what in planned if when < opened], "before it, all is planned"
    assert [what for when, _, what in planned if opened < when < closed] == []
    assert clock["warm_up_seconds"] > 0
    assert different(folder) == []
