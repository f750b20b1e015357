"""The optimizer and its learning-rate schedule, the same for every strategy."""

import inspect
from collections.abc import Sequence

import torch

from lockstep.config import optimizers
from lockstep.config.sections import Train
from lockstep.model import muon
from lockstep.model.schedule import lr_factor


def make_optimizer(model: torch.nn.Module, train: Train) -> torch.optim.Optimizer:
    """`train.optimizer`, with weight decay on matrices only, not on biases and normalisation weights (one dimension).

    AdamW decouples weight decay from the gradient; Adam and SGD add it to the gradient, as in PyTorch. adamw8bit is
    bitsandbytes' AdamW, which stores its state in 8 bits per number for tensors of at least 4096 numbers (Dettmers et
    al. 2021, arXiv:2110.02861). muon trains the matrices of hidden layers by Muon, and the rest by AdamW
    (model/muon.py).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    own = hyperparameters(train)
    if train.optimizer == "muon":
        hidden = {id(parameter) for parameter in muon.hidden_matrices(model)}
        matrices = [p for p in groups[0]["params"] if id(p) in hidden]
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in hidden]
        by_muon = [{"params": matrices, "weight_decay": train.weight_decay}]
        return muon.Muon(by_muon, groups, lr=train.learning_rate, **own, fused=True)
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # a slow import, which most rows do not need

        return AdamW8bit(groups, lr=train.learning_rate, **own)
    kind = getattr(torch.optim, optimizers.OPTIMIZERS[train.optimizer].of_torch)
    return kind(groups, lr=train.learning_rate, **own, fused=True)


def hyperparameters(train: Train, group: dict | None = None) -> dict:
    """The settings of one of the optimizer's groups besides learning rate and weight decay; most have the same."""
    if train.optimizer == "muon" and muon.is_of_matrices(group or {}):
        return muon.SETTINGS
    return optimizers.settings(train)


def wrap_optimizer(optimizer: torch.optim.Optimizer, wrapper: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Recreate an optimizer inside `wrapper`, with the same groups and settings. It must not have taken a step yet."""
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params", "weight_decay"}
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return wrapper(groups, optimizer_class=type(optimizer), **settings)


def make_schedule(
    optimizer: torch.optim.Optimizer, train: Train, steps: int, epochs: Sequence[int] = ()
) -> torch.optim.lr_scheduler.LambdaLR:
    """PyTorch's scheduler for `steps` optimizer steps; call its `step` after each of them.

    `epochs` is the epoch of each step, from 0; see `lr_factor`.
    """
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(train, steps, epochs))
