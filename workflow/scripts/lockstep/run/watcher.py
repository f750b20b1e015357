"""A process of low priority beside a timed run, which watches whether anything else uses the machine.

    python -m lockstep.run.watcher FOLDER GPUS OTHERS BY_HAND   (started by `beside`, with lists in JSON)

It samples the process that started it, the processes that run ranks by hand, and GPUs, until it is ended. Each second
it writes a line to watch.jsonl: how much of the CPUs processes other than the run's used, which of them are on the
run's GPUs, and the utilisation, clock, temperature and memory of those GPUs. `judge` then decides whether a run was
disturbed.
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
LAST_SAMPLE = 10.0  # seconds to wait for the last sample, on a machine too busy for a process of low priority
# The share of the cores that a run keeps busy (hardware.busy_cores) that others may use; they may use all other cores.
OTHERS_ALLOWED = 0.02
# The share of a run's timed window that must have been watched, if that is longer than the watcher takes to start.
WATCHED, STARTING = 0.5, 5.0


@contextlib.contextmanager
def beside(folder: Path, gpus: list[int] = (), others: list[int] = (), by_hand: list[int] = ()):
    """Watch these GPUs (by nvidia-smi's numbers) and the CPUs while the block runs.

    others: the ids of other processes that were already on the GPUs.
    by_hand: the ids of processes of the run that were started by somebody else, not by this process.
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
            process.terminate()  # it writes the sample of the last second, and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_SAMPLE)
            process.kill()
            process.wait()


def main(folder: Path, numbers: list[int], known_others: list[int], by_hand: list[int]) -> None:
    # It waits for SIGTERM rather than handling it: a handler might run while the main thread holds the lock of the
    # event that the handler sets, and both would wait forever.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for its parent, which then ends it
    os.nice(19)
    own = _there([os.getppid(), *by_hand])
    gpus, others = nvml.gpus(numbers), OtherProcesses(own, known_others)
    used = dict.fromkeys(own, 0.0)  # the CPU seconds of each, until its end
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
                    os._exit(1)  # the run reports that; closing the stream would fail too
                raise
            before = now


def _now(used: dict[psutil.Process, float]) -> tuple[float, float, float]:
    """The time, the CPU seconds used by the whole machine until now, and those used by the run.

    On a busy machine this process, of low priority, needs up to half a second to go through the run's processes. So
    that comes first, and the time and the machine's total are of one moment.
    """
    run = _sum_used(used)
    return time.perf_counter(), _busy(), run


def _busy() -> float:
    """The CPU seconds that were used on this machine since it started, including those stolen by a hypervisor."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def _there(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def _below(roots: list[psutil.Process]) -> list[psutil.Process]:
    """Processes, and all their descendants."""
    found = list(roots)
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += root.children(recursive=True)
    return found


def _sum_used(used: dict[psutil.Process, float]) -> float:
    """The CPU seconds of processes and their descendants; `used` keeps those of each process that has ended."""
    for root, before in used.items():
        used[root] = max(before, _used_by(root))
    return sum(used.values())


def _used_by(root: psutil.Process) -> float:
    """The CPU seconds of a process and its descendants, including ended ones; 0 after its own end."""
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
    """Distinguishes other processes on a run's GPUs from the run's own.

    `known_others` were there before the run began. Of later ones, the run's own are `own` and their descendants. The
    driver may use other process ids than this program, as in a container; then no process here has such an id, and it
    counts neither way.
    """

    def __init__(self, own: list[psutil.Process], known_others: list[int]):
        self.own, self.known_others, self.ours = own, set(known_others), set()

    def on(self, gpus: dict) -> list[dict]:
        """The other processes that are on the GPUs now, as nvml.processes describes them."""
        there = nvml.processes(gpus)
        if not there:
            return []
        # Ended processes are remembered, because the driver may list a process for a moment longer.
        self.ours |= {process.pid for process in _below(self.own)}
        return [process for process in there if self._is_other(process["pid"])]

    def _is_other(self, pid: int) -> bool:
        return pid in self.known_others or (pid not in self.ours and psutil.pid_exists(pid))


def read(folder: Path) -> list[dict]:
    """The samples in a run's folder, without a last line that was cut off."""
    file = folder / WATCH
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def judge(samples: list[dict], window: list[float], cores: int, busy: int) -> "Watch":  # noqa: F821
    """What the samples say about the period `window`, [begin, end] (perf_counter, seconds).

    The run keeps `busy` of the machine's `cores` busy (hardware.busy_cores); other processes may use the rest without
    disturbing it. `disturbed` lists why the run's times can't be trusted; it is empty if they can.
    """
    from lockstep.run.record import Watch  # imported here, as the process that watches does not need it

    inside = [sample for sample in samples if sample["end"] > window[0] and sample["begin"] < window[1]]
    # A sample is weighted by the seconds of it that lie inside.
    weights = [min(sample["end"], window[1]) - max(sample["begin"], window[0]) for sample in inside]
    watched, seconds = sum(weights), window[1] - window[0]
    others = sum(w * sample["others_cores"] for w, sample in zip(weights, inside, strict=True)) / (watched or 1)
    wanted = min(busy, cores)
    taken = max(0.0, others - (cores - wanted))
    reasons = []
    if seconds > STARTING and watched < WATCHED * seconds:  # its watcher ended, or never began
        reasons.append(f"the machine was watched for {watched:.0f} of {seconds:.0f} s only")
    if taken > OTHERS_ALLOWED * wanted:
        reasons.append(f"other processes took {taken:.2f} of the {wanted} CPU cores that it keeps busy")
    if processes := _other_processes(inside):
        reasons.append(f"other processes were on its GPUs: {', '.join(processes)}")
    gpus = _by_gpu(inside, weights)
    reasons += [f"GPU {gpu.gpu} was throttled ({', '.join(gpu.throttled)})" for gpu in gpus if gpu.throttled]
    return Watch(
        samples=len(inside),
        others_cores=others,
        cpu_mhz=_range(sample["cpu_mhz"] for sample in inside),
        cpu_celsius=_range(sample["cpu_celsius"] for sample in inside),
        gpu_mhz=_range(gpu["sm_mhz"] for sample in inside for gpu in sample["gpus"]),
        gpu_celsius=_range(gpu["celsius"] for sample in inside for gpu in sample["gpus"]),
        gpus=gpus,
        disturbed=reasons,
    )


def _other_processes(samples: list[dict]) -> list[str]:
    """Each other process on each of the GPUs, once, as it was first seen."""
    seen = {}
    for process in (process for sample in samples for process in sample.get("others_on_gpus", ())):
        seen.setdefault((process["gpu"], process["pid"]), nvml.say(process))
    return list(seen.values())


def _by_gpu(samples: list[dict], weights: list[float]) -> list["Gpu"]:  # noqa: F821
    """What was measured on each GPU: weighted means over time, and ranges of what varies."""
    from lockstep.run.record import Gpu

    seen: dict[int, list[tuple[float, dict]]] = {}
    for weight, sample in zip(weights, samples, strict=True):
        for gpu in sample["gpus"]:
            seen.setdefault(gpu["gpu"], []).append((weight, gpu))
    return [
        Gpu(
            gpu=number,
            utilisation=_mean((weight, gpu["utilisation"]) for weight, gpu in readings),
            sm_mhz=_mean((weight, gpu["sm_mhz"]) for weight, gpu in readings),
            sm_mhz_range=_range(gpu["sm_mhz"] for _, gpu in readings),
            memory_mb=max((gpu["memory_mb"] for _, gpu in readings if gpu["memory_mb"] is not None), default=None),
            throttled=sorted({reason for _, gpu in readings for reason in gpu["throttled"]}),
        )
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
