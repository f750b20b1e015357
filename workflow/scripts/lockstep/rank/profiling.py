"""Where a step's time goes: a separate run, not timed, in which torch.profiler records some steps.

The first steps warm up, the next are timed without the profiler, and then the same ones are recorded. After that, each
rank trains the same shares again (if it drives several devices, those of the first one) on a plain model that does not
communicate. The row's own steps take longer by the communication that computing does not hide, which is thus found in a
second way. There is no such comparison if several ranks hold one replica together, as one device then does only a part
of the work, or if a GPU's memory can't take the plain model, too.
"""

import gzip
import itertools
import json
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep import paths
from lockstep.files import write_json
from lockstep.model import lora, models
from lockstep.rank.replay import Replay
from lockstep.rank.training import Training, set_up
from lockstep.run.progress import WARMUP_STEPS
from lockstep.strategies import single

PHASES = ("data", "forward", "backward", "optimizer")
MARK = "lockstep:"
# Ranges that only wait: the profiler's names for torch.distributed's collectives, and the name that strategies use.
COMMUNICATION = ("gloo:", "nccl:", "nccl", "communication")
COMPUTE = "aten::"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # what launches kernels; Triton launches its own by functions of the driver

Interval = tuple[float, float]


class Profiler:
    """Records the last `steps` steps of a run, with a mark where each part of a step begins."""

    def __init__(self, training: Training, total: int, steps: int):
        self.training, self.steps, self.begin = training, steps, total - steps
        activities = [ProfilerActivity.CPU]
        if training.strategy.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        module = training.strategy.module
        module.register_forward_pre_hook(lambda *_: self.mark("forward"))
        module.register_forward_hook(lambda *_: self.mark("backward"))
        register_optimizer_step_pre_hook(lambda *_: self.mark("optimizer"))

    @staticmethod
    def mark(phase: str) -> None:
        with record_function(MARK + phase):
            pass

    def step_done(self, step: int) -> None:
        if step + 1 == self.begin:
            self.training.clock.synchronize()
            self.profile.start()
        last = step + 1 == self.begin + self.steps
        if last:
            self.training.clock.synchronize()  # before the mark, because a GPU lags behind the host
        if step + 1 >= self.begin:
            self.mark("step")
        if last:
            self.profile.stop()

    def write(self, replay: Replay, keep_trace: bool) -> None:
        """Write profile.json: the numbers of each rank, and their mean. Call on every rank."""
        own = replay.training.clock.step_seconds()[WARMUP_STEPS : self.begin]
        world = self.training.strategy.world
        alone = _alone_if_it_fits(replay) if world.replicas == world.size else None
        file = paths.rank_trace(self.training.folder, world.rank)
        self.profile.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        if keep_trace and world.rank == 0:
            with gzip.open(self.training.folder / paths.TRACE, "wt", encoding="utf-8") as stream:
                stream.write(file.read_text(encoding="utf-8"))
        file.unlink()
        numbers = split(trace) | {"step_seconds": float(np.mean(own))}
        if alone is not None:
            alone = alone[WARMUP_STEPS : self.begin]
            numbers["alone_step_seconds"] = float(np.mean(alone))
            numbers["exposed_by_difference"] = float(np.median(own - alone))
        values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=world.device)
        ranks = [dict(zip(numbers, line, strict=True)) for line in self.training.strategy.all_gather(values).tolist()]
        if world.rank == 0:
            mean = {name: float(np.mean([rank[name] for rank in ranks])) for name in numbers}
            parts = {name: mean.pop(name) for name in (*PHASES, "communication", "idle")}
            file = self.training.folder / paths.PROFILE
            mean = dict.fromkeys(("alone_step_seconds", "exposed_by_difference")) | mean
            write_json(file, {"steps": self.steps, "seconds": parts} | mean | {"ranks": ranks})


def _alone_if_it_fits(replay: Replay) -> np.ndarray | None:
    """What `_alone` returns, or None on all ranks if one of them has not enough memory for it. Call on every rank."""
    strategy = replay.training.strategy
    try:
        seconds = _alone(replay)
    except torch.OutOfMemoryError:
        seconds = None
    fits = torch.tensor([float(seconds is not None)], device=strategy.world.device)
    return seconds if strategy.all_gather(fits).all() else None


def _alone(replay: Replay) -> np.ndarray:
    """The seconds of each step when one device trains its shares on a plain model, without waiting for any other."""
    training = replay.training
    settings = replace(training.settings, hardware=replace(training.settings.hardware, processes=1))
    plain = single.Strategy(settings)
    plain.world = replace(training.strategy.world, size=1)
    part, of = training.strategy.share()
    devices = settings.hardware.devices // training.strategy.world.size  # the number that this rank drives
    plain.share = lambda: (part * devices, of * devices)
    silent = SimpleNamespace(step=training.progress.alive, alive=training.progress.alive)
    alone = set_up(plain, settings, training.folder, silent, workers=training.workers)
    model = models.load(Path(settings.data) / paths.WEIGHTS, settings.dropout).train()
    if settings.train.activation_checkpointing:
        models.checkpoint_activations(model)
    alone.wrap(lora.put_into(model, settings.train).train())
    plain.train(Replay(alone, replay.plan, replay.samples, replay.dev_split))
    return alone.clock.step_seconds()


def split(trace: list[dict]) -> dict[str, float]:
    """The seconds of a step by phase, from the events of a Chrome trace (ts and dur in microseconds).

    A moment counts towards the phase that is computing; if none is, towards communication if any is under way; and
    otherwise as idle (Python, launches, waiting). On a GPU, kernels compute, and each counts towards the phase in which
    it was launched.
    """
    complete = [event for event in trace if event.get("ph") == "X"]
    marks = sorted(
        (event["ts"], event["name"].removeprefix(MARK))
        for event in complete
        if event["name"].startswith(MARK) and event.get("cat") != "gpu_user_annotation"
    )
    steps = [at for at, name in marks if name == "step"]
    begin, end = steps[0], steps[-1]
    kernels = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        launched = {event["args"]["correlation"]: event["ts"] for event in complete if event.get("cat") in LAUNCHES}
        work = [(event, launched.get(event["args"].get("correlation"), event["ts"])) for event in kernels]
        busy = [(event, at) for event, at in work if not event["name"].startswith(COMMUNICATION)]
        talking = [event for event, _ in work if event["name"].startswith(COMMUNICATION)]
    else:
        busy = [(event, None) for event in complete if event["name"].startswith(COMPUTE)]
        talking = [event for event in complete if event["name"].startswith(COMMUNICATION)]
    parts: dict[str, list[Interval]] = {phase: [] for phase in PHASES}
    for event, launch in busy:
        for phase, interval in _by_phase(event, launch, marks):
            parts[phase].append(interval)
    # NumPy makes the batches, and they are copied, so everything else in this part of a step counts as data too.
    spans = [(at, until) for (at, name), (until, _) in itertools.pairwise(marks) if name == "data"]
    taken: list[Interval] = []
    seconds = dict.fromkeys((*PHASES, "communication"), 0.0)
    for name, intervals in (*parts.items(), ("communication", map(_interval, talking)), ("data", spans)):
        inside = [(max(a, begin), min(b, end)) for a, b in intervals if b > begin and a < end]
        before = _length(taken)
        taken = _union(taken + inside)
        seconds[name] += (_length(taken) - before) / 1e6 / (len(steps) - 1)
    total = (end - begin) / 1e6 / (len(steps) - 1)
    return seconds | {"idle": total - sum(seconds.values())}


def _interval(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _by_phase(event: dict, launch: float | None, marks: list[tuple[float, str]]):
    """The event's interval under the phase that launched it; without a launch, cut where another phase begins."""
    begin, end = _interval(event)
    times = [at for at, _ in marks]
    if launch is not None:
        yield _phase(marks, bisect_right(times, launch)), (begin, end)
        return
    at = bisect_right(times, begin)
    while begin < end:
        until = min(end, times[at]) if at < len(times) else end
        yield _phase(marks, at), (begin, until)
        begin, at = until, at + 1


def _phase(marks: list[tuple[float, str]], at: int) -> str:
    """The phase that began with the mark before position `at`; between two steps, that is the optimizer's."""
    name = marks[at - 1][1] if at else "step"
    return "optimizer" if name == "step" else name


def _union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
