"""The clock, held against times worked out by hand."""

import gc
from dataclasses import asdict

import pytest
import torch

from lockstep.rank.clock import Clock
from lockstep.run import lifetime
from lockstep.run.progress import LAUNCHED


class FakeTime:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch):
    monkeypatch.setenv(LAUNCHED, f"90.0 {lifetime.boot()}")
    return FakeTime()


def test_every_figure_of_a_run(time):
    clock = Clock(time)
    clock.device = torch.device("cpu")
    for name, seconds in (("imports", 2.0), ("model", 3.0)):
        time.now += seconds
        clock.part(name)
    time.now += 1.0
    clock.warmed_up(0.75, [2, 5], accumulation=4)  # a quarter of the third step, which takes 2 s, and of the sixth
    clock.open()
    for seconds in (5.0, 4.0, 2.0, 1.0):
        time.now += seconds
        clock.tick()
    time.now += 0.5  # what the device still had to do
    clock.close()
    time.now += 30.0  # evaluation, and saving: in no figure of training
    clock.evaluation += 20.0
    clock.open()
    for seconds in (1.0, 1.0, 3.0):
        time.now += seconds
        clock.tick()
    clock.close()
    time.now += 7.0  # saving
    assert clock.step_seconds().tolist() == [5, 4, 2, 1, 1, 1, 3]
    assert asdict(clock.reading()) == {
        "setup": {"imports": 12.0, "model": 3.0, "warm_up": 1.0},  # imports count from the launch, at 90
        "warm_up_seconds": 0.75,
        "cold_seconds": 0.0,  # 0.75 - 2 / 4 - 1 / 4
        "first_step_seconds": 21.0,  # 100 + 2 + 3 + 1 + 5 - 90
        "train_seconds": 17.5,
        "stall_seconds": 0.0,
        "step_seconds_median": 1.0,  # of the steps after the third: 1, 1, 1, 3
        "step_seconds_quartiles": [1.0, 1.5],
        "evaluation_seconds": 20.0,
        "total_seconds": 70.5,
        "window": [106.0, 153.5],
    }


def test_the_cold_price_is_what_warming_up_took_beyond_the_same_steps(time):
    clock = Clock(time)
    clock.warmed_up(9.0, [0, 1], accumulation=1)
    clock.open()
    for seconds in (2.0, 3.0):
        time.now += seconds
        clock.tick()
    clock.close()
    assert clock.reading().cold_seconds == 4.0


def test_a_short_run_counts_every_step(time):
    clock = Clock(time)
    clock.open()
    for seconds in (4.0, 2.0, 3.0):
        time.now += seconds
        clock.tick()
    clock.close()
    assert clock.reading().step_seconds_median == 3.0


def test_no_garbage_is_collected_inside_the_window():
    clock = Clock()
    clock.open()
    assert not gc.isenabled()
    clock.close()
    assert gc.isenabled()


def test_without_a_supervisor_the_clock_starts_with_the_process(monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    time = FakeTime()
    assert Clock(time).launched == 100.0


def test_the_clock_of_another_machine_is_not_taken_for_one_s_own(time, monkeypatch):
    """As where horovodrun starts ranks by ssh."""
    assert Clock(time).launched == 90.0
    monkeypatch.setenv(LAUNCHED, "90.0 of-another-boot")
    assert Clock(time).launched == 100.0
