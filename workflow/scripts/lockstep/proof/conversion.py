"""From a strategy's own checkpoint to a model that stands by itself, checked against the live weights at both ends."""

from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.sections import Train
from lockstep.errors import BadInput, RunFailed, brief
from lockstep.files import MANIFEST, atomic_folder, read_json, seal, verify
from lockstep.model import lora, models

AGAIN = "Train the row again."


def read(run: Path) -> dict:
    """The weights in the checkpoint of `run`, under their plain names, as full tensors.

    Raises RunFailed where they are not the live ones that it was written from, value by value.
    """
    paths.must_be_run(run)
    checkpoint = run / paths.CHECKPOINT
    manifest, strategy = verify(checkpoint, AGAIN), read_json(run / paths.SETTINGS)["strategy"]
    try:
        state = registry.load(strategy).to_state_dict(checkpoint)
    except ImportError as error:
        raise RunFailed(f"{run}: {strategy} is not installed here ({error}). Convert it where it is.") from None
    except Exception as error:  # each framework has its own for a file that is not its own
        raise RunFailed(f"{checkpoint}: can't be read as a checkpoint of {strategy}: {brief(error)}") from None
    state = models.with_tied(state, manifest.get("tied", {}))
    _must_be(models.hash_weights(state), manifest["weights"], run)
    return state


def convert(run: Path, destination: Path) -> str:
    """Turn the checkpoint of `run` into a model that stands by itself, at `destination`; returns its weights' sha256.

    What the folder holds is the task's to say. A model of transformers loads with transformers alone. It is sealed.
    Of a run of LoRA the updates are added to the weights, and lie beside them as well, in the folder `adapter`, for
    peft: with the weights that training began with they must come to the live ones.
    Raises RunFailed where the converted weights are not the live ones, value by value.
    """
    state, settings = read(run), read_json(run / paths.SETTINGS)
    data = Path(settings["data"])
    if not (data / paths.WEIGHTS).is_dir():
        raise BadInput(f"{run}: was trained on what is in {data}, which is not here. Call this where it was trained.")
    live = read_json(run / paths.CHECKPOINT / MANIFEST)["weights"]
    with atomic_folder(destination) as temporary:
        wanted, about = live, {}
        if settings.get("train", {}).get("lora"):
            start = models.load(data / paths.WEIGHTS)
            state = lora.take_out(start, state, Train(**settings["train"]), temporary / paths.ADAPTER)
            wanted, about = models.hash_weights(state), {"merged_from": live}
        registry.load_task(settings["task"])().convert(state, data, temporary)
        converted = models.hash_weights(models.load(temporary).state_dict())
        _must_be(converted, wanted, run)
        seal(temporary, {"weights": converted} | about)
    return converted


def converted(run: Path) -> Path:
    """`run`, a run's or a snapshot's folder, in which there is the model of its checkpoint; made if it was not."""
    if not models.is_stored(run / paths.MODEL):
        convert(run, run / paths.MODEL)
    return run


def _must_be(weights: str, live: str, run: Path) -> None:
    if weights != live:
        raise RunFailed(
            f"{run}: the converted weights differ from the live ones. The conversion is wrong; please report it."
        )
