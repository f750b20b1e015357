"""From a strategy's own checkpoint to a plain Hugging Face folder, held against the live weights at both ends."""

from pathlib import Path

from lockstep.config import registry
from lockstep.errors import BadInput, RunFailed, brief
from lockstep.files import MANIFEST, atomic_folder, read_json, seal, verify
from lockstep.model import models

AGAIN = "Train the row again."


def read(run: Path) -> dict:
    """The weights in the checkpoint of `run`, under their plain names, as full tensors.

    Raises RunFailed where they are not the live ones that it was written from, value by value.
    """
    settings_file = run / "settings.json"
    if not settings_file.is_file():
        raise BadInput(f"{run}: is no folder of a run (no settings.json). Name one like results/runs/ddp/n2/rep1.")
    manifest, strategy = verify(run / "native", AGAIN), read_json(settings_file)["strategy"]
    try:
        state = registry.load(strategy).to_state_dict(run / "native")
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
