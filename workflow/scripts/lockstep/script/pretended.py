"""Pretended GPUs: every process of a run believes in N of them, and computes on the CPU.

What they are made of lies in workflow/pretended/, which is on the path of every process that is to believe in them:

- gpus.cpp and group.cpp give PyTorch's CPU build tensors on cuda:k: memory of the host that remembers its k, with the
  CPU's operators, refused in PyTorch's words where tensors of two devices meet or a process wants more than 8 GiB of
  a GPU; and a process group that calls itself nccl, sends by gloo, and refuses two ranks on one device;
- torch_cuda.py answers what torch.cuda and torch.distributed are asked: count, names, memory, capability, streams,
  events (which read the host's clock), random states; like CUDA it counts the fastest GPUs first, unless
  CUDA_DEVICE_ORDER says otherwise, and refuses to be used in a process that was forked off one that used it;
- pynvml.py answers for NVML.

LOCKSTEP_PRETENDED_KINDS="Slow GPU,Fast GPU" names GPUs of unlike kinds, in the order of the bus.

What they can't know: what kernels a real device would launch, in how much time and memory; whether NCCL, cuBLAS, CUDA
graphs or a driver work; how a device rounds; that work goes on while the host does. Attention and SyncBatchNorm are
computed by their formulas, pinned memory is ordinary memory (and what pin_memory returns no copy), Horovod is its
library for the CPU (so without NCCL), torch.compile makes no kernels, what CUDA graphs leave behind is overwritten by
the next replay as theirs is, and the profiler records the host only. All GPUs of a process draw from the host's one
random generator. Each process has the whole memory of a GPU for itself, nothing of it goes to a CUDA context, a cache
or fragments, and NVML and mem_get_info always tell that all is free. Operators that index, and those over lists of
tensors, let a tensor of the host pass, so of such a mistake nothing is seen; nor of a forked child that computes with a
GPU's tensor of its parent's, of a variable that is changed after CUDA has read it, or of a GPU that
CUDA_VISIBLE_DEVICES names twice (one that it names by its UUID is not found). Where a rank sends from a GPU that
another one of its group has sent from, real NCCL waits until its timeout, or even works if all ranks exchange their
GPUs; here it is refused at once. Numbers that come of them are of no GPU.
"""

import hashlib
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from lockstep import caches
from lockstep.errors import BadInput
from lockstep.paths import PROJECT

PARTS = PROJECT / "workflow" / "pretended"
LOADED = ("sitecustomize.py", "torch_cuda.py", "pynvml.py")
SOURCES = ("gpus.cpp", "group.cpp", "memory.h")
CANNOT_KNOW = (
    "pretended GPUs compute on the CPU: times, memory of kernels and NCCL, and how a GPU rounds, they can't know"
)


def variables(gpus: int) -> dict[str, str]:
    """What to set for a command that is to see so many, beside PARTS on its path. Raises BadInput where it can't be."""
    import torch

    if torch.version.cuda or torch.version.hip:
        raise BadInput("--gpus: PyTorch is built for real GPUs here, and only its CPU build takes pretended ones.")
    return {
        "LOCKSTEP_PRETENDED_GPUS": str(gpus),
        "LOCKSTEP_PRETENDED_LIBRARIES": str(_kept()),
    }


def _kept() -> Path:
    """The folder of the compiled parts, which are kept for the next time."""
    import torch

    sources = b"".join((PARTS / name).read_bytes() for name in SOURCES)
    named = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:12]
    cache_folder = caches.asked() / "lockstep"
    folder = cache_folder / f"pretended-{named}"
    if not folder.is_dir():
        cache_folder.mkdir(parents=True, exist_ok=True)
        print("compiling pretended GPUs, once", flush=True)
        with tempfile.TemporaryDirectory(dir=cache_folder) as temporary:
            made = libraries(Path(temporary) / "made")
            if not folder.is_dir():
                made.rename(folder)
    return folder


@cache
def libraries(folder: Path) -> Path:
    """gpus.cpp and group.cpp, compiled into `folder`: two, as one must be there before PyTorch's Python part is."""
    import torch
    from torch.utils import cpp_extension

    folder.mkdir(exist_ok=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=pretended", "-DUSE_C10D"]
    flags += ["-DUSE_DISTRIBUTED", *(f"-I{path}" for path in includes)]
    linked = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
    try:
        compilers = [
            subprocess.Popen(["c++", *flags, PARTS / f"{name}.cpp", "-o", folder / f"{name}.so", *linked, *more])
            for name, *more in (("gpus",), ("group", "-ltorch_python"))
        ]
    except FileNotFoundError:
        raise BadInput("--gpus: c++ is not here, which compiles pretended GPUs. Install g++.") from None
    if [compiler.wait() for compiler in compilers] != [0, 0]:
        raise BadInput(
            f"--gpus: pretended GPUs can't be compiled for PyTorch {torch.__version__}; the compiler said why."
        )
    return folder
