"""Checkpoints: a strategy's own format, sealed with hashes, and its conversion to a plain Hugging Face folder.

A flipped byte loads silently from every checkpoint format, so a checkpoint is a folder whose manifest.json, written
last, holds the sha256 of each file, and of the live weights that it was written from: the conversion is held against
both, and sealed the same way.
"""

import shutil
from pathlib import Path

from lockstep import models, strategies
from lockstep.errors import BadInput, RunFailed, brief
from lockstep.files import MANIFEST, atomic_folder, read_json, seal, verify

AGAIN = "Train the row again."


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


def read(run: Path) -> dict:
    """The weights in the checkpoint of `run`, under their plain names, as full tensors.

    Raises RunFailed where they are not the live ones that it was written from, value by value.
    """
    settings_file = run / "settings.json"
    if not settings_file.is_file():
        raise BadInput(f"{run}: is no folder of a run (no settings.json). Name one like results/runs/ddp/n2/rep1.")
    manifest, strategy = verify(run / "native", AGAIN), read_json(settings_file)["strategy"]
    try:
        state = strategies.load(strategy).to_state_dict(run / "native")
    except ImportError as error:
        raise RunFailed(f"{run}: {strategy} is not installed here ({error}). Convert it where it is.") from None
    except Exception as error:  # each framework has its own for a file that is not its own
        raise RunFailed(f"{run / 'native'}: can't be read as a checkpoint of {strategy}: {brief(error)}") from None
    _must_be(models.hash_weights(state), manifest, run)
    return state


def convert(run: Path, destination: Path) -> str:
    """Turn the checkpoint of `run` into a Hugging Face folder at `destination`; returns the sha256 of its weights.

    The folder holds config.json, model.safetensors and the tokenizer, and loads with transformers alone. It is sealed.
    Raises RunFailed where the converted weights are not the live ones, value by value.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    state, data = read(run), Path(read_json(run / "settings.json")["data"])
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(data / "weights", **models.LOCAL))
    model.load_state_dict(state, strict=True)
    with atomic_folder(destination) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(data / "tokenizer", **models.LOCAL).save_pretrained(temporary)
        converted = models.hash_weights(models.load(temporary).state_dict())
        _must_be(converted, read_json(run / "native" / MANIFEST), run)
        seal(temporary, {"weights": converted})
    return converted


def _must_be(weights: str, manifest: dict, run: Path) -> None:
    if weights != manifest["weights"]:
        raise RunFailed(
            f"{run}: the converted weights differ from the live ones. The conversion is wrong; please report it."
        )
