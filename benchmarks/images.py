"""Loops over images of MNIST's size, by BasicNet: a bare one over the plan, Trainer as documented, Lockstep's own."""

import struct
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.common import PROJECT
from benchmarks.loops import BareLoop, Planned, PlannedLoop, TrainerLoop
from lockstep import paths
from lockstep.config import reading
from lockstep.data.images import Images
from lockstep.model.optimizer import make_schedule

COUNT = 4000
CONFIGS = ("config/config.yaml", "config/mnist.yaml")
ROW = reading.read(
    [PROJECT / name for name in CONFIGS], ["train.eval_every=0", "train.checkpoint=last", "hardware.device=cpu"]
).rows["single"]


def write_images(folder: Path) -> Path:
    """idx files of random images of 28 x 28 pixels in ten classes: speed does not depend on what they show."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (COUNT, 28, 28)), random.integers(0, 10, COUNT)
    for name, array in (("t10k-images-idx3-ubyte", pixels), ("t10k-labels-idx1-ubyte", labels)):
        header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


class OfImages(Planned):
    row = ROW

    def load(self, split: Path) -> Images:
        return Images.load(split)


class BareImages(OfImages, BareLoop):
    """What one would write by hand, and nothing else."""

    def train(self, first: int, steps: int) -> float:
        plan, model = self.part(first, steps), self.model
        schedule = make_schedule(self.optimizer, self.settings.train, plan.steps, plan.epochs)
        began = time.perf_counter()
        for step in range(plan.steps):
            batch = self.samples.batch(plan.step_ids(step), 1)
            scores = model(torch.from_numpy(batch["pixel_values"]))
            cross_entropy(scores, torch.from_numpy(batch["labels"])).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            schedule.step()
        return len(plan.ids) / (time.perf_counter() - began)


class PlannedImages(OfImages, PlannedLoop):
    """Lockstep's own loop with its strategy `single`."""


class WithLoss(torch.nn.Module):
    """A model as Trainer wants it, which returns its loss."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, labels):
        scores = self.model(pixel_values)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


class TrainerImages(TrainerLoop):
    """transformers.Trainer as its documentation starts it, over images that lie in memory."""

    row = ROW

    def set_up(self):
        split = Images.load(paths.split_folder(paths.data_folder(self.results), "train"))
        arrays = split.batch(np.arange(len(split)), 1)
        pixels, labels = torch.from_numpy(arrays["pixel_values"]), torch.from_numpy(arrays["labels"])
        self.dataset = [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]
        self.model = WithLoss(self.model)

    def collator(self):
        return None  # Trainer's own
