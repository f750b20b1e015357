"""Energy is what the devices that train have counted, all of it and once; else it is not told (rank/energy.py)."""

from pathlib import Path

import pytest
import torch

from lockstep import nvml
from lockstep.files import write_json
from lockstep.rank import energy, resumption

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Machine:
    """A machine whose packages' counters, in microjoules, and whose time are set by hand."""

    def __init__(self, folder: Path):
        self.folder, self.time = folder, 0.0

    def count(self, microjoules: int, zone: str = "intel-rapl:0", name: str = "package-0", wrap: int = 10**10) -> None:
        (self.folder / zone).mkdir(exist_ok=True)
        for file, content in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", wrap)):
            (self.folder / zone / file).write_text(f"{content}\n")

    def meter(self, device: torch.device = CPU) -> energy.Meter:
        return energy.Meter(device, self.folder, lambda: self.time)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_it_is_summed_over_windows_and_counters_begin_anew(machine):
    machine.count(9_999_000_000)
    meter = machine.meter()
    meter.start()
    machine.count(1_500_000)
    meter.stop()
    machine.count(5_000_000)  # evaluation
    meter.start()
    machine.count(5_250_000)
    meter.stop()
    assert meter.joules["cpu"] == pytest.approx(2.75)
    assert meter.counters == ["intel-rapl:0 (RAPL)"]


def test_it_is_not_guessed(machine):
    meter = machine.meter()
    meter.start()
    meter.stop()
    assert meter.joules == {"gpu": None, "cpu": None}
    assert meter.counters == []


def test_the_platform_counts_its_packages_once_more_and_a_package_its_parts(machine):
    """Laptops, and servers since Sapphire Rapids, have the platform beside the packages."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "psys"}
    zones["intel-rapl:10"] = "package-9"
    for zone, name in zones.items():
        machine.count(0, zone, name)
    meter = machine.meter()
    meter.start()
    for zone, name in zones.items():
        machine.count(1_000_000, zone, name)
    meter.stop()
    assert meter.joules["cpu"] == 2
    assert meter.counters == ["intel-rapl:0 (RAPL)", "intel-rapl:10 (RAPL)"]


def test_a_counter_that_wraps_several_times_in_a_window_is_read_between(machine):
    """An AMD package at 400 W, whose counter wraps each 164 s, in a window of ten minutes with steps of 5 s."""
    wrap, watts = 65_532_610_987, 400
    machine.count(0, wrap=wrap)
    meter = machine.meter()
    meter.start()
    while machine.time < 600:
        machine.time += 5
        machine.count(int(machine.time * watts * 10**6) % wrap, wrap=wrap)
        meter.look()
    meter.stop()
    assert meter.joules["cpu"] == pytest.approx(600 * watts)


def test_a_counter_that_may_have_wrapped_unseen_tells_nothing(machine):
    machine.count(0, wrap=65_532_610_987)
    meter = machine.meter()
    meter.start()
    machine.time += 100  # one step
    machine.count(1_000_000, wrap=65_532_610_987)
    meter.look()
    meter.stop()
    assert meter.joules["cpu"] is None
    assert meter.counters == []


def test_a_part_is_not_told_as_the_whole(machine):
    machine.count(0)
    meter = machine.meter()
    meter.start()
    machine.count(1_000_000)
    meter.stop()
    (machine.folder / "intel-rapl:0" / "energy_uj").unlink()  # it can't be read any more
    meter.start()
    meter.stop()
    machine.count(3_000_000)
    meter.start()
    machine.count(4_000_000)
    meter.stop()
    assert meter.joules["cpu"] is None


def test_a_row_on_a_cpu_does_not_count_gpus_that_idle_beside_it(machine, monkeypatch):
    monkeypatch.setattr(energy, "gpu_handles", lambda: ["a GPU"])
    counted = iter([10.0, 35.0])
    monkeypatch.setattr(nvml, "joules", lambda handle: next(counted))
    meters = machine.meter(CPU), machine.meter(GPU)
    for meter in meters:
        meter.start()
        meter.stop()
    assert [meter.joules["gpu"] for meter in meters] == [None, 25.0]


@pytest.mark.parametrize(
    ("saved", "taken_over"),
    [
        ([{"gpu": 5.0, "cpu": None}], {"gpu": 5.0, "cpu": None}),
        ([{"gpu": 5.0, "cpu": 1.0}, {}, {"gpu": 7.0, "cpu": 2.0}, {}], {"gpu": 12.0, "cpu": 3.0}),  # two machines
        ([{"gpu": 5.0, "cpu": 1.0}, {"gpu": None, "cpu": 2.0}], {"gpu": None, "cpu": 3.0}),
    ],
)
def test_a_resumed_run_takes_over_what_all_machines_had_counted(tmp_path, saved, taken_over):
    for rank, joules in enumerate(saved):
        write_json(tmp_path / f"rank-{rank}.json", {"joules": joules})
    assert resumption.joules_until(tmp_path) == taken_over
