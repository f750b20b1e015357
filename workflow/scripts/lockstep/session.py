"""What the parts of one rank's training share."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep.clock import Clock
from lockstep.energy import Meter
from lockstep.record import Progress, RankFiles
from lockstep.strategies.single import Strategy
from lockstep.tokens import Tokens


@dataclass
class Session:
    strategy: Strategy
    settings: dict  # of the run, settings.json
    folder: Path  # of the run
    clock: Clock
    files: RankFiles
    progress: Progress
    meter: Meter | None = None  # on one rank of each machine
    profiler: "Profiler | None" = None  # noqa: F821 - in a run of that kind only, lockstep/profiling.py

    @property
    def train(self) -> dict:
        """The `train` section of the row's configuration."""
        return self.settings["train"]

    def tensors(self, tokens: Tokens, ids: np.ndarray, width: int) -> dict[str, torch.Tensor]:
        """Samples `ids`, padded to `width`, on this rank's device: input_ids, attention_mask, labels."""
        device = self.strategy.world.device
        tensors = {name: torch.from_numpy(array) for name, array in tokens.batch(ids, width).items()}
        if device.type == "cuda":
            return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
        return tensors
