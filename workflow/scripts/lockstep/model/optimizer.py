"""The optimizer and its learning-rate schedule, as every strategy gets them; and the same optimizer with less state."""

import torch

from lockstep.config.sections import Train
from lockstep.model import lean

BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW


def make_optimizer(model: torch.nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: biases and normalisation weights (one dimension) have none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, eps=EPS, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, train: Train, steps: int):
    """The learning rate at each of `steps` optimizer steps, by transformers' schedules; step it after each one."""
    with lean.imports():
        from transformers import get_scheduler

    name = "constant_with_warmup" if train.schedule == "constant" else train.schedule
    warmup = round(train.warmup * steps) if train.warmup < 1 else int(train.warmup)
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)


def in_8_bits(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with the groups and settings of `optimizer`, whose state takes 8 bits a number, not 32.

    Of tensors of 4096 numbers or more (Dettmers et al. 2021, arXiv:2110.02861).
    """
    from bitsandbytes.optim import AdamW8bit  # which takes long, and most rows do without

    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
    return AdamW8bit(groups, **{name: optimizer.defaults[name] for name in ("lr", "betas", "eps")})
