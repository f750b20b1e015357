"""NVML of pretended GPUs.

LOCKSTEP_PRETENDED_PROCESSES names a file with the processes that compute on them, as lists of GPU, process id and MiB.
LOCKSTEP_PRETENDED_KINDS has their names in the order of the bus, if they are not all of one kind.
"""

import json
import os
from types import SimpleNamespace

NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
MEMORY = 8 * 2**30


class NVMLError(Exception):
    pass


opened_by = None  # the process that called nvmlInit


def nvmlInit():
    global opened_by
    if os.environ.get("LOCKSTEP_PRETENDED_AMD"):
        raise NVMLError("no NVIDIA driver")
    opened_by = os.getpid()


def _require_open():
    """A fork of a process that has opened NVML must open it again."""
    if opened_by != os.getpid():
        raise NVMLError("uninitialised")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    _require_open()
    return int(os.environ["LOCKSTEP_PRETENDED_GPUS"])


def nvmlDeviceGetHandleByIndex(number):
    _require_open()
    return number


def nvmlDeviceGetName(gpu):
    kinds = os.environ.get("LOCKSTEP_PRETENDED_KINDS")
    return kinds.split(",")[gpu] if kinds else "Pretended GPU"


def nvmlDeviceGetHandleByUUID(uuid):
    return int(uuid.rsplit("-", 1)[1])


def nvmlSystemGetDriverVersion():
    return "0.0 (pretended)"


def nvmlDeviceGetMemoryInfo(gpu):
    return SimpleNamespace(total=MEMORY, used=0, free=MEMORY)


def nvmlDeviceGetComputeRunningProcesses(gpu):
    file = os.environ.get("LOCKSTEP_PRETENDED_PROCESSES")
    if not file or not os.path.exists(file):
        return []
    with open(file, encoding="utf-8") as stream:
        listed = json.load(stream)
    return [SimpleNamespace(pid=pid, usedGpuMemory=used * 2**20) for on, pid, used in listed if on == gpu]


def nvmlDeviceGetUtilizationRates(gpu):
    return SimpleNamespace(gpu=50 + gpu, memory=10)


def nvmlDeviceGetClockInfo(gpu, kind):
    return 1000


def nvmlDeviceGetTemperature(gpu, kind):
    return 40


def nvmlDeviceGetCurrentClocksEventReasons(gpu):
    return 0


def nvmlDeviceGetEnforcedPowerLimit(gpu):
    return 100_000


def nvmlDeviceGetTopologyCommonAncestor(gpu, other):
    return 0


def __getattr__(name):
    """Every other function of NVML: a pretended GPU does not support it."""
    if name.startswith("nvml"):

        def refuse(*arguments):
            raise NVMLError(f"{name}: not supported")

        return refuse
    raise AttributeError(name)
