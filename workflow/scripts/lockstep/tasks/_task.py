"""The interface of a task. Strategies, ranks and the report use nothing else of a task.

A task is a file in this folder, found by its name (config/registry.py), with a class `Task`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lockstep import paths
from lockstep.config.sections import Data, Predict, Train
from lockstep.errors import BadInput, RunFailed
from lockstep.model import models, own

if TYPE_CHECKING:  # a training process needs no configuration, and starts sooner without this import
    from lockstep.config.configuration import Config


class Samples(Protocol):
    """A prepared split, memory-mapped. Samples are numbered from 0."""

    lengths: np.ndarray  # int64 [n], by which the plan makes batches; 1 for samples without a length

    def __len__(self) -> int: ...

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Samples `ids`, padded to `width`: the model's inputs by name, and `labels`; each is [len(ids), ...].

        If a sample has several labels, their names begin with `labels_` (`take_labels`).
        """

    def batches(self, size: int) -> list[np.ndarray]:
        """All ids in batches of at most `size`; for evaluation, where order does not matter."""


Labels = torch.Tensor | dict[str, torch.Tensor]  # [n, ...]; a dict by name if there are several kinds
Loss = torch.Tensor | dict[str, torch.Tensor]  # a scalar; a dict by name if the loss has several terms


def take_labels(batch: dict[str, torch.Tensor]) -> Labels:
    """Remove the labels from a batch, which leaves the model's inputs, and return them.

    A single kind of label is stored under `labels`; several kinds under `labels_NAME`, and are returned by NAME.
    """
    if "labels" in batch:
        return batch.pop("labels")
    return {name.removeprefix("labels_"): batch.pop(name) for name in list(batch) if name.startswith("labels_")}


class Task:
    """The base class of all tasks, instantiated once in each process that trains or tests.

    train: the row's section `train`.
    """

    UNIT = "samples"  # what samples are called in messages
    INPUT = "input"  # what an input to predict.py is called, and its option
    EXAMPLE = ""
    times_counted = 1  # how often the test counts each sample; a published flaw is to count it once for each rank
    VISIBLE = False  # whether samples are images, which `pictures` draws
    class_weights: np.ndarray | None = None  # float64 [classes]; None if all classes have the same weight

    def __init__(self, train: Train | None = None):
        self.train = train
        self.weights_beside: dict[tuple, torch.Tensor] = {}

    # Called once, before any strategy runs.

    def prepare(self, config: Config, downloads: Path, work: Path, target: Path) -> dict:
        """Read and split the data, and write into `target` the splits (paths.DATASET), the initial model
        (paths.WEIGHTS), and whatever the model needs to read an input.

        Downloads are kept in `downloads`; `work` is a temporary folder. Returns the summary for data.json. Raises
        BadInput.
        """
        raise NotImplementedError

    def unused_parameters(self, model: torch.nn.Module, samples: Samples) -> list[str]:
        """Trainable parameters that get no gradient from the first sample's loss. Raises BadInput if the loss fails."""
        batch = samples.batch(np.zeros(1, dtype=np.int64), int(samples.lengths[0]))
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = take_labels(inputs)
        model.eval()  # draws no random numbers, and batch normalisation accepts a single sample
        try:
            self.weights(samples)
            loss = self.loss(model, model(**inputs), labels, torch.float32)
            loss = sum(loss.values()) if isinstance(loss, dict) else loss
        except RunFailed as error:
            raise BadInput(f"{error}.") from None
        except Exception as error:  # the user's code may raise anything
            if not hasattr(model, "loss"):
                raise
            raise BadInput(f"model.name: {type(model).__name__}.loss fails: {own.where(error, model)}") from None
        if not loss.requires_grad:
            raise BadInput(
                f"model.name: the loss of {type(model).__name__} depends on no parameter, so nothing can be trained."
            )
        loss.backward()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        model.zero_grad()
        model.train()
        return unused

    def alike(self, count: int, length: int, config: dict) -> Samples:
        """A split of `count` equal samples, of which only the size matters; of `length` tokens if they are texts.

        config: the content of the model's config.json.
        """
        raise NotImplementedError

    # Called in every rank.

    def load(self, split: Path) -> Samples:
        """Load the split stored in a folder such as results/data/dataset/train."""
        raise NotImplementedError

    def weights(self, samples: Samples) -> np.ndarray | dict[str, np.ndarray]:
        """Each sample's weight in the mean loss: float64 [n]; for a loss of several terms a dict, by their names."""
        return np.ones(len(samples))

    def loss(self, module: torch.nn.Module, outputs, labels: Labels, dtype: torch.dtype) -> Loss:
        """The sum of a batch's losses, each multiplied by its sample's weight; a scalar of type `dtype`.

        A loss of several terms, whose names are the file's literal TERMS, is returned as a dict of such sums. Each
        term is averaged over the global batch, and the loss is the sum of the means times `train.loss_weights`.

        module: the plain model, which may define a loss of its own; outputs: what the model returned.
        """
        raise NotImplementedError

    def weigh_classes(self, counts: np.ndarray) -> None:
        """Set the weight of each class in the loss by `train.class_weights`.

        counts: int64 [classes], the samples of each class in the training split. Raises RunFailed.
        """
        asked, self.class_weights, self.weights_beside = self.train.class_weights, None, {}
        if asked == "balanced":
            self.class_weights = counts.sum() / (len(counts) * np.maximum(counts, 1))
        elif asked is not None and len(asked) < len(counts):
            raise RunFailed(_wrong_weights(len(asked), len(counts)))
        elif asked is not None:
            self.class_weights = np.array(asked, dtype=np.float64)

    def class_weights_beside(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The class weights on the device and in the precision of `scores` [n, classes]: [classes], or None.

        They are created once, and copied to a GPU without waiting for it, since the wait would be timed. None if all
        classes have the same weight.
        """
        if self.class_weights is None:
            return None
        device, dtype, classes = key = scores.device, scores.dtype, scores.shape[1]
        if key not in self.weights_beside:
            if len(self.class_weights) > classes:
                raise RunFailed(_wrong_weights(len(self.class_weights), classes))
            weight = torch.zeros(classes, dtype=dtype)
            weight[: len(self.class_weights)] = torch.from_numpy(self.class_weights)
            if device.type == "cuda":
                weight = weight.pin_memory().to(device, non_blocking=True)
            self.weights_beside[key] = weight.to(device)
        return self.weights_beside[key]

    def own_loss(self, module: torch.nn.Module, outputs, labels: torch.Tensor) -> torch.Tensor | None:
        """The mean loss of a batch by the model's own method `loss(outputs, labels)`; None if it has none."""
        brought = getattr(module, "loss", None)
        if brought is None:
            return None
        if self.train.class_weights is not None or self.train.label_smoothing:
            raise RunFailed(
                f"model.name: {type(module).__name__} has a loss of its own, which train.class_weights and"
                " label_smoothing do not affect; leave them out"
            )
        loss = brought(outputs, labels)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RunFailed(
                f"model.name: {type(module).__name__}.loss must return the mean loss of the batch, a scalar;"
                f" not {shape}"
            )
        return loss

    def results(self, outputs, labels: Labels) -> torch.Tensor:
        """The results of a batch that `scores` needs in evaluation: float32 [n, any]."""
        raise NotImplementedError

    def scores(self, results: torch.Tensor, samples: Samples) -> dict[str, float]:
        """The scores of a split: its `loss`, and the figures by which a checkpoint may be chosen.

        results: of every sample of the split, in order, on the CPU: float32 [n, any].
        """
        raise NotImplementedError

    def draw(self, samples: Samples, ids: np.ndarray, outputs) -> bytes:
        """Draw samples `ids` of a split beside the model's predictions for them, from `outputs`: a PNG file.

        Called for tasks whose TAKES contains `pictures_every`.
        """
        raise NotImplementedError

    # Called after training.

    def convert(self, state: dict[str, torch.Tensor], data: Path, folder: Path) -> None:
        """Write a trained model into the empty `folder` in a form that can be loaded without Lockstep's results.

        state: its weights under their plain names. data: the folder of prepared data.
        """
        model = models.build(data / paths.WEIGHTS)
        model.load_state_dict(state, strict=True)
        models.save(model, folder)

    def given(self, inputs: list[str]) -> list[tuple[str, str, object]]:
        """Inputs from the command line, in the form that `choose` returns. Raises BadInput."""
        raise NotImplementedError

    def choose(self, wanted: Predict, data: Path) -> list[tuple[str, str, object]]:
        """Choose inputs to predict by the section `predict`: how each is shown, its true label ("" if unknown), and the
        input itself. Raises BadInput."""
        raise NotImplementedError

    def predict(self, folder: Path, model: torch.nn.Module, inputs: list) -> list[tuple]:
        """The predictions of the converted model in `folder` for inputs, each with its probability or None.

        If a prediction is an image, a third value is its PNG file.
        """
        raise NotImplementedError

    def pictures(self, split: Path, ids: np.ndarray) -> list[bytes]:
        """Samples of the split stored in a folder, as PNG files."""
        raise NotImplementedError

    def test_file(self, stored: Path, model: torch.nn.Module, data: Data, folder: Path, notes: list[str]) -> dict:
        """Test the model in the folder `stored` on all samples that `data` names, with the same results as `test`.

        Raises BadInput if the task has no such test.
        """
        raise BadInput(f"--data: {stored} is not a classifier; only classifiers and segmentations can be tested so.")

    def test(self, model: torch.nn.Module, data: Path, folder: Path) -> dict:
        """Test a converted model on the test split, write test/report.txt, .json and predictions.csv into a run's
        `folder`, and return the scores: `support`, and by name what the table shows."""
        raise NotImplementedError


def _wrong_weights(given: int, labels: int) -> str:
    return f"train.class_weights: has {given} numbers, but the data has {labels} labels; give one for each"
