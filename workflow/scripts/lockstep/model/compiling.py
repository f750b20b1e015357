"""torch.compile: one program for all shapes of batches, or one for each of a few widths."""

import math

import torch

STEP = 16  # static: widths are multiples of this
CALLS_TO_A_GRAPH = 3  # of a program: one warms up, one is recorded as a CUDA graph, one is replayed
MOST_PROGRAMS = 64  # static: as many widths as that; PyTorch would give up after 8


def compile_dynamic(model: torch.nn.Module) -> None:
    """Have `model` run one program for all shapes, from its first forward pass on."""
    model.compile(dynamic=True)


def compile_static(model: torch.nn.Module, device: torch.device) -> None:
    """Have `model` run a program for each shape that it meets, so let it meet few (`few_widths`).

    On a GPU they are replayed as CUDA graphs.
    """
    torch._dynamo.config.cache_size_limit = MOST_PROGRAMS
    model.compile(dynamic=False, mode="reduce-overhead" if device.type == "cuda" else "default")


def few_widths(width: int, longest: int) -> int:
    """The width to which a batch of this width is padded: one of few, and no more than `longest`, the model's most."""
    return min(math.ceil(width / STEP) * STEP, longest)
