"""What ranks import, before they are forked: run/forked.py."""

import importlib
import os

import torch

from lockstep.config import registry
from lockstep.config.row import Row
from lockstep.run.fork import Fork

NOT_BEFORE = ("deepspeed", "horovod")  # what chooses its device while it is imported
MODELS = ("bert", "llama")  # transformers' modules of the models from scratch


def preload(rows: list[Row]) -> None:
    """Import what the ranks of `rows` will need; with one thread, so that none is lost in a fork."""
    from lockstep.rank import main  # noqa: F401 - all that a rank imports

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else to ask for GPUs begins CUDA
    torch.set_num_threads(1)
    for name in MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for strategy in {row.strategy for row in rows if not row.unavailable}:
        if not any(need.package in NOT_BEFORE for need in registry.needs(strategy)):
            registry.load(strategy)


def reaches_gpus() -> bool:
    """Whether a fork of this process can use a GPU, which it can't where an import has begun CUDA."""
    return Fork(lambda: torch.zeros(1, device="cuda").item(), dict(os.environ)).wait() == 0
