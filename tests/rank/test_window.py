"""The timed window of a real training: what happens in it besides training, counted operation by operation."""

import builtins
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bare
from lockstep.config import reading, registry
from lockstep.config.row import Row
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.errors import RunFailed
from lockstep.model import models
from lockstep.model.optimizer import make_optimizer, make_schedule
from lockstep.rank import memory, session
from lockstep.rank.clock import Clock
from lockstep.rank.training import Training, set_up
from lockstep.run.progress import Progress
from lockstep.run.training_log import Notes

# What makes the host wait for the device, or reads a value back from it.
SYNCHRONISING = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")

COPIES = ("aten::copy_", "aten::_to_copy")  # between the host and a GPU, unless `non_blocking`
# What waits for a GPU to tell how large its result is; the first of them where they are given a mask.
BY_MASK = ("aten::index", "aten::index_put_", "aten::index_put")
OF_UNKNOWN_SIZE = ("aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive")


class Counting(TorchDispatchMode):
    """Counts, while a clock's window is open, all operations, each that synchronises, and each print."""

    def __init__(self, clock: Clock, patch):
        super().__init__()
        self.noted: list[str] = []
        self.steps, self.operations, self.open = 0, 0, False
        self.watch(clock, patch)

    def watch(self, clock: Clock, patch) -> None:
        opened, ticked, closed, said = clock.open, clock.tick, clock.close, builtins.print

        def open_window(barrier):
            opened(barrier)
            self.open = True

        def close_window():
            self.open = False
            closed()

        def tick():
            self.steps += self.open
            ticked()

        def say(*words, **options):
            self.note("print")
            said(*words, **options)

        patch.setattr(clock, "open", open_window)
        patch.setattr(clock, "close", close_window)
        patch.setattr(clock, "tick", tick)
        patch.setattr(builtins, "print", say)
        for waits in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            patch.setattr(waits, "synchronize", lambda *_: self.note("synchronize"))

    def note(self, what: str) -> None:
        if self.open:
            self.noted.append(what)

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        name = operation.name().split(".")[0]
        self.operations += self.open
        if name in SYNCHRONISING or name.startswith("c10d::"):
            self.note(name)
        on_gpus = any(map(on_gpu, arguments))
        if on_gpus and (name in OF_UNKNOWN_SIZE or (name in BY_MASK and has_mask(arguments[1]))):
            self.note(name)
        keywords = keywords or {}
        result = operation(*arguments, **keywords)
        # `non_blocking` is the last argument of the one, and a keyword of the other.
        waited_for = not (keywords.get("non_blocking") or (arguments and arguments[-1] is True))
        if name in COPIES and waited_for:
            if on_gpus and result.device.type == "cpu":
                self.note(f"{name} to the host")
            elif result.is_cuda and any(map(on_host, arguments)):
                self.note(f"{name} to the GPU")
        return result


def on_gpu(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def on_host(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0  # numbers are no copies


def has_mask(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextlib.contextmanager
def about_to_train(row: Row, data: Path, folder: Path) -> Iterator[Training]:
    """A row of one process, about to train its plan in this process; `folder` has a folder `ranks`."""
    files = {"data": str(data), "plan_file": str(data / "plan" / f"{row.plan_name}.npz")}
    settings = replace(row.settings(), dropout=0, **files)
    threads = torch.get_num_threads()
    torch.set_num_threads(row.hardware.threads)
    strategy = registry.load(row.strategy)(settings)
    strategy.start()
    progress = Progress(folder, ranks=1)
    progress.begin(0)
    yield set_up(strategy, settings, folder, progress)
    torch.set_num_threads(threads)


@pytest.fixture
def training(benchmark, tmp_path) -> Iterator[Training]:
    """`single`, about to train the small benchmark's plan in this process."""
    (tmp_path / "ranks").mkdir()
    row = reading.read([benchmark.path("results/config.yaml")]).rows["single"]
    with about_to_train(row, benchmark.path("results/data"), tmp_path) as training:
        yield training


@pytest.mark.parametrize("log_every", [0, 1])
def test_nothing_in_the_window_synchronises_prints_or_reduces(training, monkeypatch, log_every):
    training.settings = replace(training.settings, train=replace(training.train, log_every=log_every))
    Notes(training.folder, rows=20)
    with Counting(training.clock, monkeypatch) as counting:
        session.Run(training).train()
    assert counting.steps == 9
    assert counting.noted == []
    assert len(Notes(training.folder).new()) == (10 if log_every else 0)


def test_a_step_has_hardly_more_operations_than_a_bare_loop_s(training, monkeypatch):
    """Each operation costs the host the time of a launch; on a GPU small models wait for no more than that."""
    with Counting(training.clock, monkeypatch) as counting:
        session.Run(training).train()
    plan, data = Plan.load(Path(training.settings.plan_file)), Path(training.settings.data)
    model = models.load(data / "weights", 0).train()
    optimizer = make_optimizer(model, training.train)
    schedule = make_schedule(optimizer, training.train, plan.steps)
    clock = Clock()
    with Counting(clock, monkeypatch) as least:
        clock.open(lambda: None)
        bare.train(model, optimizer, schedule, plan, Tokens.load(data / "dataset" / "train"))
        clock.close()
    assert counting.operations / plan.steps < least.operations / plan.steps + 10


@pytest.mark.parametrize("what", ["item", "print"])
def test_the_count_sees_what_it_must(training, monkeypatch, what):
    step = training.strategy.step

    def careless():
        step()
        value = training.strategy.optimizer.param_groups[0]["params"][0].sum()
        if what == "print":
            print("loss")
        else:
            value.item()

    monkeypatch.setattr(training.strategy, "step", careless)
    with Counting(training.clock, monkeypatch) as counting:
        session.Run(training).train()
    assert len(counting.noted) >= 9


def test_known_sleeps_are_measured_to_within_two_percent(training, monkeypatch):
    """A strategy that sleeps in each step for a known time; it evaluates and waits for others for long, untimed."""
    slept, evaluate = [], session.DevSplit.evaluate

    def train(replay):
        replay.begin()
        for step in range(replay.steps):
            began = time.perf_counter()
            time.sleep(0.1)
            slept.append(time.perf_counter() - began)  # on a busy machine a sleep takes longer than was asked for
            replay.schedule.step()
            replay.step_done(step)
        replay.end()

    def slow(self, step):
        time.sleep(0.3)
        evaluate(self, step)

    def wait_for_others(tensor):
        time.sleep(0.2)
        return tensor[None]

    monkeypatch.setattr(training.strategy, "all_gather", wait_for_others)
    monkeypatch.setattr(training.strategy, "train", train)
    monkeypatch.setattr(session.DevSplit, "evaluate", slow)
    session.Run(training).train()
    clock = json.loads((training.folder / "ranks" / "0.json").read_text())["clock"]
    assert clock["train_seconds"] == pytest.approx(sum(slept), rel=0.02)
    assert clock["step_seconds_median"] == pytest.approx(float(np.median(slept[3:])), rel=0.02)
    assert clock["total_seconds"] > sum(slept) + 3 * 0.3
    assert 0 < clock["evaluation_seconds"] < clock["total_seconds"] - sum(slept) - 3 * 0.3
    assert clock["setup"]["check"] + clock["setup"]["warm_up"] > 0.2  # the wait for others before the window opens


def test_a_schedule_that_is_stepped_too_often_ends_the_run(training, monkeypatch):
    """By each rank for all of them, as Accelerate's own schedules are."""
    step = training.strategy.step

    def twice():
        step()
        schedule.step()

    def train(replay):
        nonlocal schedule
        schedule = replay.schedule
        trained(replay)

    schedule, trained = None, training.strategy.train
    monkeypatch.setattr(training.strategy, "step", twice)
    monkeypatch.setattr(training.strategy, "train", train)
    with pytest.raises(RunFailed, match=r"learning rate after 4 steps: the row asks for .* \(schedule: linear\)"):
        session.Run(training).train()


def test_memory_is_that_of_the_window(training, monkeypatch):
    """What was freed before the first step, and what is gathered after the last, is in no peak."""

    def take(megabytes: int) -> None:
        torch.ones(megabytes * 2**18).sum()  # float32, freed at once

    step, state_dict = training.strategy.step, training.strategy.state_dict

    def stepping():
        take(100)
        step()

    def gathering():
        take(900)
        return state_dict()

    monkeypatch.setattr(training.strategy, "step", stepping)
    monkeypatch.setattr(training.strategy, "state_dict", gathering)
    take(900)
    session.Run(training).train()
    memory_mb = json.loads((training.folder / "ranks" / "0.json").read_text())["memory"]
    assert 95 < memory_mb["peak_mb"] - memory_mb["before_mb"] < 500
    assert memory_mb["proportional_mb"] <= memory_mb["peak_mb"]


def test_memory_is_read_where_the_kernel_says_it(tmp_path, monkeypatch):
    """Of the process and its workers together; one that has ended counts for nothing."""
    for process in ("self", "17"):
        (tmp_path / process).mkdir()
        status = "Name:\tpython\nVmPeak:\t 4096 kB\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"
        (tmp_path / process / "status").write_text(status)
        rollup = "00400000-7fff [rollup]\nRss:  1024 kB\nPss:   512 kB\nPss_Anon: 5 kB\n"
        (tmp_path / process / "smaps_rollup").write_text(rollup)
    monkeypatch.setattr(memory, "PROC", Path(tmp_path))
    alone = {"peak_mb": 2.0, "reserved_mb": None, "proportional_mb": 0.5}
    assert memory.read(torch.device("cpu")) == alone
    assert memory.read(torch.device("cpu"), [17, 18]) == alone | {"peak_mb": 4.0, "proportional_mb": 1.0}
