"""What a run ran on, said from inside the run: machine, devices, versions. Goes into env.json."""

import contextlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from lockstep.config import containers
from lockstep.config.hardware import VARIABLES, cpu_cores
from lockstep.provenance import PROJECT, output

# Instruction sets that decide how fast matrices are multiplied.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve")


def describe() -> dict:
    image, digest = containers.current()
    return {
        "machine": platform.machine(),
        "system": _system(),
        "kernel": platform.release(),
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in FLAGS if flag in (_cpuinfo("flags") or _cpuinfo("Features") or "").split()],
        "cores": cpu_cores(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in pinned()},
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "gpu_details": _gpus(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "mpi": _mpi(),
        "in_container": containers.kind(),
        "image": image,
        "image_digest": digest,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def pinned() -> list[str]:
    """The packages whose versions the project pins, Horovod, which it builds itself, and one that only some have."""
    lines = (PROJECT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    named = [line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")]
    return [*named, "horovod", "bitsandbytes"]


def gpu_handles() -> list:
    """NVML's handles of the GPUs that this process sees. Raises whatever NVML raises where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    uuids = [torch.cuda.get_device_properties(number).uuid for number in range(torch.cuda.device_count())]
    return [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]


def _gpus() -> list[dict]:
    """What the driver says of each GPU that this process sees: driver, memory, ECC, power limit, links between GPUs."""
    answers = []
    with contextlib.suppress(Exception):  # no driver or no library: there is nothing to tell
        import pynvml

        handles = gpu_handles()
        for gpu in handles:
            questions = {
                "driver": lambda gpu: pynvml.nvmlSystemGetDriverVersion(),
                "memory_mb": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total // 2**20,
                "ecc": lambda gpu: bool(pynvml.nvmlDeviceGetEccMode(gpu)[0]),
                "power_limit_watts": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
                # nvmlGpuTopologyLevel_t: 0 same board, 10 one switch, 20 several, 30 host bridge, 40 node, 50 system
                "topology": lambda gpu: [pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu, other) for other in handles],
            }
            answers.append({name: _asked(question, gpu) for name, question in questions.items()})
    return answers


def _asked(question, gpu):
    try:
        return question(gpu)
    except Exception:  # each GPU answers only some of them
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mpi() -> str | None:
    said = output("mpirun", "--version")
    return said.splitlines()[0] if said else None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _cpuinfo(key: str) -> str | None:
    match = re.search(rf"^{key}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else None
