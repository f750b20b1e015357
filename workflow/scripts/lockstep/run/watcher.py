"""Watching, from a process of low priority beside a timed run, whether anything else uses the machine.

    python -m lockstep.run.watcher FOLDER   (started by `beside`; samples the process that started it until it is ended)

Each second's sample is a line of watch.jsonl: what processes other than the run's used of the CPUs, what others have
on the GPUs, clocks, temperature, throttling. `judge` then says whether a run was disturbed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from lockstep.paths import SCRIPTS

INTERVAL = 1.0  # seconds
# What others may take of the cores that a run keeps busy (hardware.busy_cores). Of the other cores they may take all.
OTHERS_ALLOWED = 0.02
# NVML's nvmlClocksEventReason: hardware slowdown, software and hardware thermal slowdown, hardware power brake.
THROTTLING = 0x8 | 0x20 | 0x40 | 0x80
FILE = "watch.jsonl"


@contextlib.contextmanager
def beside(folder: Path):
    """Watch while the block runs."""
    from lockstep.run.processes import die_with_parent

    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-m", "lockstep.run.watcher", str(folder)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        process.terminate()  # it writes what it has of the last second, and ends
        process.wait()


def main(folder: Path) -> None:
    os.nice(19)
    own = psutil.Process(os.getppid())
    gpus = _gpus()
    strangers = _on_gpus(gpus)
    before, began = (_busy(), _used_by(own)), time.perf_counter()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for its parent, which then ends it
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        while not ended.is_set():
            ended.wait(INTERVAL)
            now, at = (_busy(), _used_by(own)), time.perf_counter()
            run_seconds = now[1] - before[1]
            others = (now[0] - before[0]) - run_seconds
            sample = {
                "begin": began,
                "end": at,
                "run_cores": run_seconds / (at - began),
                "others_cores": max(0.0, others / (at - began)),
                "cpu_mhz": _cpu_mhz(),
                "cpu_celsius": _cpu_celsius(),
                "gpus": [_state(gpu) for gpu in gpus],
                "gpu_strangers": len(strangers & _on_gpus(gpus)),
            }
            print(json.dumps(sample), file=stream, flush=True)
            before, began = now, at


def _busy() -> float:
    """CPU seconds that anything used on this machine since it started, those stolen by a hypervisor included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def _used_by(root: psutil.Process) -> float:
    """CPU seconds that a process and all below it used, those that have ended included."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _cpu_mhz() -> float | None:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return frequency.current if frequency else None


def _cpu_celsius() -> float | None:
    temperatures = [entry.current for entries in psutil.sensors_temperatures().values() for entry in entries]
    return max(temperatures) if temperatures else None


def _gpus() -> list:
    with contextlib.suppress(Exception):  # no driver, no library: there is no GPU to watch
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    return []


def _on_gpus(gpus: list) -> set[int]:
    """Process ids as the driver has them, which in a container are the host's: to compare, not to look up."""
    with contextlib.suppress(Exception):  # some drivers do not tell
        import pynvml

        return {process.pid for gpu in gpus for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    return set()


def _state(gpu) -> dict:
    import pynvml

    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "throttled": bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & THROTTLING),
    }


def read(folder: Path) -> list[dict]:
    """The samples in a run's folder; a last line that was cut off is left out."""
    file = folder / FILE
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def judge(samples: list[dict], window: list[float], cores: int, busy: int) -> dict:
    """What the samples say of the time between the two moments of `window` (perf_counter, seconds).

    The run keeps `busy` of the machine's `cores` busy (hardware.busy_cores): others that fit beside it take nothing
    away. `disturbed` lists why the run's times can't be trusted; empty if they can.
    """
    inside = [sample for sample in samples if sample["end"] > window[0] and sample["begin"] < window[1]]
    # A sample counts by how much of it lies inside.
    weights = [min(sample["end"], window[1]) - max(sample["begin"], window[0]) for sample in inside]
    others = sum(w * sample["others_cores"] for w, sample in zip(weights, inside, strict=True)) / (sum(weights) or 1)
    wanted = min(busy, cores)
    taken = max(0.0, others - (cores - wanted))
    reasons = []
    if taken > OTHERS_ALLOWED * wanted:
        reasons.append(f"other processes took {taken:.2f} of the {wanted} CPU cores that it keeps busy")
    if strangers := max((sample["gpu_strangers"] for sample in inside), default=0):
        reasons.append(f"{strangers} other processes were on the GPUs")
    if any(gpu["throttled"] for sample in inside for gpu in sample["gpus"]):
        reasons.append("a GPU was throttled")
    return {
        "samples": len(inside),
        "others_cores": others,
        "cpu_mhz": _range(sample["cpu_mhz"] for sample in inside),
        "cpu_celsius": _range(sample["cpu_celsius"] for sample in inside),
        "gpu_mhz": _range(gpu["sm_mhz"] for sample in inside for gpu in sample["gpus"]),
        "gpu_celsius": _range(gpu["celsius"] for sample in inside for gpu in sample["gpus"]),
        "disturbed": reasons,
    }


def _range(values) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
