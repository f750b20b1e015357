"""torch.compile: one program for all shapes of batches, or one program for each of a few widths."""

import math

import torch

STEP = 16  # static: every width is a multiple of it
CALLS_TO_A_GRAPH = 3  # of a program: the first warms up, the second is recorded as a CUDA graph, the third replays it
MOST_PROGRAMS = 64  # static: the largest number of widths; PyTorch's default is 8, after which it runs uncompiled


def compile_dynamic(model: torch.nn.Module) -> None:
    """Make `model` run one program for all shapes, from its first forward pass on."""
    model.compile(dynamic=True)


def compile_static(model: torch.nn.Module, device: torch.device) -> None:
    """Make `model` run one program per input shape; pad batches by `few_widths`, so that there are few shapes.

    On a GPU the programs are replayed as CUDA graphs.
    """
    torch._dynamo.config.cache_size_limit = MOST_PROGRAMS
    model.compile(dynamic=False, mode="reduce-overhead" if device.type == "cuda" else "default")


def few_widths(width: int, longest: int) -> int:
    """The width to pad a batch to: `width` rounded up to a multiple of STEP, at most `longest`, the model's limit."""
    return min(math.ceil(width / STEP) * STEP, longest)
