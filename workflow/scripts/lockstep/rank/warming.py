"""Warm-up: what happens once per shape of batch is done before the timed window, without any effect on the model.

A kernel is loaded at its first launch, a library plans attention or a matrix product for each new shape, a compiler
makes a program, an allocator requests memory from the device, and ranks connect when they first communicate. This may
take seconds of a window of one minute, but is negligible in a long training, so it is reported by itself
(`cold_seconds`).
"""

import collections
import contextlib
import copy
import random

import numpy as np
import torch

from lockstep.model import attention
from lockstep.model.optimizer import make_optimizer
from lockstep.model.own import EVERY_MODULES

VALUES = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, torch.Tensor)
VALUES += (random.Random, np.random.Generator, np.random.RandomState)


def warm_up(replay) -> None:
    """Compute the forward and backward pass of one micro-batch of each size and width in the plan (rank/replay.py).

    The widest comes first, so that the memory pool grows only once. Call on every rank, after the model is wrapped and
    a saved state is restored; the first step afterwards is, bit for bit, the same as without warm-up.
    """
    training, strategy = replay.training, replay.training.strategy
    clock, began = training.clock, training.clock.now()
    steps = []
    with _leaving_no_trace(strategy):
        strategy.connect()
        for step, batch in replay.one_of_each_shape():
            if not steps:
                _note_attention(replay, batch)
            with attention.explained(training.train.attention):
                strategy.rehearse(replay, batch)
            steps.append(step)
            training.progress.alive()
        _rehearse_update(training)
        clock.synchronize()
    clock.warmed_up(clock.now() - began, steps, training.train.accumulation)


def _note_attention(replay, batch) -> None:
    """Record which attention kernels run, in a forward pass that is not compiled, as watching breaks a compiled one."""
    asked, strategy = replay.training.train.attention, replay.training.strategy
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        attention.explained(asked),
        attention.watched() as ran,
    ):
        strategy.forward(batch.inputs)
    replay.live_settings["attention_kernels"] = kinds = attention.kinds(ran)
    attention.require(asked, kinds)


def _rehearse_update(training) -> None:
    """Clip and update a tiny model, so that the kernels of both are loaded."""
    few = torch.nn.Linear(8, 8, device=training.strategy.world.device)
    for parameter in few.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(few, training.train)
    torch.nn.utils.clip_grad_norm_(few.parameters(), 1.0)
    optimizer.step()


@contextlib.contextmanager
def _leaving_no_trace(strategy):
    """Restore random states, and what a forward pass may change in the model, when the block ends.

    In the model these are its buffers and, in a user's own model, also its parameters, and attributes that hold plain
    values, arrays or random generators. What it keeps elsewhere, such as in a global variable or in parameters that
    ZeRO-3 holds, is not restored; the proof detects that, because its reference has no warm-up.
    """
    modules = list(dict.fromkeys([*strategy.module.modules(), *strategy.trained_module().modules()]))
    buffers = [(module, dict(module._buffers), _copies(module.buffers(recurse=False))) for module in modules]
    of_ones_own = "code" in getattr(strategy.module, "lockstep", {})
    own = list(strategy.module.modules()) if of_ones_own else []
    every = (parameter for module in own for parameter in module.parameters(recurse=False))
    # ZeRO-3's are empty until a forward pass gathers them, and small ones then stay whole.
    parameters = _copies(parameter for parameter in every if not hasattr(parameter, "ds_id"))
    attributes = [(module, _plain(vars(module))) for module in own]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if strategy.world.device.type == "cuda" else []
    yield
    with torch.no_grad():
        for module, there, copies in buffers:
            module._buffers.clear()  # a forward pass may have replaced them
            module._buffers.update(there)
            for tensor, before in copies:
                tensor.copy_(before)
        for parameter, before in parameters:
            parameter.copy_(before)
    for module, before in attributes:
        _put_back(module, before)
    python, numpy_state, on_cpu = states
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)


def _copies(tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def _plain(attributes: dict) -> dict:
    """Copies of a module's own attributes that hold values, and the states of its random generators."""
    own = {name: value for name, value in attributes.items() if name not in EVERY_MODULES}
    states = {name: value.get_state() for name, value in own.items() if isinstance(value, torch.Generator)}
    return states | {name: copy.deepcopy(value) for name, value in own.items() if _holds_values(value)}


def _put_back(module: torch.nn.Module, before: dict) -> None:
    for name, value in list(vars(module).items()):
        if name in EVERY_MODULES:
            continue
        if isinstance(value, torch.Generator) and name in before:
            value.set_state(before[name])
        elif name in before:
            vars(module)[name] = before[name]
        elif _holds_values(value):
            del vars(module)[name]  # the warm-up's forward pass has set it for the first time


def _holds_values(value) -> bool:
    if isinstance(value, dict):
        return all(map(_holds_values, value.values()))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return all(map(_holds_values, value))
    return value is None or isinstance(value, VALUES)
