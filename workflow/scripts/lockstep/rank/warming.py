"""What happens once for each shape of batch happens before the timed window, and leaves nothing behind in the model.

A kernel is loaded when it is first launched, a library plans an attention or a product for each new shape, a compiler
makes a program, an allocator asks the device for memory, ranks connect when they first communicate. In a window of a
minute this may take seconds, which a long training does not have: so it has a price of its own (`cold_seconds`).
"""

import contextlib
import random

import numpy as np
import torch

from lockstep.model import attention
from lockstep.model.optimizer import make_optimizer


def warm_up(replay) -> None:
    """Compute forward and backward of one micro-batch of each size and width that the plan has (rank/replay.py).

    The widest comes first, so that the pool of memory grows once. Called on every rank, after the model is wrapped and
    a saved state is restored: the first step afterwards is, bit for bit, what it would have been without.
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
    """Look which attention computes, in a forward pass that is not compiled: what watches it would break a program."""
    asked, strategy = replay.training.train.attention, replay.training.strategy
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        strategy.autocast(),
        attention.explained(asked),
        attention.watched() as ran,
    ):
        strategy.model(**batch.inputs)
    replay.live_settings["attention_kernels"] = kinds = attention.kinds(ran)
    attention.require(asked, kinds)


def _rehearse_update(training) -> None:
    """Clip and update a model of a few numbers, by which the kernels of both are loaded."""
    few = torch.nn.Linear(8, 8, device=training.strategy.world.device)
    for parameter in few.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(few, training.train)
    torch.nn.utils.clip_grad_norm_(few.parameters(), 1.0)
    optimizer.step()


@contextlib.contextmanager
def _leaving_no_trace(strategy):
    """Put random states and buffers back to what they are now, when the block ends."""
    modules = (strategy.module, strategy.trained_module())
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if strategy.world.device.type == "cuda" else []
    yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    python, numpy_state, on_cpu = states
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)
