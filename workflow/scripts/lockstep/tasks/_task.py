"""What every task answers. Strategies, the ranks and the report ask these questions, and nothing else, of a task.

A task is a file in this folder, found by its name (config/registry.py), with a class `Task` that answers them.
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

if TYPE_CHECKING:  # training needs no configuration, and starts sooner without it
    from lockstep.config.configuration import Config


class Samples(Protocol):
    """A prepared split, memory-mapped. Samples are numbered from 0."""

    lengths: np.ndarray  # int64 [n], how long each is: by it the plan makes batches; 1 where all are alike

    def __len__(self) -> int: ...

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Samples `ids`, padded to `width`: what the model takes by name, and `labels`; [len(ids), ...] each.

        Where a sample has several labels, their names begin with `labels_` (`take_labels`).
        """

    def batches(self, size: int) -> list[np.ndarray]:
        """All ids, in batches of at most `size`: for evaluation, where order does not matter."""


Labels = torch.Tensor | dict[str, torch.Tensor]  # [n, ...]; of several kinds, each by its name
Loss = torch.Tensor | dict[str, torch.Tensor]  # a scalar; of several terms, each by its name


def take_labels(batch: dict[str, torch.Tensor]) -> Labels:
    """Take the labels out of a batch, and leave what the model takes.

    They stand under `labels`; several, each under its own name after `labels_`, by which they are returned.
    """
    if "labels" in batch:
        return batch.pop("labels")
    return {name.removeprefix("labels_"): batch.pop(name) for name in list(batch) if name.startswith("labels_")}


class Task:
    """The base of all tasks. Made once in each process that trains or tests; `train` is what a row trains with."""

    UNIT = "samples"  # what people call them
    INPUT = "input"  # what they call what is predicted, and how it is given to predict.py
    EXAMPLE = ""
    times_counted = 1  # how often the test counts each sample; a published flaw is to count it once for each rank
    VISIBLE = False  # whether a sample is a picture, which `pictures` draws
    class_weights: np.ndarray | None = None  # float64 [classes], where not all count alike

    def __init__(self, train: Train | None = None):
        self.train = train
        self.weights_beside: dict[tuple, torch.Tensor] = {}

    # Once, before any strategy.

    def prepare(self, config: Config, downloads: Path, work: Path, target: Path) -> dict:
        """Read and split the data, and write into `target` the splits (paths.DATASET), the initial model
        (paths.WEIGHTS), and whatever the model needs to take an input.

        Downloads are kept in `downloads`; `work` is for what is not. Returns the summary of data.json. Raises BadInput.
        """
        raise NotImplementedError

    def unused_parameters(self, model: torch.nn.Module, samples: Samples) -> list[str]:
        """Those to train that get no gradient of the first sample's loss. Raises BadInput where that can't be had."""
        batch = samples.batch(np.zeros(1, dtype=np.int64), int(samples.lengths[0]))
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = take_labels(inputs)
        model.eval()  # which draws no random number, and takes a single sample where there is batch normalisation
        try:
            self.weights(samples)
            loss = self.loss(model, model(**inputs), labels, torch.float32)
            loss = sum(loss.values()) if isinstance(loss, dict) else loss
        except RunFailed as error:
            raise BadInput(f"{error}.") from None
        except Exception as error:  # of the user's own code: anything
            if not hasattr(model, "loss"):
                raise
            raise BadInput(f"model.name: {type(model).__name__}.loss fails: {own.where(error, model)}") from None
        if not loss.requires_grad:
            raise BadInput(
                f"model.name: the loss of {type(model).__name__} depends on no parameter, so none is trained."
            )
        loss.backward()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        model.zero_grad()
        model.train()
        return unused

    # In every rank.

    def load(self, split: Path) -> Samples:
        """The split stored in a folder, as in results/data/dataset/train."""
        raise NotImplementedError

    def weights(self, samples: Samples) -> np.ndarray | dict[str, np.ndarray]:
        """What each sample counts in the mean loss: float64 [n]; of several terms, in the mean of each, by its name."""
        return np.ones(len(samples))

    def loss(self, module: torch.nn.Module, outputs, labels: Labels, dtype: torch.dtype) -> Loss:
        """The sum of a batch's losses, each times what its sample counts; a scalar of type `dtype`.

        Of a loss of several terms, which are those of the file's literal TERMS: such a sum of each, by its name. The
        mean of each over the global batch is made of it, and the loss is the sum of these, each times what
        `train.loss_weights` has for it.

        outputs: what the model, whose plain module is `module`, returned. A model of one's own may bring its own loss.
        """
        raise NotImplementedError

    def weigh_classes(self, counts: np.ndarray) -> None:
        """Set what each class counts in the loss, by `train.class_weights`.

        counts: int64 [classes], how many of each there are in the training split. Raises RunFailed.
        """
        asked, self.class_weights, self.weights_beside = self.train.class_weights, None, {}
        if asked == "balanced":
            self.class_weights = counts.sum() / (len(counts) * np.maximum(counts, 1))
        elif asked is not None and len(asked) < len(counts):
            raise RunFailed(_wrong_weights(len(asked), len(counts)))
        elif asked is not None:
            self.class_weights = np.array(asked, dtype=np.float64)

    def class_weights_beside(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The weights of all classes, on the device and in the precision of `scores` [n, classes]: [classes].

        They are made once, and a GPU copies them while the host goes on: to wait for it would be timed. None where all
        count alike.
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
        """The mean loss of a batch by a model that brings its own, as a method `loss(outputs, labels)`; else None."""
        brought = getattr(module, "loss", None)
        if brought is None:
            return None
        if self.train.class_weights is not None or self.train.label_smoothing:
            raise RunFailed(
                f"model.name: {type(module).__name__} has a loss of its own, to which train.class_weights and"
                " label_smoothing mean nothing; leave them out"
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
        """What `scores` needs of a batch in evaluation: float32 [n, any]."""
        raise NotImplementedError

    def scores(self, results: torch.Tensor, samples: Samples) -> dict[str, float]:
        """The figures of a split: its `loss`, and those by which a checkpoint may be chosen.

        results: those of every sample, each once, in order, on the CPU: float32 [n, any].
        """
        raise NotImplementedError

    def draw(self, samples: Samples, ids: np.ndarray, outputs) -> bytes:
        """Samples `ids` of a split beside what the model, which returned `outputs`, says of them: a PNG file.

        Asked of tasks whose TAKES has `pictures_every`.
        """
        raise NotImplementedError

    # Afterwards.

    def convert(self, state: dict[str, torch.Tensor], data: Path, folder: Path) -> None:
        """Write a trained model, as one that stands by itself, into the empty `folder`.

        state: its weights under their plain names. data: the folder of prepared data.
        """
        model = models.build(data / paths.WEIGHTS)
        model.load_state_dict(state, strict=True)
        models.save(model, folder)

    def given(self, inputs: list[str]) -> list[tuple[str, str, object]]:
        """What a user gives on the command line, as `choose` returns it. Raises BadInput."""
        raise NotImplementedError

    def choose(self, wanted: Predict, data: Path) -> list[tuple[str, str, object]]:
        """Inputs to predict, by the section `predict`: how each is shown, its truth ("" where that is not known), and
        the input itself. Raises BadInput."""
        raise NotImplementedError

    def predict(self, folder: Path, model: torch.nn.Module, inputs: list) -> list[tuple]:
        """What the converted model in `folder` says of inputs, and by which probability (None where it has none).

        A third value, where an answer is a picture, is its PNG file.
        """
        raise NotImplementedError

    def pictures(self, split: Path, ids: np.ndarray) -> list[bytes]:
        """Samples of the split stored at a folder, as PNG files."""
        raise NotImplementedError

    def test_file(self, stored: Path, model: torch.nn.Module, data: Data, folder: Path, notes: list[str]) -> dict:
        """Test the model in the folder `stored` on all samples that `data` names; writes and returns what `test` does.

        Raises BadInput where a task has no such test.
        """
        raise BadInput(f"--data: {stored} is no classifier, and this tests classifiers and segmentations only.")

    def test(self, model: torch.nn.Module, data: Path, folder: Path) -> dict:
        """Test a converted model on the test split, write test/report.txt, .json and predictions.csv into a run's
        `folder`, and return the scores: `support`, and by name what the table shows."""
        raise NotImplementedError


def _wrong_weights(given: int, labels: int) -> str:
    return f"train.class_weights: has {given} numbers, and the data has {labels} labels; give one for each"
