"""Pretended GPUs: every process of a run sees N GPUs, and computes on the CPU.

They are implemented in workflow/pretended/, which is on the path of every process that is to see them:

- gpus.cpp and group.cpp give PyTorch's CPU build tensors on cuda:k. These are host memory that remembers its k, with
  the CPU's operators. PyTorch's own errors are raised if tensors of two devices meet, or a process uses more than 8 GiB
  of a GPU. A process group named nccl sends by gloo, and refuses two ranks on one device.
- torch_cuda.py implements torch.cuda and parts of torch.distributed: count, names, memory, capability, streams, events
  (which read the host's clock) and random states. Like CUDA, it orders the fastest GPUs first, unless CUDA_DEVICE_ORDER
  says otherwise, and refuses to be used in a fork of a process that used it.
- pynvml.py stands in for NVML.
- cache.h shares a GPU's memory out as PyTorch's caching allocator does, LOCKSTEP_PRETENDED_MEMORY bytes of it.

With LOCKSTEP_PRETENDED_SIZES=1 nothing is computed. Only memory is counted (sizes.h), for `lockstep fits`: a process is
one rank alone, LOCKSTEP_PRETENDED_WORKSPACE says how many bytes cuBLAS takes, and memory has no end unless given one.
LOCKSTEP_PRETENDED_DEBUG=1 names each operator that has no sizes without its numbers, and so is computed all the same.

LOCKSTEP_PRETENDED_KINDS="Slow GPU,Fast GPU" names GPUs of different models, in the order of the bus.

Limits:

- They do not show which kernels a real device would launch, or their time and memory; whether NCCL, cuBLAS, CUDA graphs
  or a driver work; how a device rounds; or that the device computes while the host continues.
- Attention and SyncBatchNorm are computed by their formulas. Pinned memory is ordinary memory, and pin_memory returns
  no copy. Horovod is its library for the CPU, without NCCL. torch.compile makes no kernels. The outputs of CUDA graphs
  are overwritten by the next replay, like real ones. The profiler records the host only.
- All GPUs of a process draw from the host's random generator.
- Each process has all of a GPU's memory for itself. None of it goes to a CUDA context, and all streams take it from one
  pool. NVML and mem_get_info always report that all of it is free.
- Some mistakes are not found: a tensor of the host in an operator that indexes or takes a list of tensors; a forked
  child that computes with its parent's GPU tensors; an environment variable that changes after CUDA has read it; and a
  GPU that CUDA_VISIBLE_DEVICES names twice (a GPU that it names by UUID does not exist).
- If a rank sends from a GPU from which another rank of its group has sent, real NCCL waits until its timeout, or even
  works if all ranks exchange their GPUs. Here this is refused at once.

Numbers measured with them say nothing about a GPU.
"""

import hashlib
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from lockstep import caches
from lockstep.errors import BadInput
from lockstep.paths import PROJECT

PARTS = PROJECT / "workflow" / "pretended"
LOADED = ("sitecustomize.py", "torch_cuda.py", "pynvml.py")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=pretended", "-DUSE_C10D", "-DUSE_DISTRIBUTED")
CANNOT_KNOW = (
    "pretended GPUs compute on the CPU: they can't know times, memory of kernels and NCCL, or how a GPU rounds"
)


def variables(gpus: int) -> dict[str, str]:
    """Environment variables for a command that is to see `gpus` pretended GPUs; PARTS must also be on its path.

    Raises BadInput if PyTorch can't use them.
    """
    import torch

    if torch.version.cuda or torch.version.hip:
        raise BadInput("--gpus: PyTorch is built for real GPUs here, but only its CPU build takes pretended ones.")
    return {
        "LOCKSTEP_PRETENDED_GPUS": str(gpus),
        "LOCKSTEP_PRETENDED_LIBRARIES": str(libraries()),
    }


def libraries() -> Path:
    """The folder of the compiled libraries. They are kept in the user's cache until their sources or PyTorch change.

    Raises BadInput if they can't be compiled.
    """
    import torch

    sources = b"".join(file.read_bytes() for file in sorted(PARTS.iterdir()) if file.suffix in (".cpp", ".h"))
    named = hashlib.sha256(sources + " ".join((torch.__version__, *FLAGS)).encode()).hexdigest()[:12]
    cache_folder = caches.asked() / "lockstep"
    folder = cache_folder / f"pretended-{named}"
    if not folder.is_dir():
        cache_folder.mkdir(parents=True, exist_ok=True)
        print("compiling pretended GPUs, once", flush=True)
        with tempfile.TemporaryDirectory(dir=cache_folder) as temporary:
            made = Path(temporary) / "made"
            _compile(made)
            try:
                made.rename(folder)
            except OSError:  # another process has made them meanwhile
                if not folder.is_dir():
                    raise
    return folder


def _compile(folder: Path) -> None:
    """Compile gpus.cpp and group.cpp into `folder`. There are two, as one is loaded before PyTorch's Python part."""
    import torch
    from torch.utils import cpp_extension

    folder.mkdir()
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = [*FLAGS, *(f"-I{path}" for path in includes)]
    linked = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
    try:
        compilers = [
            subprocess.Popen(["c++", *flags, PARTS / f"{name}.cpp", "-o", folder / f"{name}.so", *linked, *more])
            for name, *more in (("gpus",), ("group", "-ltorch_python"))
        ]
    except FileNotFoundError:
        raise BadInput("--gpus: c++, which compiles pretended GPUs, is not installed. Install g++.") from None
    if [compiler.wait() for compiler in compilers] != [0, 0]:
        raise BadInput(
            f"--gpus: pretended GPUs can't be compiled for PyTorch {torch.__version__}; the compiler said why."
        )
