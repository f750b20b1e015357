"""What ranks import before they are forked (run/forked.py)."""

import gc
import importlib
import os

import torch

from lockstep.config import registry
from lockstep.config.row import Row
from lockstep.run.fork import Fork

NOT_BEFORE = ("deepspeed", "horovod")  # these choose their device while they are imported
MODELS = ("bert", "llama")  # transformers' modules for the models that are trained from scratch


def preload(rows: list[Row]) -> None:
    """Import what the ranks of `rows` will need, with one thread only, because threads do not survive a fork."""
    from lockstep.rank import main  # noqa: F401 - all that a rank imports

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise, looking for GPUs initialises CUDA
    torch.set_num_threads(1)
    for name in MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for strategy in {row.strategy for row in rows if not row.unavailable}:
        if not any(need.package in NOT_BEFORE for need in registry.needs(strategy)):
            registry.load(strategy)
    gc.freeze()  # or each fork would copy the pages of all these objects, to look through them for garbage


def reaches_gpus() -> bool:
    """Whether a fork of this process can use a GPU; it can't if an import has initialised CUDA."""
    return Fork(lambda: torch.zeros(1, device="cuda").item(), dict(os.environ)).wait() == 0
