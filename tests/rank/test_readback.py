"""What is asked for is what is trained: whatever a framework quietly changes ends the run before its first step."""

import copy
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import RunFailed
from lockstep.model.optimizer import make_optimizer, make_schedule
from lockstep.model.schedule import lr_factor
from lockstep.rank import readback
from lockstep.strategies import single

ROW = {"hardware": {"device": "cpu", "threads": torch.get_num_threads(), "oversubscribe": True}}


@pytest.fixture
def prepared():
    """A prepared strategy, and the settings that its row asks for."""
    asked = reading.parse(ROW | {"rows": {"single": {"strategy": "single"}}}).rows["single"].settings()
    strategy = single.Strategy(asked)
    strategy.start()
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=2, **size))
    strategy.set_up(model, lambda wrapped: make_optimizer(wrapped, asked.train))
    make_schedule(strategy.optimizer, asked.train, 10)
    return strategy, asked


def forward(strategy):
    with strategy.autocast():
        strategy.model(input_ids=torch.ones(1, 3, dtype=torch.int64))


def test_a_rank_whose_environment_prevents_what_the_row_compiles_ends_the_run(prepared, monkeypatch):
    """As one that was started by hand may have another environment than its supervisor."""
    strategy, asked = prepared
    row = reading.parse(ROW | {"rows": {"x": {"strategy": "recipe", "compile": "dynamic"}}}).rows["x"]
    compiled = replace(asked, strategy="recipe", options=row.options)
    live = readback.read(strategy)
    monkeypatch.setattr(readback, "read", lambda given: live)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(RunFailed, match="the row asks for it, but TORCH_COMPILE_DISABLE=1 in the environment"):
        readback.check(strategy, compiled, {})


def test_live_settings_are_read_from_the_objects(prepared):
    strategy, asked = prepared
    live = readback.check(strategy, asked)
    forward(strategy)
    assert live["computes_in"] == "float32"
    assert (live["optimizer"], live["fused"], live["world_size"]) == ("AdamW", True, 1)
    assert [group["weight_decay"] for group in live["groups"]] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("initial_lr", 0.1, "optimizer group 0: initial_lr: the row asks for 0.0015, but single uses 0.1"),
        ("eps", 1e-6, "eps: the row asks for 1e-08, but single uses 1e-06"),
        ("betas", (0.9, 0.95), r"betas: the row asks for \(0.9, 0.999\)"),
        ("weight_decay", 0.1, r"weight decay: the row asks for \[0.0, 0.01\], but single uses \[0.0, 0.1\]"),
    ],
)
def test_another_optimizer_setting(prepared, name, value, message):
    strategy, asked = prepared
    strategy.optimizer.param_groups[0][name] = value
    with pytest.raises(RunFailed, match=message):
        readback.check(strategy, asked)


def test_convolutions_in_fewer_bits(prepared):
    strategy, asked = prepared
    torch.backends.cudnn.allow_tf32 = True
    with pytest.raises(RunFailed, match="tf32_convolutions: the row asks for False, but single uses True"):
        readback.check(strategy, asked)


@pytest.mark.parametrize(
    ("gradients", "notes"),
    [
        ([1.0, 2.0], []),
        ([math.inf, 1.0, math.nan], ["the gradients of 2 of 3 steps overflowed in fp16: these changed no weights"]),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_steps_that_loss_scaling_left_out_are_noted(prepared, gradients, notes, clip):
    strategy = in_fp16(prepared, clip)
    for gradient in gradients:
        step_along(strategy, gradient)
    assert readback.skipped(strategy, "fp16", len(gradients)) == notes
    assert readback.skipped(strategy, "fp32", len(gradients)) == []  # nothing is left out there


def test_a_run_whose_steps_were_all_left_out_fails(prepared):
    strategy = in_fp16(prepared, clip=1.0)
    for _ in range(3):
        step_along(strategy, math.inf)
    with pytest.raises(RunFailed, match="the gradients of all 3 steps overflowed in fp16, so none changed the weights"):
        readback.skipped(strategy, "fp16", 3)


def in_fp16(prepared, clip):
    plain, asked = prepared
    asked = replace(asked, precision="fp16", train=replace(asked.train, clip=clip))
    strategy = single.Strategy(asked)
    strategy.start()
    strategy.set_up(plain.module, lambda wrapped: make_optimizer(wrapped, asked.train))
    return strategy


def step_along(strategy, gradient):
    strategy.scaler.scale(torch.ones(1))  # as before each backward pass
    for parameter in strategy.module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    strategy.step()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_matrix_products_in_fewer_bits(prepared, precision):
    """As a model's own code may ask for them."""
    strategy, asked = prepared
    torch.set_float32_matmul_precision(precision)
    with pytest.raises(RunFailed, match=f"matmul_precision: the row asks for highest, but single uses {precision}"):
        readback.check(strategy, asked)
    single.Strategy(asked)  # the next row does not inherit it
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_image_of_nvidia_s_does_not_make_fp32_tf32():
    """In those PyTorch begins with matrix products in TensorFloat-32, by a variable."""
    program = "import torch\nfrom lockstep.strategies import single\nbefore = torch.get_float32_matmul_precision()\n"
    program += "single.allow_tf32(False)\nprint(before, torch.get_float32_matmul_precision())"
    variables = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "PYTHONPATH": str(paths.SCRIPTS)}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["high", "highest"]


def test_another_optimizer(prepared):
    strategy, asked = prepared
    asked_groups = copy.copy(strategy.optimizer.param_groups)
    strategy.optimizer = torch.optim.Adam(strategy.model.parameters())
    strategy.optimizer.param_groups = asked_groups
    with pytest.raises(RunFailed, match="optimizer: the row asks for adamw, but single uses adam"):
        readback.check(strategy, asked)


class Copied(torch.optim.Optimizer):
    """A framework's wrapper that steps with a copy, and shows settings that it does not use."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        groups = [group | {"params": list(group["params"])} for group in optimizer.param_groups]
        self.optimizer = type(optimizer)(groups, lr=1.0)

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize(
    ("name", "value"), [("momentum", 0.0), ("momentum", 0.5), ("nesterov", False), ("dampening", 0.1)]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_another_momentum(prepared, name, value, wrapped):
    strategy, asked = prepared
    asked = replace(asked, train=replace(asked.train, optimizer="sgd", momentum=0.9, nesterov=True))
    strategy.optimizer = make_optimizer(strategy.module, asked.train)
    make_schedule(strategy.optimizer, asked.train, 10)
    if wrapped:
        strategy.optimizer = Copied(strategy.optimizer)
    readback.check(strategy, asked)
    live = strategy.optimizer.optimizer if wrapped else strategy.optimizer
    live.param_groups[1][name] = value
    with pytest.raises(RunFailed, match=rf"group 1: {name}: the row asks for .*, but single uses {value}"):
        readback.check(strategy, asked)


@pytest.mark.parametrize("mistake", ["", "twice", "never", "one group", "by a copy"])
def test_another_schedule(prepared, mistake):
    strategy, asked = prepared
    asked = replace(asked, train=replace(asked.train, schedule="cosine", warmup=2))
    strategy.optimizer = make_optimizer(strategy.module, asked.train)
    schedule, share = (make(asked.train, 10) for make in (partial(make_schedule, strategy.optimizer), lr_factor))
    if mistake == "by a copy":
        strategy.optimizer = Copied(strategy.optimizer)
    caught = {}
    for done in range(1, 11):
        strategy.optimizer.step()
        for _ in range({"twice": 2, "never": 0}.get(mistake, 1)):
            schedule.step()
        if mistake == "one group":
            strategy.optimizer.param_groups[1]["lr"] = 0.001
        try:
            readback.check_rate(strategy, asked, share, done)
        except RunFailed as error:
            caught[done] = str(error)
    assert len(caught) > 7 if mistake else not caught
    for done, reason in caught.items():
        assert re.match(rf"learning rate after {done} steps: .*\(schedule: cosine\), but single uses", reason)


def test_buffers_that_change_are_sent_and_others_are_not(prepared):
    strategy, asked = prepared
    strategy.live = lambda: {"broadcast_buffers": True}  # which DDP does unless told otherwise
    with pytest.raises(RunFailed, match="broadcast_buffers: the row asks for False, but single uses True"):
        readback.check(strategy, asked)
    strategy.module.register_buffer("running_mean", torch.zeros(3))
    readback.check(strategy, asked)


def test_other_threads_and_options(prepared):
    strategy, asked = prepared
    strategy.live = lambda: {"clip": 0.5, "not an option": 3}
    with pytest.raises(RunFailed, match=r"clip: the row asks for 1.0, but single uses 0.5"):
        readback.check(strategy, asked)
    strategy.live = dict
    asked = replace(asked, hardware=replace(asked.hardware, threads=asked.hardware.threads + 1))
    with pytest.raises(RunFailed, match=r"threads: the row asks for \d"):
        readback.check(strategy, asked)


def test_another_precision_shows_in_the_first_forward_pass(prepared):
    strategy, asked = prepared
    strategy.precision = "bf16"  # a framework that computes otherwise than it was told to
    live = readback.check(strategy, asked)
    with pytest.raises(RunFailed, match="precision: the row asks for fp32, but the model computes in bfloat16"):
        forward(strategy)
    assert live["computes_in"] == "bfloat16"
