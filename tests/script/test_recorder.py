"""What the recorder notes of scripts with one process, none of which it may make fail."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.errors import RunFailed
from lockstep.script import recording

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 20), torch.randint(4, (32,)))
loader = DataLoader(data, batch_size=8)
model = nn.Linear(20, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for points, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
"""
WITHOUT_RATE = """
class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})  # as transformers' Adafactor, which finds it by itself

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad

optimizer = WithoutRate(model.parameters())
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        raise NotImplementedError("a stream has no length")

    def __iter__(self):
        return iter(data)

loader = DataLoader(Stream(), batch_size=8)
"""
ODD = """
class Odd(nn.Linear):
    def named_buffers(self, *args, **kwargs):
        raise RuntimeError("no buffers here")

model = Odd(20, 4)
"""
SCHEDULES = """
from torch.optim import lr_scheduler

class Own(lr_scheduler.LinearLR):
    def step(self):
        super().step()

kinds = {Own: (), lr_scheduler.CosineAnnealingWarmRestarts: (20,), lr_scheduler.ReduceLROnPlateau: ()}
schedules = iter([kind(optimizer, *given) for kind, given in kinds.items()])
"""
STEPPED = (
    LOOP
    + """
    schedule = next(schedules, None)
    if schedule:
        schedule.step(*[1.0] * (type(schedule) is lr_scheduler.ReduceLROnPlateau))
"""
)
TIMED = """
class Timed(nn.Linear):
    def forward(self, times, points):
        return super().forward(points * times.mean())

model = Timed(20, 4)
times = torch.linspace(0, 1, 4)
"""
FITS = """
class Fits(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(20, 4)

    def fit(self, points, labels):
        for batch in torch.arange(len(points)).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(points[batch]), labels[batch]).backward()
            optimizer.step()

model = Fits()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
FITTED = "model.fit(*data.tensors)"
DRAWN = LOOP.replace("in loader", "in zip(*(tensor.split(8) for tensor in data.tensors))")
TRIALS = {
    "lazy layers": "model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4))",
    "a usual model": "model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 4))",
}


@pytest.fixture
def recorded(tmp_path):
    """Record the first steps of a script, given what it has between its data and its loop."""

    def record(lines: str, loop: str = LOOP, steps: int = 2) -> recording.Recording:
        (tmp_path / "script.py").write_text(DATA + lines + loop, encoding="utf-8")
        asked = recording.Asked(steps)
        return recording.record([sys.executable, str(tmp_path / "script.py")], tmp_path / "recorded", asked)

    return record


def test_an_optimizer_need_not_have_a_learning_rate(recorded):
    (rank,) = recorded(WITHOUT_RATE).ranks
    assert [step["rates"] for step in rank["steps"]] == [[None], [None]]


@pytest.mark.parametrize("kind", TRIALS)
def test_a_call_of_the_model_before_its_first_batch_is_no_part_of_the_first_step(kind, recorded):
    """Its weights count from the first batch on."""
    changed = "nn.init.zeros_(model[1].bias); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    (rank,) = recorded("\n".join([TRIALS[kind], "model(torch.ones(1, 20))", changed])).ranks
    assert [len(call["rows"]) for step in rank["steps"] for call in step["calls"]] == [8, 8]
    assert rank["initial"]["weights"].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not any(rank["initial"]["weights"]["1.bias"])


def test_layers_in_evaluation_mode_are_noted_if_that_makes_a_difference(recorded):
    layers = (
        "nn.Linear(20, 4).eval(), nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4), nn.Dropout(0.1).eval(), nn.Dropout(0.0)"
    )
    (rank,) = recorded(f"model = nn.Sequential({layers}); model[4].eval()").ranks
    assert [call["evaluating"] for step in rank["steps"] for call in step["calls"]] == [["1", "3"]] * 2


BACKWARD = "nn.functional.cross_entropy(model(points), labels).backward()"
OF_AN_ITERATOR = "torch.autograd.backward(iter([nn.functional.cross_entropy(model(points), labels)]))"
OF_AN_EDGE = "torch.autograd.backward(torch.autograd.graph.get_gradient_edge(model(points).sum()))"


@pytest.mark.parametrize(
    ("lines", "loop"),
    [(STREAM, LOOP), ("", LOOP.replace(BACKWARD, OF_AN_ITERATOR)), ("", LOOP.replace(BACKWARD, OF_AN_EDGE))],
    ids=["a stream without a length", "an iterator of losses", "an edge of a graph"],
)
def test_what_a_script_may_do_is_recorded(lines, loop, recorded):
    (rank,) = recorded(lines, loop).ranks
    assert len(rank["steps"]) == 2
    assert all(any(gradient) for step in rank["steps"] for gradient in step["gradients"].values())


def test_an_error_of_the_recorder_is_none_of_the_script(recorded):
    with pytest.raises(RunFailed, match="the command could not be recorded: RuntimeError: no buffers here"):
        recorded(ODD)


def test_each_kind_of_schedule_is_counted(recorded):
    """Also those that have a step of their own, of PyTorch or of the script."""
    (rank,) = recorded(SCHEDULES, STEPPED, 4).ranks
    assert [step["schedule_steps"] for step in rank["steps"]][1:] == [1, 1, 1]


TOLD = """
import argparse, json, os, sys
from dataclasses import asdict, dataclass
import lockstep_recorder

@dataclass(frozen=True)
class Settings:
    world_size: int
    layers: int

def of_rank(rank, settings):
    pass

parser = argparse.ArgumentParser()
for name in ("--num-gpus", "--n-gpu", "--nproc", "--layers"):
    parser.add_argument(name, type=int, default=2)
(settings,) = lockstep_recorder._arguments_of_one(of_rank, (Settings(2, 2),), 2)
told = {name: os.environ[name] for name in ("NGPU", "LAYERS")}
json.dump(vars(parser.parse_args()) | told | asdict(settings), sys.stdout)
"""


def test_a_single_process_is_told_that_it_is_one_by_arguments_variables_and_settings(tmp_path):
    (tmp_path / "replay.json").write_text(json.dumps({"world": 2}), encoding="utf-8")
    variables = {"LOCKSTEP_REPLAY": str(tmp_path), "NGPU": "2", "LAYERS": "2", "PYTHONPATH": str(recording.RECORDER)}
    command = [sys.executable, "-c", TOLD, "--num-gpus", "2", "--n-gpu=2"]
    finished = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    counts = {"num_gpus": 1, "n_gpu": 1, "nproc": 1, "NGPU": "1", "world_size": 1}
    assert json.loads(finished.stdout) == counts | {"LAYERS": "2", "layers": 2}


@pytest.mark.parametrize(
    ("lines", "loop"),
    [
        (TIMED, LOOP.replace("model(points)", "model(times, points)")),
        (TIMED, DRAWN.replace("model(points)", "model(times, points)")),
        (FITS, FITTED),
    ],
    ids=["a constant beside what a DataLoader gives", "a constant beside what is drawn", "all data, in a loop"],
)
def test_what_does_not_change_is_not_taken_for_the_samples(lines, loop, recorded):
    (rank,) = recorded(lines, loop).ranks
    rows = [row for step in rank["steps"] for call in step["calls"] for row in call["rows"]]
    assert len(set(rows)) == len(rows) == 16
