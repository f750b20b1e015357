"""Test converted models of any task, and predict with them."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy  # noqa: F401 - imported before PyTorch, which otherwise imports it and swallows Ctrl-C meanwhile
import torch

from lockstep import paths
from lockstep.config import registry
from lockstep.config.sections import Data
from lockstep.errors import BadInput, RunFailed, brief
from lockstep.files import MANIFEST, read_json, verify
from lockstep.model import models
from lockstep.proof import conversion
from lockstep.strategies.single import allow_tf32


def load_model(folder: Path) -> torch.nn.Module:
    """Load a converted model for prediction in fp32, on the GPU if there is one.

    Raises RunFailed if it has changed since it was converted. A folder that Lockstep did not make has no seal to check.
    """
    allow_tf32(False)
    _must_be_model(folder)
    if (folder / MANIFEST).is_file() or (folder.parent / paths.SETTINGS).is_file():
        verify(folder, f"Make it again: python workflow/scripts/convert.py {folder.parent}")
    with readable(folder):
        return models.load(folder).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _must_be_model(folder: Path) -> None:
    if not models.is_stored(folder):
        if (folder.parent / paths.CHECKPOINT).is_dir():
            raise BadInput(f"{folder}: does not exist yet. Run python workflow/scripts/convert.py {folder.parent}")
        raise BadInput(
            f"{folder}: is not a model folder (no config.json). Name one like results/runs/ddp/n2/rep1/model."
        )


@contextlib.contextmanager
def readable(folder: Path):
    """Turn libraries' errors about an unreadable model folder into BadInput, in one line."""
    try:
        yield
    except (BadInput, RunFailed):
        raise
    except Exception as error:  # safetensors, pickle, transformers and tokenizers each raise their own
        raise BadInput(f"{folder}: can't be read as a model: {brief(error)}") from None


def test(run: Path) -> dict:
    """Test a run's converted model on the test split; writes test/report.txt, test/report.json and predictions.csv."""
    model = load_model(run / paths.MODEL)
    settings, data = read_json(run / paths.SETTINGS), conversion.data_of(run)
    task = registry.load_task(settings["task"])()
    if settings.get("options", {}).get("count_each_rank"):
        task.times_counted = settings["hardware"]["processes"]
    return task.test(model, data, run)


@contextlib.contextmanager
def of_weights(model: Path, weights: Path | None, labels: list[str] | None) -> Iterator[Path]:
    """The folder of a model: `model` itself, or a temporary copy with somebody's `weights` or `labels`."""
    if weights is None and labels is None:
        yield model
        return
    from lockstep.proof import foreign

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / paths.MODEL
        with readable(model):
            notes = foreign.convert(weights or model, model, made, labels)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        yield made


def test_file(stored: Path, data: Data, folder: Path) -> dict:
    """Test the model in `stored` on all samples that `data` names; writes the files of `test` to `folder`."""
    task, notes = task_of(stored), []
    scores = task.test_file(stored, load_model(stored), data, folder, notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return scores


def predict(folder: Path, inputs: list, task) -> list[tuple]:
    """Predict `inputs` with a converted model, as `Task.predict` returns it."""
    model = load_model(folder)
    with readable(folder):
        return task.predict(folder, model, inputs)


def task_of(folder: Path):
    """The task of a converted model, by its run's settings or its own files. Raises BadInput."""
    _must_be_model(folder)
    settings = folder.parent / paths.SETTINGS
    name = read_json(settings)["task"] if settings.is_file() else models.task_name(folder)
    if name not in registry.tasks():
        raise BadInput(f"{folder}: is not a model for any of Lockstep's tasks, {', '.join(registry.tasks())}.")
    return registry.load_task(name)()
