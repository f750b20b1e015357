"""Where a step's time goes, from traces whose split is worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.config import reading
from lockstep.config.hardware import World
from lockstep.rank import profiling
from lockstep.rank.profiling import split
from lockstep.strategies import single


def event(name: str, begin: float, end: float, category: str = "cpu_op", correlation: int | None = None) -> dict:
    """Times in milliseconds; a trace has microseconds."""
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": begin * 1e3, "dur": (end - begin) * 1e3, "args": arguments}


def mark(phase: str, at: float) -> dict:
    return event(f"lockstep:{phase}", at, at, "user_annotation")


MARKS = [mark("step", 0), mark("data", 1), mark("forward", 3), mark("backward", 10), mark("optimizer", 30)]


def test_a_step_on_a_cpu():
    trace = [
        *MARKS,
        mark("step", 40),
        event("aten::linear", 3, 9),
        event("aten::addmm", 4, 8),  # inside the other
        event("aten::mm", 9.5, 22),  # half a millisecond of forward, then backward
        event("gloo:all_reduce", 15, 28),  # 22 to 28 is not hidden
        event("aten::_fused_adamw_", 31, 38),
        event("aten::mm", 41, 50),  # of the next step, which is not recorded to its end
        {"ph": "M", "name": "process_name"},
    ]
    seconds_by_part = split(trace)
    assert {name: round(1000 * seconds, 6) for name, seconds in seconds_by_part.items()} == {
        "data": 2.0,
        "forward": 6.5,
        "backward": 12.0,
        "optimizer": 7.0,
        "communication": 6.0,
        "idle": 6.5,
    }
    assert sum(seconds_by_part.values()) == pytest.approx(0.040)


def test_on_a_gpu_a_kernel_counts_for_the_part_that_launched_it():
    trace = [
        *MARKS,
        mark("step", 60),
        event("cudaLaunchKernel", 4, 4.1, "cuda_runtime", 1),
        event("cuLaunchKernel", 11, 11.1, "cuda_driver", 2),
        event("cuLaunchKernelEx", 12, 12.1, "cuda_driver", 3),
        event("cudaLaunchKernel", 31, 31.1, "cuda_runtime", 4),
        event("aten::linear", 3, 9),  # the host's time does not count
        event("gemm", 5, 15, "kernel", 1),
        event("gemm", 15, 35, "kernel", 2),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 45, "kernel", 3),  # 35 to 45 is not hidden
        event("multi_tensor_apply_kernel", 45, 50, "kernel", 4),
    ]
    milliseconds = {name: round(1000 * seconds, 6) for name, seconds in split(trace).items()}
    assert milliseconds == {
        "data": 2.0,
        "forward": 10.0,
        "backward": 20.0,
        "optimizer": 5.0,
        "communication": 10.0,
        "idle": 13.0,
    }


def test_several_steps_are_averaged():
    trace = [*MARKS, mark("step", 40), mark("forward", 45), mark("step", 60), event("aten::mm", 45, 55)]
    assert split(trace)["forward"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("here", "elsewhere", "compared"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_model_that_one_gpu_can_t_hold_is_compared_with_none(monkeypatch, here, elsewhere, compared):
    """All ranks must agree, as their numbers are gathered; GPUs may differ."""

    def alone(replay):
        if not here:
            raise torch.OutOfMemoryError("as on a GPU")
        return np.array([0.1, 0.2])

    def all_gather(values):
        return torch.stack([values, torch.tensor([float(elsewhere)])])

    monkeypatch.setattr(profiling, "_alone", alone)
    strategy = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")), all_gather=all_gather)
    found = profiling._alone_if_it_fits(SimpleNamespace(training=SimpleNamespace(strategy=strategy)))
    assert (found is not None) == compared


class Everything(single.Strategy):
    def share(self):
        return 0, 1


@pytest.mark.parametrize(
    ("kind", "world_size", "trains"),
    [
        (Everything, 2, (0, 1)),  # each rank the whole of each batch, as published_deepspeed
        (single.Strategy, 2, (1, 2)),
        (single.Strategy, 1, (0, 2)),  # one process for two devices
    ],
)
def test_alone_a_rank_trains_the_share_that_it_has_in_the_row(monkeypatch, tmp_path, kind, world_size, trains):
    asked = {"strategy": "ddp", "device": "cpu", "processes": 2, "oversubscribe": True}
    settings = replace(reading.parse({"rows": {"x": asked}}).rows["x"].settings(), data=str(tmp_path))
    row = kind(settings)
    row.world = World(world_size - 1, 0, world_size, torch.device("cpu"), "gloo")
    silent = SimpleNamespace(alive=None)
    training = SimpleNamespace(strategy=row, settings=settings, folder=tmp_path, progress=silent, workers=None)
    shares, clock = [], SimpleNamespace(step_seconds=list)
    monkeypatch.setattr(profiling, "set_up", lambda *_, **__: SimpleNamespace(wrap=lambda model: None, clock=clock))
    monkeypatch.setattr(profiling, "Replay", lambda *_: None)
    monkeypatch.setattr(profiling.models, "load", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(
        single.Strategy, "train", lambda plain, replay: shares.append((plain.share(), plain.world.size))
    )
    profiling._alone(SimpleNamespace(training=training, plan=None, samples=None, dev_split=None))
    assert shares == [(trains, 1)]  # in a world of its own, where nothing is asked to be synchronised
