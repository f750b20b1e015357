"""Checkpoints: a strategy's own format, sealed with hashes, and its conversion to a plain Hugging Face folder.

A flipped byte loads silently from every checkpoint format, so a checkpoint is a folder whose manifest.json, written
last, holds the sha256 of each file, and of the live weights that it was written from: the conversion is held against
both.
"""

import os
import shutil
from pathlib import Path

from lockstep import models, strategies
from lockstep.errors import BadInput, RunFailed
from lockstep.files import atomic_folder, hash_file, read_json, write_json

MANIFEST = "manifest.json"


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
        hashes = {}
        for file in sorted(file for file in temporary.rglob("*") if file.is_file()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            hashes[str(file.relative_to(temporary))] = hash_file(file)
        write_json(temporary / MANIFEST, about | {"weights": models.hash_weights(live), "files": hashes})
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
    barrier(strategy)


def barrier(strategy) -> None:
    import torch

    strategy.all_gather(torch.zeros(1, device=strategy.world.device))


def verify(folder: Path) -> dict:
    """The manifest of a checkpoint, after every file in it was found to be as it was written. Raises RunFailed."""
    if not (folder / MANIFEST).is_file():
        raise RunFailed(f"{folder}: holds no {MANIFEST}, so it is no complete checkpoint. Train the row again.")
    manifest = read_json(folder / MANIFEST)
    for name, sha256 in manifest["files"].items():
        if not (folder / name).is_file() or hash_file(folder / name) != sha256:
            raise RunFailed(f"{folder / name}: is missing or has changed since it was written. Train the row again.")
    return manifest


def read(run: Path) -> dict:
    """The weights in the checkpoint of `run`, under their plain names, as full tensors.

    Raises RunFailed where they are not the live ones that it was written from, value by value.
    """
    settings_file = run / "settings.json"
    if not settings_file.is_file():
        raise BadInput(f"{run}: is no folder of a run (no settings.json). Name one like results/runs/ddp/n2/rep1.")
    manifest = verify(run / "native")
    state = strategies.load(read_json(settings_file)["strategy"]).to_state_dict(run / "native")
    _must_be(models.hash_weights(state), manifest, run)
    return state


def convert(run: Path, destination: Path) -> str:
    """Turn the checkpoint of `run` into a Hugging Face folder at `destination`; returns the sha256 of its weights.

    The folder holds config.json, model.safetensors and the tokenizer, and loads with transformers alone.
    Raises RunFailed where the converted weights are not the live ones, value by value.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    state, data = read(run), Path(read_json(run / "settings.json")["data"])
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(data / "weights", local_files_only=True)
    )
    model.load_state_dict(state, strict=True)
    with atomic_folder(destination) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(data / "tokenizer", local_files_only=True).save_pretrained(temporary)
        converted = models.hash_weights(models.load(temporary).state_dict())
        _must_be(converted, read_json(run / "native" / MANIFEST), run)
    return converted


def _must_be(weights: str, manifest: dict, run: Path) -> None:
    if weights != manifest["weights"]:
        raise RunFailed(
            f"{run}: the converted weights differ from the live ones. The conversion is wrong; please report it."
        )
