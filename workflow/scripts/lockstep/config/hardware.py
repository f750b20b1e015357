"""What this machine offers, found without importing torch, so that the Snakefile can ask too."""

import importlib.util
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadInput

# Environment variables that change speed or numbers. A list of what is kept, so that no secret can slip in.
VARIABLES = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "LD_PRELOAD",
]


@dataclass(frozen=True)
class Hardware:
    """What one row runs on, with every `auto` resolved.

    `devices` is how many train: GPUs, or on a CPU shares of its cores of `threads` threads each. `processes` is how
    many ranks there are for them: one for each, unless the strategy drives all from one (strategies/__init__.py).
    """

    device: str
    devices: int
    processes: int
    gpus: list[int] | None  # by the numbers of nvidia-smi, one for each device; None: the first that are visible
    threads: int
    nodes: int
    backend: str
    port: int | str
    timeout: float
    oversubscribe: bool


def busy_cores(hardware: dict) -> int:
    """How many cores of a machine a run on `hardware` (a Hardware as a dict) keeps busy.

    On a GPU each process has one thread that launches kernels, whatever it may use besides.
    """
    return hardware["processes"] * (hardware["threads"] if hardware["device"] == "cpu" else 1)


@dataclass(frozen=True)
class World:
    """This process's place among those that train together, as its strategy's `start` found it."""

    rank: int
    local_rank: int
    size: int
    device: "torch.device"  # noqa: F821 - named only; this module does not import torch
    backend: str | None


def cpu_cores() -> int:
    """Cores this process may use: its affinity, and its control group's quota where one is set (as in Docker)."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")  # Linux cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def visible_gpus() -> int:
    """NVIDIA GPUs that a process started here would see; 0 where PyTorch is installed without CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1"):
        return 0
    if not built_for_gpus():
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # no driver, no library: each machine says it in its own way, and all mean "no GPU"
        return 0
    return min(count, len(chosen.split(","))) if chosen else count


def gpu_numbers() -> list[int]:
    """The numbers of the visible GPUs, as CUDA_VISIBLE_DEVICES has them."""
    chosen = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    numbers = [int(part) for part in chosen if part.isdigit()]
    return numbers if len(numbers) == len(chosen) else list(range(visible_gpus()))


def gpu_kinds(numbers: list[int]) -> list[str]:
    """The names of these GPUs, each once; none where the driver does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return sorted({str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(number))) for number in numbers})
    except Exception:  # as in visible_gpus
        return []


def selection(gpus: list[int] | None) -> dict[str, str]:
    """The environment variables that leave a process these GPUs only; none where it keeps what it has."""
    if gpus is None:
        return {}
    # CUDA's own order puts the fastest first, nvidia-smi's goes by the bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def built_for_gpus() -> bool:
    """Whether the installed PyTorch has CUDA, without importing it; True where none is, as beside containers."""
    torch = importlib.util.find_spec("torch")
    if not torch:
        return True
    version = (Path(torch.origin).parent / "version.py").read_text()
    return not re.search(r"^cuda.*= None$", version, re.MULTILINE)


def resolve(asked, row: str = "") -> Hardware:
    """Replace every `auto` in the configuration's `hardware` section by what this machine has.

    Raises BadInput where more is asked for than there is.
    """
    where = f"rows.{row}" if row else "hardware"
    cores, gpus = cpu_cores(), visible_gpus()
    device = ("cuda" if gpus else "cpu") if asked.device == "auto" else asked.device
    if device == "cuda" and not gpus:
        raise BadInput(
            f"{where}.device: cuda is asked for, but no GPU can be used here (no NVIDIA GPU or driver is visible, or"
            " PyTorch is its CPU build). Set it to cpu or auto, or install the CUDA build of PyTorch."
        )
    if asked.gpus is not None:
        if device == "cpu":
            raise BadInput(f"{where}.gpus: {asked.gpus} are asked for, and this runs on the CPU. Set device to cuda.")
        there = gpu_numbers()
        if gone := sorted(set(asked.gpus) - set(there)):
            names = ", ".join(map(str, there))
            raise BadInput(f"{where}.gpus: {gone} can't be used here, where the GPUs are {names}. Choose among those.")
        gpus = len(asked.gpus)
    chosen = None if asked.gpus is None else sorted(asked.gpus)
    most, kind = (gpus, "GPUs") if device == "cuda" else (cores, "CPU cores")
    devices = (gpus if device == "cuda" else min(2, cores)) if asked.processes == "auto" else asked.processes
    if devices > most and not (device == "cpu" and asked.oversubscribe):
        raise BadInput(f"{where}.processes: {devices}, but there are {most} {kind} here. Ask for at most {most}.")
    if device == "cuda" and not asked.mixed_gpus:
        kinds = gpu_kinds((chosen or gpu_numbers())[:devices])
        if len(kinds) > 1:
            raise BadInput(
                f"{where}.gpus: GPUs of unlike kinds would train together ({', '.join(kinds)}), and the slowest would"
                " set the pace. Choose like ones by their numbers, or set mixed_gpus: true."
            )
    threads = max(1, cores // devices) if asked.threads in ("auto", "all") else asked.threads
    if devices * threads > cores and not asked.oversubscribe:
        raise BadInput(
            f"{where}.threads: {devices} processes of {threads} threads need more than the {cores} CPU cores here."
            f" Ask for at most {max(1, cores // devices)}."
        )
    backend = {"cuda": "nccl", "cpu": "gloo"}[device] if asked.backend == "auto" else asked.backend
    if backend == "nccl" and device == "cpu":
        raise BadInput(
            f"{where}.backend: nccl works between GPUs only, and this runs on the CPU. Set it to gloo or auto."
        )
    return Hardware(
        device=device,
        devices=devices,
        processes=devices,
        gpus=chosen[:devices] if chosen else None,
        threads=threads,
        nodes=asked.nodes,
        backend=backend,
        port=asked.port,
        timeout=asked.timeout,
        oversubscribe=asked.oversubscribe,
    )


def free_port(wanted: int | str) -> int:
    """`wanted` if it is a number and nobody listens there, else a free port of the system's choice."""
    for candidate in (wanted, 0) if wanted != "auto" else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                print(f"port {candidate} is in use; another is taken", file=sys.stderr)
                continue
            return probe.getsockname()[1]
    raise BadInput("hardware.port: no free TCP port on this machine.")
