"""Pretended GPUs: every process of a run believes in N of them, and computes on the CPU.

`machine(place, gpus)` copies what is beside this file into the scripts of a project's copy, which are on the path of
every process that a run starts, its launchers included; the product itself never loads it. There

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
GPUs; here it is refused at once. Numbers that come of them are of no GPU, so they stay in the tests' folders.
"""

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
LOADED = ("sitecustomize.py", "torch_cuda.py", "pynvml.py")


@cache
def libraries(folder: Path) -> Path:
    """gpus.cpp and group.cpp, compiled into `folder`: two, as one must be there before PyTorch's Python part is."""
    from torch.utils import cpp_extension

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=pretended", "-DUSE_C10D"]
    flags += ["-DUSE_DISTRIBUTED", *(f"-I{path}" for path in includes)]
    linked = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
    compilers = [
        subprocess.Popen(["c++", *flags, HERE / f"{name}.cpp", "-o", folder / f"{name}.so", *linked, *more])
        for name, *more in (("gpus",), ("group", "-ltorch_python"))
    ]
    assert [compiler.wait() for compiler in compilers] == [0, 0]
    return folder


def machine(place, gpus: int, built: Path) -> dict[str, str]:
    """Make the project's copy `place` one of a machine with so many GPUs; returns the variables to call it with."""
    scripts = place.path("workflow/scripts")
    for file in LOADED:
        shutil.copy2(HERE / file, scripts / file)
    path = os.pathsep.join([str(scripts), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"LOCKSTEP_PRETENDED_GPUS": str(gpus), "LOCKSTEP_PRETENDED_LIBRARIES": str(built), "PYTHONPATH": path}
