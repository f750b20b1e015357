"""Which of PyTorch's attention kernels computes, and which one has.

scaled_dot_product_attention chooses among several by device, precision, mask and shape. On GPUs of compute capability
9.0 and higher it takes cuDNN's where there is a padding mask in half precision, which makes an execution plan for every
new shape, about a second for forward and backward; batches of texts have some twenty widths.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import RunFailed

KINDS = ("flash", "efficient", "cudnn", "math")
OPERATIONS = {kind: f"_scaled_dot_product_{kind}_attention" for kind in KINDS[:3]} | {"varlen": "_varlen_attn"}
CALLED = "scaled_dot_product_attention"
COMPILES_FP64 = (2, 13)  # the version of PyTorch from which a compiled program has attention in fp64 on a CPU
PLANNING = (9, 0)  # compute capability from which cuDNN's attention comes first


def choose(asked: str, device: torch.device, shapes: int, precision: str = "fp32") -> list[str]:
    """Allow scaled_dot_product_attention the kernels of one kind, or with "auto" its own choice; returns notes.

    shapes: how many different ones a plan has. Where there are several, "auto" leaves cuDNN's out on GPUs that would
    take it. In fp64, which only proofs have, it takes math on a CPU where torch.compile would fail with another.
    """
    kinds = set(KINDS) if asked == "auto" else {asked}
    notes = []
    planning = device.type == "cuda" and torch.cuda.get_device_capability(device) >= PLANNING
    if asked == "auto" and shapes > 1 and planning:
        kinds.discard("cudnn")
        notes.append("cuDNN's attention, which plans for each width anew, is left out (attention: cudnn takes it)")
    if asked == "auto" and device.type == "cpu" and precision == "fp64" and _torch() < COMPILES_FP64:
        kinds = {"math"}
    torch.backends.cuda.enable_flash_sdp("flash" in kinds)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in kinds)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in kinds)
    torch.backends.cuda.enable_math_sdp("math" in kinds)
    return notes


def _torch() -> tuple[int, int]:
    """PyTorch's version, as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def allowed() -> list[str]:
    """The kinds that scaled_dot_product_attention may take now."""
    cuda = torch.backends.cuda
    on = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled())
    return [kind for kind, enabled in zip(KINDS, on, strict=True) if enabled]


@contextlib.contextmanager
def explained(asked: str):
    """Say what is wrong where PyTorch has no kernel of the kind that is asked for. Raises RunFailed."""
    try:
        yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise RunFailed(
            f"attention: {asked} is asked for, and PyTorch has no such kernel for these batches on this device in this"
            " precision (flash takes no padding mask on a GPU, and no dropout on a CPU); take auto"
        ) from None


def require(asked: str, ran: list[str]) -> None:
    """Raises RunFailed where another kind of attention ran than the one that is asked for."""
    if asked != "auto" and ran not in ([], [asked]):
        raise RunFailed(f"attention: {asked} is asked for, and the model uses {' and '.join(ran)}; take auto")


class _Watch(TorchDispatchMode):
    """Notes the names of all operations that PyTorch does."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(str(operation))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched():
    """Yields a set, in which the names of operations are that have run in the block, and CALLED where attention has."""
    attend = torch.nn.functional.scaled_dot_product_attention
    with _Watch() as watch:

        def noted(*arguments, **options):
            watch.names.add(CALLED)
            return attend(*arguments, **options)

        torch.nn.functional.scaled_dot_product_attention = noted
        try:
            yield watch.names
        finally:
            torch.nn.functional.scaled_dot_product_attention = attend


def kinds(names: set[str]) -> list[str]:
    """The kinds of attention among the operations that `watched` has seen; "varlen" is that of texts end to end.

    What PyTorch calls math is made of several operations, none of them attention's own.
    """
    ran = [kind for kind, own in OPERATIONS.items() if any(own in name for name in names)]
    return ran or (["math"] if CALLED in names else [])
