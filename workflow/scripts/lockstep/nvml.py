"""NVML, NVIDIA's library that tells what GPUs are and do: opened, asked and closed here, and nowhere else.

A machine without GPUs, driver or library is no error: it has no GPUs. If a GPU or a driver does not answer a question,
or not for this user, the answer is None.
"""

import atexit
import contextlib
import os
from functools import cache

# NVML's nvmlClocksEventReason: why a GPU's clock is lower than it could be for reasons that no run has in its hands.
THROTTLING = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# The server of NVIDIA's Multi-Process Service is on each GPU that its clients use, and computes nothing of its own.
MPS_SERVER = "nvidia-cuda-mps-server"


@cache
def library():
    """The module pynvml, opened until this process ends; None where there is nothing to open."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # each machine says in its own way that it has no driver, or no library
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml


os.register_at_fork(after_in_child=library.cache_clear)  # a fork must open it again


def ask(question: str, *arguments):
    """What NVML's function of this name returns, or None."""
    if library() is None:
        return None
    try:
        return getattr(library(), question)(*arguments)
    except Exception:  # each GPU, and each driver, answers only some of them
        return None


def count() -> int:
    """How many GPUs the machine has."""
    return ask("nvmlDeviceGetCount") or 0


def gpu(number: int):
    """NVML's handle of the GPU that nvidia-smi shows under this number."""
    return ask("nvmlDeviceGetHandleByIndex", number)


def gpus(numbers: list[int]) -> dict[int, object]:
    """NVML's handles of these GPUs, by the numbers of nvidia-smi; none where the driver does not tell."""
    return {number: handle for number in numbers if (handle := gpu(number)) is not None}


def gpu_of(uuid) -> object:
    """NVML's handle of the GPU that PyTorch knows by this UUID."""
    return ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")


def name(handle) -> str | None:
    answer = ask("nvmlDeviceGetName", handle)
    return None if answer is None else str(answer)


def divided(handle) -> bool:
    """Whether a GPU is in MIG mode, so that processes see its parts instead of it."""
    modes = ask("nvmlDeviceGetMigMode", handle)  # the present one, and the one after the next reset
    return bool(modes) and modes[0] == 1


def numbers(names: list[str]) -> list[int]:
    """The numbers of the GPUs that are named by their UUIDs, or the beginnings of those, as CUDA takes them too."""
    uuids = [str(ask("nvmlDeviceGetUUID", gpu(number))) for number in range(count())]
    return [number for name in names for number, uuid in enumerate(uuids) if name and uuid.startswith(name)]


def processes(handles: dict[int, object]) -> list[dict]:
    """What computes on the GPUs: GPU, process id as the driver has it, name, MiB on that GPU (None: it does not tell).

    Clients of the Multi-Process Service are among them, its server is not. In a container a process id may be the
    host's, or of another container.
    """
    listed = {}
    for number, handle in handles.items():
        for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            for process in ask(question, handle) or ():
                listed[number, process.pid] = process.usedGpuMemory
    return [
        {"gpu": number, "pid": pid, "name": name, "memory_mb": None if used is None else used // 2**20}
        for (number, pid), used in listed.items()
        if (name := process_name(pid)) != MPS_SERVER
    ]


def say(process: dict) -> str:
    """One of `processes` in words."""
    used = "" if process["memory_mb"] is None else f" with {process['memory_mb']} MiB"
    return f"process {process['pid']} ({process['name'] or 'of unknown name'}) on GPU {process['gpu']}{used}"


@cache
def process_name(pid: int) -> str | None:
    """The file name of a process's program, without its path and arguments, which are nobody else's business."""
    name = ask("nvmlSystemGetProcessName", pid)
    if not name:
        import psutil  # here, as set-up asks for GPUs before it has installed anything

        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).name()
    return name.split()[0].rsplit("/", 1)[-1] if name else None


def mps_folder() -> str | None:
    """Where processes that are started here would meet NVIDIA's Multi-Process Service; None where it is not on."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return folder if os.path.exists(os.path.join(folder, "control")) else None


def joules(handle) -> float | None:
    """The energy that a GPU has taken since the driver was loaded."""
    millijoules = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1e3


def state(number: int, handle) -> dict:
    """How a GPU is at this moment: utilisation in percent, clock of its multiprocessors, memory that anybody uses."""
    memory, rates = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
    return {
        "gpu": number,
        "utilisation": None if rates is None else rates.gpu,
        "sm_mhz": ask("nvmlDeviceGetClockInfo", handle, library().NVML_CLOCK_SM),
        "memory_mb": None if memory is None else memory.used // 2**20,
        "celsius": ask("nvmlDeviceGetTemperature", handle, library().NVML_TEMPERATURE_GPU),
        "throttled": [reason for bit, reason in THROTTLING.items() if reasons & bit],
    }


def describe(handle, others: list) -> dict:
    """What a GPU is: driver, memory, ECC, power limit, and how it is linked to each of `others`."""
    memory, ecc = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetEccMode", handle)
    milliwatts = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    # nvmlGpuTopologyLevel_t: 0 same board, 10 one switch, 20 several, 30 host bridge, 40 node, 50 system
    topology = [ask("nvmlDeviceGetTopologyCommonAncestor", handle, other) for other in others]
    return {
        "driver": ask("nvmlSystemGetDriverVersion"),
        "memory_mb": None if memory is None else memory.total // 2**20,
        "ecc": None if ecc is None else bool(ecc[0]),
        "power_limit_watts": None if milliwatts is None else milliwatts / 1000,
        "topology": None if None in topology else topology,
    }
