"""Optimizers that `train.optimizer` chooses, and which of the configuration's settings each has.

Each is one entry here; model/optimizer.py creates it. An option `optimizer` of a strategy lists its names itself, as
strategies' files are read without being imported.
"""

from dataclasses import dataclass

from lockstep.config.fixed import EPS


@dataclass(frozen=True)
class Optimizer:
    name: str
    of_torch: str | None  # its class in torch.optim; None: model/optimizer.py creates it in another way
    moments: int  # how many numbers it keeps at least for each weight, in the weight's own type (rank/memory.py)
    adaptive: bool = True  # whether it has Adam's two running averages (betas, eps); otherwise momentum and nesterov
    of_all: bool = True  # whether every strategy takes it; otherwise only those that have it as an option
    not_with_lora: str = ""  # why a row can't combine it with LoRA; empty if it can


DECLARED = (
    Optimizer("adamw", "AdamW", moments=2),
    Optimizer("adam", "Adam", moments=2),
    Optimizer("sgd", "SGD", moments=0, adaptive=False),  # without momentum
    Optimizer("muon", None, moments=1),  # of matrices; of the rest two
    Optimizer("adamw8bit", None, moments=0, of_all=False, not_with_lora="with LoRA there is little state to save"),
)
OPTIMIZERS = {optimizer.name: optimizer for optimizer in DECLARED}
OF_ALL = tuple(optimizer.name for optimizer in DECLARED if optimizer.of_all)
ADAPTIVE = tuple(optimizer.name for optimizer in DECLARED if optimizer.adaptive)
WITH_MOMENTUM = tuple(optimizer.name for optimizer in DECLARED if not optimizer.adaptive)


def settings(train) -> dict:
    """What an optimizer is created with besides learning rate and weight decay; train: a sections.Train."""
    if OPTIMIZERS[train.optimizer].adaptive:
        return {"betas": tuple(train.betas), "eps": EPS}
    return {"momentum": train.momentum, "nesterov": train.nesterov, "dampening": 0.0}
