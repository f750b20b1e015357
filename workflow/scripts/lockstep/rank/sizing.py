"""How much GPU memory a rank of a row needs: a few steps of its real strategy, on pretended GPUs that compute nothing.

The process counts memory only (workflow/pretended/sizes.h), and is one rank alone: its collectives return at once, as
if all ranks did the same. So it takes seconds, whatever the size of the model and the number of ranks.
"""

import mmap
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.files import read_json, write_json
from lockstep.model import models
from lockstep.rank.session import Session, Variation
from lockstep.rank.training import set_up

FIRST = 3  # steps of the first size: the optimizer makes its state in one, DDP its final buckets before the next


class SizedSession(Session):
    """A session whose only run is a `Sized` one."""

    def runs(self):
        yield Sized(set_up(self.strategy, self.settings, self.folder, self.progress, self.clock, self.files))


class Sized(Variation):
    """One step for each of several sizes of the global batch, with a model and samples that have sizes only."""

    def _initial(self):
        self.start = {}
        return untrained(Path(self.training.settings.data) / paths.WEIGHTS, self.training.settings.dropout)

    def refuse_too_large(self, model: torch.nn.Module) -> None:
        """Do nothing: the search tries sizes that are too large on purpose."""

    def _work(self):
        asked = read_json(self.training.folder / paths.SIZES)
        sizes = [asked["sizes"][0]] * (FIRST - 1) + asked["sizes"]
        config = read_json(Path(self.training.settings.data) / paths.WEIGHTS / "config.json")
        samples = self.training.task.alike(max(sizes), asked["length"], config)
        plan = Plan(
            ids=np.concatenate([np.arange(size) for size in sizes]),
            starts=np.concatenate([[0], np.cumsum(sizes)]),
            widths=np.full(len(sizes), asked["length"]),
            epochs=np.zeros(len(sizes), dtype=np.int64),
            dropped=np.empty((0, 2), dtype=np.int64),
        )
        return plan, samples, samples

    def _watch(self):
        self.training.profiler = Peaks(self.training.folder / paths.PEAKS, self.plan, self.start["parameters"])

    def finish(self):
        pass


class Peaks:
    """Takes the place of a profiler, and writes after each step the most memory that it has needed."""

    def __init__(self, file: Path, plan: Plan, parameters: int):
        self.file, self.plan, self.parameters = file, plan, parameters
        self.rows: list[dict] = []

    def mark(self, phase: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        gpus = range(torch.cuda.device_count())
        row = {"samples": int(self.plan.starts[step + 1] - self.plan.starts[step])}
        row["allocated"] = max(map(torch.cuda.max_memory_allocated, gpus))
        row["reserved"] = max(map(torch.cuda.max_memory_reserved, gpus))
        if step >= FIRST - 1:
            self.rows.append(row)
            write_json(self.file, {"parameters": self.parameters, "steps": self.rows})
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)


def untrained(folder: Path, dropout: float | None) -> torch.nn.Module:
    """The model of a folder's configuration, whose parameters are zero, in pages that are mapped when they are written.

    So a large model needs no memory of the host; and strategies that look at what a model computes, as `cp` does, find
    numbers and not what other tensors left behind. Buffers are as they must be: position numbers and the like are read.
    """
    with init_empty_weights(include_buffers=False):
        model = models.build(folder, dropout)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                pages = mmap.mmap(-1, parameter.nbytes or parameter.element_size())  # a parameter may be empty
                zeros = torch.frombuffer(pages, dtype=parameter.dtype)[: parameter.numel()]
                module._parameters[name] = torch.nn.Parameter(zeros.view(parameter.shape), parameter.requires_grad)
    if hasattr(model, "tie_weights"):  # they were parted on the device "meta"
        model.tie_weights()
    return model
