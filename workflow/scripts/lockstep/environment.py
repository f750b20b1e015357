"""What a run ran on, said from inside the run: machine, devices, versions. Goes into env.json."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from lockstep.hardware import cpu_cores

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "scikit-learn", "safetensors")
# Environment variables that change speed or numbers. A list of what is kept, so that no secret can slip in.
VARIABLES = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "LD_PRELOAD",
]


def describe() -> dict:
    return {
        "machine": platform.machine(),
        "system": _system(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": cpu_cores(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "in_container": _container(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process held: allocated on its GPUs, else resident (VmHWM of proc_pid_status(5)); in MiB."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())) / 2**20
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _container() -> str | None:
    """The kind of container this process runs in, or None."""
    if "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ:
        return "apptainer"
    return "docker" if Path("/.dockerenv").exists() else None
