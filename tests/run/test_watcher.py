"""What is watched beside a run, and when a run counts as disturbed."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from lockstep import nvml
from lockstep.paths import SCRIPTS
from lockstep.run import watcher


def sample(begin: float, others: float = 0.0, **changes) -> dict:
    return {
        "begin": begin,
        "end": begin + 1,
        "others_cores": others,
        "cpu_mhz": 2000 + begin,
        "cpu_celsius": None,
        "gpus": [],
        "others_on_gpus": [],
    } | changes


def test_a_quiet_run():
    verdict = watcher.judge([sample(at, 0.03) for at in range(10)], [2.0, 8.0], cores=2, busy=2)
    assert verdict.disturbed == []
    assert verdict.others_cores == pytest.approx(0.03)
    assert verdict.samples == 6
    assert verdict.cpu_mhz == [2002, 2007]
    assert verdict.cpu_celsius is None


def test_only_what_happens_in_the_window_counts():
    samples = [sample(at, 2.0 if at in (0, 1, 9) else 0.0) for at in range(10)]
    assert watcher.judge(samples, [2.0, 9.0], cores=2, busy=2).disturbed == []
    (reason,) = watcher.judge(samples, [1.5, 3.5], cores=2, busy=2).disturbed
    # Half of one second's sample, in two seconds.
    assert reason == "other processes took 0.50 of the 2 CPU cores that it keeps busy"


def test_others_that_fit_beside_the_run_do_not_disturb_it():
    """A tenth of a core slows what fills both by more than it tells apart, and what fills one not at all."""
    samples = [sample(at, 0.1) for at in range(10)]
    assert watcher.judge(samples, [0.0, 10.0], cores=2, busy=2).disturbed
    assert not watcher.judge(samples, [0.0, 10.0], cores=2, busy=1).disturbed
    assert watcher.judge([sample(at, 1.1) for at in range(10)], [0.0, 10.0], cores=2, busy=1).disturbed
    # More threads than there are cores: it keeps no more busy than there are.
    assert not watcher.judge([sample(at, 0.03) for at in range(10)], [0.0, 10.0], cores=2, busy=6).disturbed


def gpu(number: int, **changes) -> dict:
    idle = {"gpu": number, "utilisation": 90, "sm_mhz": 1200, "memory_mb": 700, "celsius": 60, "throttled": []}
    return idle | changes


def test_others_on_a_gpu_and_a_throttled_one():
    others = [{"gpu": 1, "pid": 77, "name": "python", "memory_mb": 512}]
    others += [{"gpu": 1, "pid": 78, "name": None, "memory_mb": None}]
    gpus = [gpu(1, celsius=91, throttled=["power brake"])]
    samples = [sample(0, gpus=gpus, others_on_gpus=others), sample(1, gpus=gpus, others_on_gpus=others[:1])]
    verdict = watcher.judge(samples, [0.0, 2.0], cores=64, busy=4)
    assert verdict.disturbed == [
        "other processes were on its GPUs: process 77 (python) on GPU 1 with 512 MiB,"
        " process 78 (of unknown name) on GPU 1",
        "GPU 1 was throttled (power brake)",
    ]
    assert (verdict.gpu_mhz, verdict.gpu_celsius) == ([1200, 1200], [91, 91])
    before = watcher.judge([*samples, *[sample(at, gpus=[gpu(1)]) for at in (2, 3)]], [2.0, 4.0], cores=64, busy=4)
    assert before.disturbed == []


def test_each_gpu_is_told_of_over_the_window():
    samples = [
        sample(0, gpus=[gpu(2, utilisation=0, sm_mhz=300, memory_mb=9000), gpu(5)]),
        sample(1, gpus=[gpu(2, utilisation=100, sm_mhz=1000), gpu(5, utilisation=None)]),
        sample(2, gpus=[gpu(2, utilisation=70, sm_mhz=1900, memory_mb=800), gpu(5, sm_mhz=None, memory_mb=None)]),
    ]
    first, second = watcher.judge(samples, [1.0, 2.5], cores=64, busy=4).gpus
    assert (first.gpu, first.memory_mb, first.sm_mhz_range) == (2, 800, [1000, 1900])
    # Half of the last second lies inside.
    assert first.utilisation == pytest.approx(90)
    assert first.sm_mhz == pytest.approx(1300)
    assert (second.gpu, second.utilisation, second.sm_mhz, second.memory_mb) == (5, 90, 1200, 700)


@pytest.fixture
def on_gpus(monkeypatch):
    """What NVML says of the processes on GPU 0 and 1: lists to put them into."""
    listed = {0: [], 1: []}

    def running(gpu):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed[gpu]]

    def no_mps(gpu):
        raise OSError("not supported")

    answers = {"nvmlDeviceGetComputeRunningProcesses": running, "nvmlDeviceGetMPSComputeRunningProcesses": no_mps}
    answers |= {"nvmlDeviceGetHandleByIndex": lambda number: number}
    answers |= {"nvmlSystemGetProcessName": lambda pid: "/usr/bin/python"}
    library = SimpleNamespace(**answers)
    monkeypatch.setattr(nvml, "library", lambda: library)
    return listed


@pytest.fixture
def run_and_other():
    """Two processes that are no relatives: the first stands for a run."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as run, subprocess.Popen(sleep) as other:
        yield psutil.Process(run.pid), other.pid
        run.kill()
        other.kill()


def test_a_process_that_is_not_the_run_s_is_known_by_the_tree(on_gpus, run_and_other):
    run, other = run_and_other
    gpus = nvml.gpus([0, 1])
    others = watcher.OtherProcesses([run], [])
    assert others.on(gpus) == []
    on_gpus[0] += [(run.pid, 2**30), (other, None)]
    on_gpus[1] += [(run.pid, 2**30)]
    assert [(process["gpu"], process["pid"], process["memory_mb"]) for process in others.on(gpus)] == [(0, other, None)]
    assert others.on(nvml.gpus([1])) == []  # on a GPU that the run does not use


def test_what_was_on_a_gpu_before_the_run_is_anothers_by_any_process_id(on_gpus, run_and_other):
    """In a container the driver may have the host's: only what was there before is known not to be the run's."""
    run, _ = run_and_other
    nobody = max(psutil.pids()) + 10_000_000
    on_gpus[0] += [(nobody, 0), (nobody + 1, 0)]
    there = watcher.OtherProcesses([run], [nobody]).on(nvml.gpus([0]))
    assert [process["pid"] for process in there] == [nobody]


def test_a_process_of_the_run_that_has_just_ended_is_none_of_somebody_else(on_gpus):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        others = watcher.OtherProcesses([psutil.Process()], [])
        on_gpus[0].append((child.pid, 0))
        assert others.on(nvml.gpus([0])) == []
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as its parent has not asked yet
        assert others.on(nvml.gpus([0])) == []


def test_the_server_of_mps_does_not_count_and_its_clients_do(on_gpus, monkeypatch):
    library = nvml.library()
    names = {11: "/usr/bin/nvidia-cuda-mps-server", 12: "/home/anna/python train.py --token secret"}
    monkeypatch.setattr(library, "nvmlSystemGetProcessName", names.get)
    clients = [SimpleNamespace(pid=12, usedGpuMemory=5 * 2**20)]
    monkeypatch.setattr(library, "nvmlDeviceGetMPSComputeRunningProcesses", lambda gpu: clients, raising=False)
    nvml.process_name.cache_clear()
    on_gpus[0].append((11, 0))
    assert nvml.processes(nvml.gpus([0])) == [{"gpu": 0, "pid": 12, "name": "python", "memory_mb": 5}]
    nvml.process_name.cache_clear()


def test_what_nobody_watched_does_not_count_as_undisturbed():
    """Unless it is so short that the watcher may not have begun."""
    judged = watcher.judge([], [0.0, 4.0], cores=2, busy=2)
    assert (judged.samples, judged.others_cores, judged.disturbed, judged.cpu_mhz) == (0, 0, [], None)
    for watched, reasons in ((0, ["0"]), (9, ["9"]), (11, [])):
        samples = [sample(at) for at in range(watched)]
        told = [f"the machine was watched for {seconds} of 20 s only" for seconds in reasons]
        assert watcher.judge(samples, [0.0, 20.0], cores=2, busy=2).disturbed == told


RUN = """
import sys, time
from pathlib import Path
from lockstep import nvml
from lockstep.paths import SCRIPTS
from lockstep.run import watcher
folder, end = Path(sys.argv[1]), time.time() + 60
with watcher.beside(folder):
    while len(watcher.read(folder)) < 3 and time.time() < end: pass
"""


def test_the_watcher_tells_another_process_from_the_run(tmp_path):
    """A process that computes beside the run is seen; the run's own work is not counted against it."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], env=environment, check=True, timeout=120)
        finally:
            other.kill()
    samples = watcher.read(tmp_path)
    assert len(samples) >= 3
    seconds = sum(reading["end"] - reading["begin"] for reading in samples)
    run, others = (
        sum(reading[kind] * (reading["end"] - reading["begin"]) for reading in samples) / seconds
        for kind in ("run_cores", "others_cores")
    )
    assert run > 0.1
    assert others > 0.3
    assert run + others < 1.2 * psutil.cpu_count()  # on a busy machine a sample alone may be off: it is not one moment


def test_a_watcher_that_gets_no_time_does_not_hold_up_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "LAST_SAMPLE", 0.2)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with watcher.beside(tmp_path):
        (process,) = (child for child in psutil.Process().children() if child.pid not in before)
        process.suspend()
    assert not psutil.pid_exists(process.pid)


def test_it_ends_with_the_block(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with watcher.beside(tmp_path):
        (process,) = (child for child in psutil.Process().children() if child.pid not in before)
        time.sleep(0.5)
        assert process.nice() == 19
    assert not psutil.pid_exists(process.pid)
