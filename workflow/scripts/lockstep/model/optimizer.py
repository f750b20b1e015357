"""The optimizer and its learning-rate schedule, as every strategy gets them."""

import inspect
from collections.abc import Sequence

import torch

from lockstep.config.fixed import EPS
from lockstep.config.sections import Train
from lockstep.model.schedule import lr_factor


def make_optimizer(model: torch.nn.Module, train: Train) -> torch.optim.Optimizer:
    """`train.optimizer`, with weight decay on matrices, not on biases and normalisation weights (one dimension).

    AdamW decays weights beside the update; Adam and SGD add the decay to the gradient, as PyTorch's do. adamw8bit is
    bitsandbytes' AdamW, whose state takes 8 bits a number, not 32, of tensors of 4096 numbers or more (Dettmers et al.
    2021, arXiv:2110.02861).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    own = hyperparameters(train)
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # which takes long, and most rows do without

        return AdamW8bit(groups, lr=train.learning_rate, **own)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[train.optimizer]
    return kind(groups, lr=train.learning_rate, **own, fused=True)


def hyperparameters(train: Train) -> dict:
    """The optimizer's settings besides rate and weight decay; all of its groups have the same."""
    if train.optimizer == "sgd":
        return {"momentum": train.momentum, "nesterov": train.nesterov, "dampening": 0.0}
    return {"betas": tuple(train.betas), "eps": EPS}


def rewrapped(optimizer: torch.optim.Optimizer, wrapper: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Hand the groups and settings of an optimizer that has taken no step to `wrapper`, which makes it anew."""
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params", "weight_decay"}
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return wrapper(groups, optimizer_class=type(optimizer), **settings)


def make_schedule(
    optimizer: torch.optim.Optimizer, train: Train, steps: int, epochs: Sequence[int] = ()
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate at each of `steps` optimizer steps; step it after each one.

    `epochs` is the epoch, from 0, that each step belongs to; only the schedule `step` asks for it.
    """
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(train, steps, epochs))
