"""Watching, from a process of low priority beside a timed run, whether anything else uses the machine.

    python -m lockstep.run.watcher FOLDER GPUS OTHERS BY_HAND   (started by `beside`, with lists in JSON)

It samples the process that started it, those that run ranks by hand, and GPUs, until it is ended. Each second's sample
is a line of watch.jsonl: what processes other than the run's used of the CPUs, which of them are on the run's GPUs, and
how busy, fast, hot and full those are. `judge` then says whether a run was disturbed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from lockstep import nvml
from lockstep.errors import no_room
from lockstep.paths import SCRIPTS, WATCH

INTERVAL = 1.0  # seconds
LAST_SAMPLE = 10.0  # seconds for it, on a machine so busy that a process of low priority gets nothing
# What others may take of the cores that a run keeps busy (hardware.busy_cores). Of the other cores they may take all.
OTHERS_ALLOWED = 0.02


@contextlib.contextmanager
def beside(folder: Path, gpus: list[int] = (), others: list[int] = (), by_hand: list[int] = ()):
    """Watch while the block runs, on these GPUs (by the numbers of nvidia-smi), where these processes already were.

    by_hand: processes of the run that somebody else started, and not this one.
    """
    from lockstep.run import lifetime
    from lockstep.run.processes import signals_wait

    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-m", "lockstep.run.watcher", str(folder), *map(json.dumps, (gpus, others, by_hand))]
    process = None
    try:
        with signals_wait():
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=lifetime.die_with_parent
            )
        yield
    finally:
        if process:
            process.terminate()  # it writes what it has of the last second, and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_SAMPLE)
            process.kill()
            process.wait()


def main(folder: Path, numbers: list[int], known_others: list[int], by_hand: list[int]) -> None:
    # It waits for SIGTERM rather than handle it: a handler may come while the main thread holds the lock of the event
    # that it would set, and both wait for ever.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for its parent, which then ends it
    os.nice(19)
    own = _there([os.getppid(), *by_hand])
    gpus, others = nvml.gpus(numbers), OtherProcesses(own, known_others)
    used = dict.fromkeys(own, 0.0)  # by each, up to its end
    before = _now(used)
    ended = None
    with (folder / WATCH).open("w", encoding="utf-8") as stream:
        while not ended:
            ended = signal.sigtimedwait([signal.SIGTERM], INTERVAL)
            now = _now(used)
            (began, busy_before, run_before), (end, busy_now, run_now) = before, now
            run_seconds = run_now - run_before
            others_seconds = (busy_now - busy_before) - run_seconds
            sample = {
                "begin": began,
                "end": end,
                "run_cores": run_seconds / (end - began),
                "others_cores": max(0.0, others_seconds / (end - began)),
                "cpu_mhz": _cpu_mhz(),
                "cpu_celsius": _cpu_celsius(),
                "gpus": [nvml.state(number, handle) for number, handle in gpus.items()],
                "others_on_gpus": others.on(gpus),
            }
            try:
                print(json.dumps(sample), file=stream, flush=True)
            except OSError as error:
                if no_room(error):
                    os._exit(1)  # the run will say so; what is in the stream can't be written when it is closed either
                raise
            before = now


def _now(used: dict[psutil.Process, float]) -> tuple[float, float, float]:
    """The time, and the CPU seconds that anything on this machine, and that the run has used up to now.

    To walk through the run's processes takes this one, of low priority, up to half a second on a busy machine. So it
    is done first: the time and what all have used are of one moment.
    """
    run = _sum_used(used)
    return time.perf_counter(), _busy(), run


def _busy() -> float:
    """CPU seconds that anything used on this machine since it started, those stolen by a hypervisor included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def _there(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def _below(roots: list[psutil.Process]) -> list[psutil.Process]:
    """Processes, and all that they have started."""
    found = list(roots)
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += root.children(recursive=True)
    return found


def _sum_used(used: dict[psutil.Process, float]) -> float:
    """CPU seconds that some processes and all below them used; `used` remembers those of each that has ended."""
    for root, before in used.items():
        used[root] = max(before, _used_by(root))
    return sum(used.values())


def _used_by(root: psutil.Process) -> float:
    """CPU seconds that a process and all below it used, those below that have ended included; 0 once it has itself."""
    total = 0.0
    for process in _below([root]):
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


class OtherProcesses:
    """Tells the processes of others on a run's GPUs from the run's own.

    `known_others` were there before the run began. Of those who came later, the run's own are below one of
    `own`; where the driver has other process ids than this program (a container's are not the host's), none here
    has that id, and nothing is claimed of it.
    """

    def __init__(self, own: list[psutil.Process], known_others: list[int]):
        self.own, self.known_others, self.ours = own, set(known_others), set()

    def on(self, gpus: dict) -> list[dict]:
        """The others that are on the GPUs now, as nvml.processes has them."""
        there = nvml.processes(gpus)
        if not there:
            return []
        # Those that have ended are kept in mind: the driver may list a process for a moment longer.
        self.ours |= {process.pid for process in _below(self.own)}
        return [process for process in there if self._is_other(process["pid"])]

    def _is_other(self, pid: int) -> bool:
        return pid in self.known_others or (pid not in self.ours and psutil.pid_exists(pid))


def read(folder: Path) -> list[dict]:
    """The samples in a run's folder; a last line that was cut off is left out."""
    file = folder / WATCH
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
    if processes := _other_processes(inside):
        reasons.append(f"others were on its GPUs: {', '.join(processes)}")
    gpus = _by_gpu(inside, weights)
    reasons += [f"GPU {gpu['gpu']} was throttled ({', '.join(gpu['throttled'])})" for gpu in gpus if gpu["throttled"]]
    return {
        "samples": len(inside),
        "others_cores": others,
        "cpu_mhz": _range(sample["cpu_mhz"] for sample in inside),
        "cpu_celsius": _range(sample["cpu_celsius"] for sample in inside),
        "gpu_mhz": _range(gpu["sm_mhz"] for sample in inside for gpu in sample["gpus"]),
        "gpu_celsius": _range(gpu["celsius"] for sample in inside for gpu in sample["gpus"]),
        "gpus": gpus,
        "disturbed": reasons,
    }


def _other_processes(samples: list[dict]) -> list[str]:
    """Each process of somebody else on each of the GPUs, once, as it was seen first."""
    seen = {}
    for process in (process for sample in samples for process in sample.get("others_on_gpus", ())):
        seen.setdefault((process["gpu"], process["pid"]), nvml.say(process))
    return list(seen.values())


def _by_gpu(samples: list[dict], weights: list[float]) -> list[dict]:
    """What was seen of each GPU: means over time, by the samples' weights, and the ends of what varies."""
    seen: dict[int, list[tuple[float, dict]]] = {}
    for weight, sample in zip(weights, samples, strict=True):
        for gpu in sample["gpus"]:
            seen.setdefault(gpu["gpu"], []).append((weight, gpu))
    return [
        {
            "gpu": number,
            "utilisation": _mean((weight, gpu["utilisation"]) for weight, gpu in readings),
            "sm_mhz": _mean((weight, gpu["sm_mhz"]) for weight, gpu in readings),
            "sm_mhz_range": _range(gpu["sm_mhz"] for _, gpu in readings),
            "memory_mb": max((gpu["memory_mb"] for _, gpu in readings if gpu["memory_mb"] is not None), default=None),
            "throttled": sorted({reason for _, gpu in readings for reason in gpu["throttled"]}),
        }
        for number, readings in sorted(seen.items())
    ]


def _mean(weighed) -> float | None:
    measured = [(weight, value) for weight, value in weighed if value is not None]
    total = sum(weight for weight, _ in measured)
    return sum(weight * value for weight, value in measured) / total if total else None


def _range(values) -> list[float] | None:
    measured = [value for value in values if value is not None]
    return [min(measured), max(measured)] if measured else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))
