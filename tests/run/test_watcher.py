"""What is watched beside a run, and when a run counts as disturbed."""

import os
import subprocess
import sys
import time

import psutil
import pytest

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
        "gpu_strangers": 0,
    } | changes


def test_a_quiet_run():
    verdict = watcher.judge([sample(at, 0.03) for at in range(10)], [2.0, 8.0], cores=2, busy=2)
    assert verdict["disturbed"] == []
    assert verdict["others_cores"] == pytest.approx(0.03)
    assert verdict["samples"] == 6
    assert verdict["cpu_mhz"] == [2002, 2007]
    assert verdict["cpu_celsius"] is None


def test_only_what_happens_in_the_window_counts():
    samples = [sample(at, 2.0 if at in (0, 1, 9) else 0.0) for at in range(10)]
    assert watcher.judge(samples, [2.0, 9.0], cores=2, busy=2)["disturbed"] == []
    (reason,) = watcher.judge(samples, [1.5, 3.5], cores=2, busy=2)["disturbed"]
    # Half of one second's sample, in two seconds.
    assert reason == "other processes took 0.50 of the 2 CPU cores that it keeps busy"


def test_others_that_fit_beside_the_run_do_not_disturb_it():
    """A tenth of a core slows what fills both by more than it tells apart, and what fills one not at all."""
    samples = [sample(at, 0.1) for at in range(10)]
    assert watcher.judge(samples, [0.0, 10.0], cores=2, busy=2)["disturbed"]
    assert not watcher.judge(samples, [0.0, 10.0], cores=2, busy=1)["disturbed"]
    assert watcher.judge([sample(at, 1.1) for at in range(10)], [0.0, 10.0], cores=2, busy=1)["disturbed"]
    # More threads than there are cores: it keeps no more busy than there are.
    assert not watcher.judge([sample(at, 0.03) for at in range(10)], [0.0, 10.0], cores=2, busy=6)["disturbed"]


def test_others_on_a_gpu_and_a_throttled_one():
    gpu = {"sm_mhz": 1200, "celsius": 91, "throttled": True}
    verdict = watcher.judge([sample(0, gpus=[gpu], gpu_strangers=2)], [0.0, 1.0], cores=64, busy=4)
    assert verdict["disturbed"] == ["2 other processes were on the GPUs", "a GPU was throttled"]
    assert (verdict["gpu_mhz"], verdict["gpu_celsius"]) == ([1200, 1200], [91, 91])


def test_without_samples_nothing_is_claimed():
    judged = watcher.judge([], [0.0, 5.0], cores=2, busy=2)
    assert (judged["samples"], judged["others_cores"], judged["disturbed"], judged["cpu_mhz"]) == (0, 0, [], None)


RUN = """
import sys, time
from pathlib import Path
from lockstep.paths import SCRIPTS
from lockstep.run import watcher
folder, end = Path(sys.argv[1]), time.time() + 60
with watcher.beside(folder):
    while len(watcher.read(folder)) < 3 and time.time() < end: pass
"""


def test_the_watcher_tells_a_stranger_from_the_run(tmp_path):
    """A process that computes beside the run is seen; the run's own work is not counted against it."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as stranger:
        subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], env=environment, check=True)
        stranger.kill()
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


def test_it_ends_with_the_block(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with watcher.beside(tmp_path):
        (process,) = (child for child in psutil.Process().children() if child.pid not in before)
        time.sleep(0.5)
        assert process.nice() == 19
    assert not psutil.pid_exists(process.pid)
