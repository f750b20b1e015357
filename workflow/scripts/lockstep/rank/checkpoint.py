"""Checkpoints: a strategy's own format, sealed with hashes.

A flipped byte loads silently from every checkpoint format, so a checkpoint is a folder whose manifest.json, written
last, holds the sha256 of each file, and of the live weights that it was written from: the conversion
(proof/conversion.py) is held against both, and sealed the same way.
"""

import shutil
from pathlib import Path

from lockstep.files import seal
from lockstep.model import models


def save(strategy, folder: Path, about: dict) -> None:
    """Write the strategy's checkpoint as `folder`/native, in place of an older one. Called on every rank.

    `about` says what it is (step, plan); the hash of the live weights is added here.
    """
    main = strategy.world.rank == 0
    temporary, final = folder / ".native.tmp", folder / "native"
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    barrier(strategy)
    strategy.save(temporary)
    live = strategy.state_dict()
    barrier(strategy)
    if main:
        seal(temporary, about | {"weights": models.hash_weights(live)})
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
    barrier(strategy)


def barrier(strategy) -> None:
    import torch

    strategy.all_gather(torch.zeros(1, device=strategy.world.device))
