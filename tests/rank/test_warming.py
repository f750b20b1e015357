"""Warm-up: what happens once for each shape is done before the window opens, and leaves nothing in the model."""

import json

import numpy as np
import pytest
import torch
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
IN_CI = ("single_fp16", "ddp", "deepspeed3", "trainer", "horovod")
SMALL = """
data: {limit: 500}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, global_batch: 31, max_steps: 12, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
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

config = reading.read(["config/config.yaml", sys.argv[2]])
row = config.trial(config.rows[sys.argv[1]])
again = {"warm": {"dropout": 0.2}, "cold": {"dropout": 0.2, "warm": False}}
runs.run(config, replace(row, variations=again), 1, Path(sys.argv[3]))
print(row.folder(1))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with the planner in it, prepared data, and a configuration with all ROWS."""
    place = copy_project(tmp_path_factory.mktemp("warming"))
    rows = "".join(f"  {name}: {row}\n" for name, row in ROWS.items())
    place.path("small.yaml").write_text(f"{SMALL}rows:\n{rows}", encoding="utf-8")
    place.prepare("--config=small.yaml")
    with place.path("workflow/scripts/lockstep/model/attention.py").open("a") as file:
        file.write(PLANNER)
    return place


def trial(place, name: str, config: str = "small.yaml", results: str = "results"):
    """The folder of a row's trial, its clock, and when anything was planned: lists of (time, rank, what)."""
    plans = place.path(f"{name}.plans")
    finished = place.run(
        "python", "-c", TRIAL, name, config, results, PYTHONPATH="workflow/scripts", LOCKSTEP_PLANS=str(plans)
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    folder = place.path(results) / finished.stdout.splitlines()[-1]
    clock = json.loads((folder / paths.RANKS / "0.json").read_text())["clock"]
    lines = plans.read_text().splitlines() if plans.exists() else []  # a model without attention plans none
    planned = [line.split(" ", 2) for line in lines]
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
    if name == "deepspeed2_fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        with pytest.raises(AssertionError, match="has not; set native_precision to false, or precision to bf16"):
            trial(place, name)
        return
    folder, clock, planned = trial(place, name)
    opened, closed = clock["window"]
    assert [what for when, _, what in planned if when < opened], "before it, all is planned"
    assert [what for when, _, what in planned if opened < when < closed] == []
    assert clock["warm_up_seconds"] > 0
    assert different(folder) == []


# Models that keep a state wherever a module can, and, where WHERE says so, where none should be.
OWN = """
import torch
from torch import nn

CALLS = [0]

class Keeping(nn.Module):
    def __init__(self, vocab_size, classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.scores = nn.Linear(8, classes)
        self.register_buffer("mean", torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls, self.seen = 0, []
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, input_ids, attention_mask):
        x = (self.embedding(input_ids) * attention_mask[..., None].to(self.scale.dtype)).mean(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.scale.data.mul_(0.99)
        self.calls += 1
        self.seen.append(self.calls)
        noise = torch.rand(8, generator=self.generator).to(x.dtype)
        return self.scores((x - self.mean) * self.scale + noise + 0.01 * len(self.seen) + 0.1 * self.later())

    def later(self):
        if not hasattr(self, "first"):
            self.first = self.calls
        return self.first

class Global(nn.Module):
    def __init__(self, vocab_size, classes):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(vocab_size, 8), nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask):
        CALLS[0] += 1
        return self.scores(self.embedding(input_ids).mean(1)) * (1 + 0.1 * CALLS[0])
"""


def prepare_own(place, name: str) -> tuple[str, str]:
    """The configuration and the results' folder of one of OWN."""
    place.path("own.py").write_text(OWN, encoding="utf-8")
    text = SMALL.replace("model: {hidden_size: 32, layers: 1}", f"model: {{name: own.py:{name}}}")
    place.path(f"{name}.yaml").write_text(f"{text}rows: {{alone: {{strategy: single}}}}\n", encoding="utf-8")
    place.prepare(f"--config={name}.yaml", f"--results={name}")
    return f"{name}.yaml", name


@pytest.mark.slow
@pytest.mark.ci
def test_what_a_model_of_ones_own_keeps_is_put_back(place):
    config, results = prepare_own(place, "Keeping")
    for row in ("alone", "ddp"):
        folder, *_ = trial(place, row, config, results)
        assert different(folder) == [], row


@pytest.mark.slow
@pytest.mark.ci
def test_a_state_that_can_not_be_put_back_is_no_equal_model(place):
    """The reference has no warm-up, so one that leaves a trace shows."""
    config, results = prepare_own(place, "Global")
    asked = (f"--config={config}", f"--results={results}", "--row=reference", "--row=alone")
    finished = place.script("parity", *asked)
    assert finished.returncode == 1, finished.stdout
    assert "unequal" in finished.stdout
