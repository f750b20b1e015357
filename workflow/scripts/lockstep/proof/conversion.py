"""Convert a strategy's checkpoint into a standalone model, and check both against the hash of the live weights."""

from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.sections import Train
from lockstep.errors import BadInput, RunFailed, brief
from lockstep.files import MANIFEST, atomic_folder, read_json, seal, verify
from lockstep.model import lora, models
from lockstep.run import record_files
from lockstep.run.record import Record

AGAIN = "Train the row again."


def read(run: Path) -> dict:
    """The weights in the checkpoint of `run`, as full tensors under their plain names.

    Raises RunFailed if any value differs from the live weights that were saved.
    """
    paths.must_be_run(run)
    checkpoint = run / paths.CHECKPOINT
    manifest, strategy = verify(checkpoint, AGAIN), read_json(run / paths.SETTINGS)["strategy"]
    try:
        state = registry.load(strategy).to_state_dict(checkpoint)
    except ImportError as error:
        raise RunFailed(f"{run}: {strategy} is not installed here ({error}). Convert it where it is.") from None
    except Exception as error:  # each framework raises its own errors for an unreadable file
        raise RunFailed(f"{checkpoint}: can't be read as a checkpoint of {strategy}: {brief(error)}") from None
    state = models.with_tied(state, manifest.get("tied", {}))
    _must_be(models.hash_weights(state), manifest["weights"], run)
    return state


def convert(run: Path, destination: Path) -> str:
    """Convert the checkpoint of `run` into a standalone model at `destination`; returns its weights' sha256.

    The task decides the folder's content; a model of transformers can be loaded by transformers alone. The folder is
    sealed. After LoRA the updates are merged into the weights, and also stored in the folder `adapter` for peft; on the
    initial weights that adapter must reproduce the live weights.

    Raises RunFailed if any converted value differs from the live weights.
    """
    state, settings, data = read(run), read_json(run / paths.SETTINGS), data_of(run)
    live = read_json(run / paths.CHECKPOINT / MANIFEST)["weights"]
    with atomic_folder(destination) as temporary:
        wanted, about = live, {}
        if settings.get("train", {}).get("lora"):
            start = models.load(data / paths.WEIGHTS)
            state = lora.take_out(start, state, Train.of(settings["train"]), temporary / paths.ADAPTER)
            wanted, about = models.hash_weights(state), {"merged_from": live}
        registry.load_task(settings["task"])().convert(state, data, temporary)
        converted = models.hash_weights(models.load(temporary).state_dict())
        _must_be(converted, wanted, run)
        seal(temporary, {"weights": converted} | about)
    return converted


def data_of(run: Path) -> Path:
    """The folder of the data that `run`, a run's or a snapshot's folder, was trained on.

    Raises BadInput if it is not here, or holds other data or initial weights now.
    """
    data = Path(read_json(run / paths.SETTINGS)["data"])
    if not (data / paths.WEIGHTS).is_dir():
        raise BadInput(f"{run}: was trained on the data in {data}, which is not here. Run this where it was trained.")
    about = read_json(paths.require(data / paths.ABOUT_DATA, "prepare.py"))
    folder = run.resolve()
    record = record_files.read_run(folder.parents[1] if folder.parent.name == paths.SNAPSHOTS else folder)
    began = record.hashes if isinstance(record, Record) else {}
    there = (("data", "data", about["hash"]), ("weights", "initial weights", about["weights"]))
    if other := [what for name, what, now in there if began.get(name, now) != now]:
        raise BadInput(
            f"{run}: was trained with other {' and '.join(other)} than {data} holds now. Train the row again, or"
            " prepare the data again by the configuration that it was trained with."
        )
    return data


def converted(run: Path) -> Path:
    """Convert the checkpoint in `run`, a run's or a snapshot's folder, unless that is done already. Returns `run`."""
    if not models.is_stored(run / paths.MODEL):
        convert(run, run / paths.MODEL)
    return run


def _must_be(weights: str, live: str, run: Path) -> None:
    if weights != live:
        raise RunFailed(
            f"{run}: the converted weights differ from the live ones. The conversion is wrong; please report it."
        )
