"""Select PyTorch's attention kernel, and detect which one ran.

scaled_dot_product_attention chooses among several kernels by device, precision, mask and shape. On GPUs of compute
capability 9.0 and higher it takes cuDNN's kernel for a padding mask in half precision. cuDNN makes an execution plan
for every new shape, which takes about a second for forward and backward; batches of texts have some twenty widths.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import RunFailed

KINDS = ("flash", "efficient", "cudnn", "math")
OPERATIONS = {kind: f"_scaled_dot_product_{kind}_attention" for kind in KINDS[:3]} | {"varlen": "_varlen_attn"}
CALLED = "scaled_dot_product_attention"
COMPILES_FP64 = (2, 13)  # the first version of PyTorch that can compile attention in fp64 on a CPU
PLANNING = (9, 0)  # the lowest compute capability at which PyTorch prefers cuDNN's attention


def choose(asked: str, device: torch.device, shapes: int, precision: str = "fp32") -> list[str]:
    """Restrict scaled_dot_product_attention to one kind of kernel; "auto" leaves PyTorch its choice. Returns notes.

    shapes: the number of different batch shapes in the plan. If there are several, "auto" excludes cuDNN's kernel on
    GPUs that would prefer it. In fp64, which only proofs use, "auto" means math on a CPU if torch.compile would fail
    with another kernel.
    """
    kinds = set(KINDS) if asked == "auto" else {asked}
    notes = []
    planning = device.type == "cuda" and torch.cuda.get_device_capability(device) >= PLANNING
    if asked == "auto" and shapes > 1 and planning:
        kinds.discard("cudnn")
        notes.append("cuDNN's attention is left out, as it plans anew for each width (attention: cudnn takes it)")
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
    """The kinds of kernel that scaled_dot_product_attention may use now."""
    cuda = torch.backends.cuda
    on = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled())
    return [kind for kind, enabled in zip(KINDS, on, strict=True) if enabled]


@contextlib.contextmanager
def explained(asked: str):
    """Raise RunFailed with an explanation if PyTorch has no kernel of the requested kind."""
    try:
        yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise RunFailed(
            f"attention: PyTorch has no {asked} kernel for these batches on this device in this precision (flash takes"
            " no padding mask on a GPU, and no dropout on a CPU); set attention to auto"
        ) from None


def require(asked: str, ran: list[str]) -> None:
    """Raise RunFailed if another kind of attention ran than the one that was asked for."""
    if asked != "auto" and ran not in ([], [asked]):
        raise RunFailed(f"attention: {asked} was asked for, but the model uses {' and '.join(ran)}; set it to auto")


class _Watch(TorchDispatchMode):
    """Records the name of every operation that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(str(operation))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched():
    """Yield a set that collects the names of the operations run in the block, and CALLED if attention was called."""
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
    """The kinds of attention among the operations that `watched` recorded; "varlen" is the one for packed texts.

    PyTorch's math kernel consists of general operations, so it is recognised by the call without a kernel of its own.
    """
    ran = [kind for kind, own in OPERATIONS.items() if any(own in name for name in names)]
    return ran or (["math"] if CALLED in names else [])
