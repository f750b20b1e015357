"""A hand-written training loop over the plan's batches and nothing else: the minimum time that this training takes."""

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep.config import precisions
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.strategies.single import autocast


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule,
    plan: Plan,
    tokens: Tokens,
    precision: str = "fp32",
    clip: float = 1.0,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Train every step of the plan on the model's device; `done` is called after each step.

    clip: the largest norm of the gradient, or 0 to leave it as it is (train.clip).
    """
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=precisions.of(precision).scaled)
    for step in range(plan.steps):
        loss = _loss(model, tokens, plan.step_ids(step), plan.widths[step], precision, device)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        done()


def timed(
    model, optimizer, schedule, plan: Plan, tokens: Tokens, precision: str = "fp32", clip: float = 1.0
) -> np.ndarray:
    """The seconds of each step, [steps], after one forward and backward pass of each width.

    The device is not synchronised between steps; on a GPU its own events time them.
    """
    device = next(model.parameters()).device
    for step in np.unique(-plan.widths, return_index=True)[1]:
        _loss(model, tokens, plan.step_ids(step), plan.widths[step], precision, device).backward()
        optimizer.zero_grad()
    moments = []

    def tick() -> None:
        if device.type == "cuda":
            moments.append(torch.cuda.Event(enable_timing=True))
            moments[-1].record()
        else:
            moments.append(time.perf_counter())

    _wait(device)
    tick()
    train(model, optimizer, schedule, plan, tokens, precision, clip, tick)
    _wait(device)
    return np.array(
        [a.elapsed_time(b) / 1000 if device.type == "cuda" else b - a for a, b in itertools.pairwise(moments)]
    )


def _loss(model, tokens: Tokens, ids: np.ndarray, width: int, precision: str, device: torch.device) -> torch.Tensor:
    tensors = {name: torch.from_numpy(array) for name, array in tokens.batch(ids, width).items()}
    if device.type == "cuda":
        tensors = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    labels = tensors.pop("labels")
    with autocast(device, precision):
        outputs = model(**tensors)
    return cross_entropy(outputs.logits.float(), labels)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
