"""What a run ran on, found from inside the run: machine, devices, versions. It is written to env.json."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import torch

from lockstep import nvml
from lockstep.config import containers
from lockstep.config.machine import VARIABLES, cpu_cores, cpu_info, cpu_name, governor, virtual_machine
from lockstep.provenance import PROJECT, output
from lockstep.rank.energy import gpu_handles

# Instruction sets that determine how fast matrices are multiplied.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve")


def describe() -> dict:
    image, digest = containers.current()
    gpus = gpu_handles()
    return {
        "machine": platform.machine(),
        "system": _system(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cpu_flags": [flag for flag in FLAGS if flag in (cpu_info("flags") or cpu_info("Features") or "").split()],
        "cores": cpu_cores(),
        "governor": governor(),
        "virtual_machine": virtual_machine(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in pinned()},
        "installed": installed(),
        "torch_from": _elsewhere(torch.__file__),
        "torch_config": torch.__config__.show().strip(),
        "compiler": _first_line("g++", "--version"),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "gpu_details": [nvml.describe(gpu, gpus) for gpu in gpus],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "mpi": _first_line("mpirun", "--version"),
        "mps": nvml.mps_folder(),
        "in_container": containers.kind(),
        "image": image,
        "image_digest": digest,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def pinned() -> list[str]:
    """The packages that the project pins; Horovod, which it builds itself; and bitsandbytes, which is optional."""
    lines = (PROJECT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    named = [line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")]
    return [*named, "horovod", "bitsandbytes"]


def installed() -> dict[str, str]:
    """Every installed Python package with its version, as `pip freeze` lists them."""
    there: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        there.setdefault(package.metadata["Name"], package.version)  # if there are several, Python imports the first
    return dict(sorted(there.items(), key=lambda package: (package[0] or "").lower()))


def _elsewhere(file: str) -> str | None:
    """The folder that a module comes from, if it is outside this Python environment, as with TORCH=here."""
    folder = Path(file).resolve().parents[1]
    return None if folder.is_relative_to(Path(sys.prefix).resolve()) else str(folder)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    printed = output(*command)
    return printed.splitlines()[0] if printed else None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()
