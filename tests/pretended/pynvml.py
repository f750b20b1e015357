"""NVML of pretended GPUs."""

import os
from types import SimpleNamespace

NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
MEMORY = 8 * 2**30


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return int(os.environ["LOCKSTEP_PRETENDED_GPUS"])


def nvmlDeviceGetHandleByIndex(number):
    return number


def nvmlDeviceGetName(gpu):
    return "Pretended GPU"


def nvmlDeviceGetHandleByUUID(uuid):
    return int(uuid.rsplit("-", 1)[1])


def nvmlSystemGetDriverVersion():
    return "0.0 (pretended)"


def nvmlDeviceGetMemoryInfo(gpu):
    return SimpleNamespace(total=MEMORY, used=0, free=MEMORY)


def nvmlDeviceGetComputeRunningProcesses(gpu):
    return []


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
    """Whatever else there is, such a device does not have."""
    if name.startswith("nvml"):

        def refuse(*arguments):
            raise NVMLError(f"{name}: not supported")

        return refuse
    raise AttributeError(name)
