"""The only interface to NVML, NVIDIA's library for properties and states of GPUs.

A machine without GPUs, driver or library is not an error; it has no GPUs. If a GPU or driver does not answer a query,
or not for this user, the result is None.
"""

import atexit
import contextlib
import os
from functools import cache

# Values of NVML's nvmlClocksEventReason: causes of a lower clock that no run can influence.
THROTTLING = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# The server of NVIDIA's Multi-Process Service runs on each GPU that its clients use, and computes nothing itself.
MPS_SERVER = "nvidia-cuda-mps-server"


@cache
def library():
    """The module pynvml, initialised until this process ends; None if it is unavailable."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # errors about a missing driver or library vary between machines
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml


os.register_at_fork(after_in_child=library.cache_clear)  # a fork must initialise it again


def ask(question: str, *arguments):
    """Call NVML's function `question`, and return its result, or None if it fails."""
    if library() is None:
        return None
    try:
        return getattr(library(), question)(*arguments)
    except Exception:  # not every GPU and driver supports every query
        return None


def count() -> int:
    """The number of GPUs of this machine."""
    return ask("nvmlDeviceGetCount") or 0


def gpu(number: int):
    """NVML's handle of the GPU with this number in nvidia-smi."""
    return ask("nvmlDeviceGetHandleByIndex", number)


def gpus(numbers: list[int]) -> dict[int, object]:
    """NVML's handles of these GPUs by their numbers in nvidia-smi, without GPUs that have no handle."""
    return {number: handle for number in numbers if (handle := gpu(number)) is not None}


def gpu_of(uuid) -> object:
    """NVML's handle of the GPU with this UUID in PyTorch."""
    return ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")


def name(handle) -> str | None:
    answer = ask("nvmlDeviceGetName", handle)
    return None if answer is None else str(answer)


def divided(handle) -> bool:
    """Whether a GPU is in MIG mode, so that processes see parts of it only."""
    modes = ask("nvmlDeviceGetMigMode", handle)  # the current mode, and the mode after the next reset
    return bool(modes) and modes[0] == 1


def numbers(names: list[str]) -> list[int]:
    """The numbers of GPUs that are named by their UUIDs or prefixes of them, which CUDA accepts, too."""
    uuids = [str(ask("nvmlDeviceGetUUID", gpu(number))) for number in range(count())]
    return [number for name in names for number, uuid in enumerate(uuids) if name and uuid.startswith(name)]


def processes(handles: dict[int, object]) -> list[dict]:
    """The processes that compute on the GPUs: GPU, process id by the driver, name, and MiB on that GPU, or None.

    Clients of the Multi-Process Service are included, its server is not. In a container, a process id may be that of
    the host, or of another container.
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
    """One of `processes` as a text."""
    used = "" if process["memory_mb"] is None else f" with {process['memory_mb']} MiB"
    return f"process {process['pid']} ({process['name'] or 'of unknown name'}) on GPU {process['gpu']}{used}"


@cache
def process_name(pid: int) -> str | None:
    """The file name of a process's program, without its path and arguments, which may be private."""
    name = ask("nvmlSystemGetProcessName", pid)
    if not name:
        import psutil  # imported here, as set-up uses this module before it has installed anything

        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).name()
    return name.split()[0].rsplit("/", 1)[-1] if name else None


def mps_folder() -> str | None:
    """The folder of NVIDIA's Multi-Process Service for processes that start here; None if it is not running."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return folder if os.path.exists(os.path.join(folder, "control")) else None


def joules(handle) -> float | None:
    """The energy that a GPU has used since its driver was loaded."""
    millijoules = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1e3


def state(number: int, handle) -> dict:
    """A GPU's current state: utilisation in percent, clock of its multiprocessors, memory used by all processes."""
    memory, rates = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # drivers before 535 have the earlier name only
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    return {
        "gpu": number,
        "utilisation": None if rates is None else rates.gpu,
        "sm_mhz": ask("nvmlDeviceGetClockInfo", handle, library().NVML_CLOCK_SM),
        "memory_mb": None if memory is None else memory.used // 2**20,
        "celsius": ask("nvmlDeviceGetTemperature", handle, library().NVML_TEMPERATURE_GPU),
        "throttled": [reason for bit, reason in THROTTLING.items() if reasons & bit],
    }


def describe(handle, others: list) -> dict:
    """A GPU's properties: driver, memory, ECC, power limit, and its link to each of `others`."""
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
