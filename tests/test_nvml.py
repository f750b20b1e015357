"""NVML: a machine without GPUs, driver or library is a case, and so is a GPU that does not answer a question."""

import importlib
import re
import shutil
import sys
from types import ModuleType

import pytest

from lockstep import nvml
from lockstep.config import machine
from lockstep.paths import SCRIPTS
from lockstep.run import watcher
from tests.conftest import PROJECT


@pytest.fixture
def installed(monkeypatch):
    """Puts a module, or None, into the place of pynvml."""

    def install(module) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        nvml.library.cache_clear()

    yield install
    nvml.library.cache_clear()


@pytest.fixture
def two_gpus(installed, monkeypatch, tmp_path):
    """The pretended NVML of workflow/pretended, of two GPUs; returns its module."""
    shutil.copy2(PROJECT / "workflow" / "pretended" / "pynvml.py", tmp_path / "pretended_pynvml.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCKSTEP_PRETENDED_GPUS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "built_for_gpus", lambda: True)
    monkeypatch.delitem(sys.modules, "pretended_pynvml", raising=False)
    module = importlib.import_module("pretended_pynvml")
    installed(module)
    return module


def test_without_the_library_there_are_no_gpus(installed):
    installed(None)  # as Python has it where there is no such module
    assert (nvml.library(), nvml.count(), nvml.gpu(0), nvml.name(None)) == (None, 0, None, None)
    assert (nvml.gpus([0]), nvml.processes({0: None})) == ({}, [])


def test_without_a_driver_there_are_no_gpus(installed, monkeypatch):
    library = ModuleType("pynvml")

    def fail():
        raise RuntimeError("NVML: Driver Not Loaded")

    library.nvmlInit = fail
    installed(library)
    monkeypatch.setattr(machine, "built_for_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (nvml.library(), machine.visible_gpus(), machine.gpu_kinds([0])) == (None, 0, [])


def test_what_a_gpu_is_and_does(two_gpus):
    assert (machine.visible_gpus(), machine.gpu_kinds([0, 1])) == (2, ["Pretended GPU"])
    gpus = [nvml.gpu(number) for number in range(nvml.count())]
    about = {"driver": "0.0 (pretended)", "memory_mb": 8192, "power_limit_watts": 100.0, "topology": [0, 0]}
    assert nvml.describe(gpus[0], gpus) == about | {"ecc": None}  # which such a device does not tell
    seen = {"utilisation": 51, "sm_mhz": 1000, "memory_mb": 0, "celsius": 40, "throttled": []}
    assert nvml.state(1, gpus[1]) == {"gpu": 1} | seen
    assert nvml.joules(gpus[0]) is None


def test_throttling_is_told(two_gpus, monkeypatch):
    hot = "software thermal slowdown", "hardware thermal slowdown"
    for reasons, throttled in ((0x1, []), (0x20, [hot[0]]), (0x40 | 0x20 | 0x1, [*hot])):  # 0x1: it is idle
        monkeypatch.setattr(two_gpus, "nvmlDeviceGetCurrentClocksEventReasons", lambda gpu, reasons=reasons: reasons)
        assert nvml.state(0, 0)["throttled"] == throttled


def test_throttling_is_told_by_an_older_driver(two_gpus, monkeypatch):
    def absent(gpu):
        raise RuntimeError("NVML: Function Not Found")

    monkeypatch.setattr(two_gpus, "nvmlDeviceGetCurrentClocksEventReasons", absent)
    monkeypatch.setattr(two_gpus, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: 0x40, raising=False)
    assert nvml.state(0, 0)["throttled"] == ["hardware thermal slowdown"]


def test_a_gpu_that_does_not_tell_its_temperature_is_watched_all_the_same(two_gpus, monkeypatch):
    def refuse(*arguments):
        raise two_gpus.NVMLError("Not Supported")

    for question in ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"):
        monkeypatch.setattr(two_gpus, question, refuse)
    told = nvml.state(0, 0)
    assert (told["sm_mhz"], told["celsius"], told["throttled"]) == (1000, None, [])
    sample = {"begin": 0.0, "end": 1.0, "others_cores": 0.0, "cpu_mhz": None, "cpu_celsius": None}
    judged = watcher.judge([sample | {"gpus": [told], "others_on_gpus": []}], [0.0, 1.0], cores=2, busy=1)
    assert (judged.gpu_mhz, judged.gpu_celsius, judged.disturbed) == ([1000, 1000], None, [])


def test_it_is_opened_once(two_gpus, monkeypatch):
    opened, open_it = [], two_gpus.nvmlInit
    monkeypatch.setattr(two_gpus, "nvmlInit", lambda: (opened.append(True), open_it()))
    assert [nvml.count(), nvml.count(), nvml.name(0)] == [2, 2, "Pretended GPU"]
    assert opened == [True]


def test_nothing_else_asks_the_library():
    files = SCRIPTS.rglob("*.py")
    asking = [file.name for file in files if re.search(r"pynvml(?!\.py)", file.read_text(encoding="utf-8"))]
    assert asking == ["nvml.py"]
