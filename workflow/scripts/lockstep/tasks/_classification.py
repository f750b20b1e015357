"""The common part of classification tasks, in which each sample has one label."""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep import paths
from lockstep.config.sections import Data, Predict
from lockstep.data.labels import Labels, position
from lockstep.errors import BadInput, RunFailed, listed
from lockstep.files import read_json, write_csv, write_json, write_text
from lockstep.model import models
from lockstep.model.outputs import NO_NUMBERS, logits
from lockstep.tasks import _task

BATCH = 64  # the batch size of a test


class Task(_task.Task):
    def weights(self, samples):
        self.weigh_classes(np.bincount(samples.labels))
        return super().weights(samples) if self.class_weights is None else self.class_weights[samples.labels]

    def columns(self, split: Path) -> dict[str, list]:
        """The columns of predictions.csv that identify a split's samples, with one value per sample."""
        raise NotImplementedError

    def loss(self, module, outputs, labels, dtype):
        own = self.own_loss(module, outputs, labels)
        if own is None:
            scores = logits(outputs).to(dtype)
            weight = self.class_weights_beside(scores)
            smoothing = self.train.label_smoothing if self.train else 0.0
            return cross_entropy(scores, labels, weight, reduction="sum", label_smoothing=smoothing)
        return own.to(dtype) * len(labels)

    def results(self, outputs, labels):
        return logits(outputs).float()

    def scores(self, results, samples):
        labels = torch.from_numpy(samples.labels)
        predicted = results.argmax(dim=1)
        return {
            "loss": cross_entropy(results, labels).item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "macro_f1": macro_f1(labels, predicted, results.shape[1]),
        }

    def samples_of(self, folder: Path, inputs: list, model: torch.nn.Module) -> _task.Samples:
        """Inputs in the form that `model`, the one stored in `folder`, takes; their labels are unknown, and set to 0.

        Raises BadInput if it can't take them.
        """
        raise NotImplementedError

    def predict(self, folder, model, inputs):
        names = models.labels(folder)
        chances = probabilities(model, self.samples_of(folder, inputs, model))
        return [(names[row.argmax()], float(row.max())) for row in chances]

    def held_out(self, wanted: Predict, numbers: np.ndarray, data: Path) -> list[tuple[int, str]]:
        """Choose samples of the test split by the section `predict`: their (position, label). numbers: its labels."""
        labels = read_json(data / paths.ABOUT_DATA)["labels"]
        if wanted.label is not None and wanted.label not in labels:
            raise BadInput(f"predict.label: {wanted.label!r} is not one of {', '.join(labels)}.")
        positions = np.arange(len(numbers))
        if wanted.label is not None:
            positions = np.flatnonzero(numbers == labels.index(wanted.label))
        chosen = positions[np.random.default_rng(wanted.seed).permutation(len(positions))[: wanted.count]]
        return [(int(position), labels[numbers[position]]) for position in chosen]

    def test(self, model, data, folder):
        split = paths.split_folder(data, "test")
        samples, names = self.load(split), read_json(data / paths.ABOUT_DATA)["labels"]
        return self._report(names, samples.labels, probabilities(model, samples), self.columns(split), folder)

    def read_labelled(
        self, stored: Path, data: Data, notes: list[str], labels: Labels
    ) -> tuple[dict[str, list], list, list[int]]:
        """Read the samples that `data` names: columns of predictions.csv, inputs, and labels as numbers in `labels`.

        Inputs have the form that the model in the folder `stored` takes.
        """
        raise NotImplementedError

    def test_file(self, stored: Path, model: torch.nn.Module, data: Data, folder: Path, notes: list[str]) -> dict:
        """Test the classifier in the folder `stored` on all samples that `data` names; writes the same files as `test`.

        A label of the data is the name of a class of the model, or its number if no class's name is a number; classes
        are numbered as in data.labels if that has the same names, else as in the model.
        """
        names, labels = models.labels(stored), Labels(models.labels(stored))
        columns, inputs, codes = self.read_labelled(stored, data, notes, labels)
        if not inputs:
            raise BadInput(f"{data.path}: holds no samples.")
        order = data.labels if sorted(data.labels or ()) == sorted(names) else names
        how = "name the model's classes by --labels"
        meant = {name: order[position(name, order, data.path, how)] for name in labels.names}
        if pairs := [f"{name} is {meant[name]}" for name in sorted(meant) if meant[name] != name]:
            notes.append(f"labels that are numbers are taken for the model's classes: {listed(pairs)}")
        truths = np.array([names.index(name) for name in meant.values()], dtype=np.int64)[codes]
        chances = probabilities(model, self.samples_of(stored, inputs, model))
        return self._report(names, truths, chances, columns, folder)

    def _report(
        self, names: list[str], truths: np.ndarray, chances: np.ndarray, columns: dict[str, list], folder: Path
    ) -> dict:
        """Compare predictions with the truth; writes the report, its figures, and each prediction into `folder`.

        truths: int64 [n]; chances: [n, labels], probabilities; columns: what identifies the samples (`self.columns`).
        """
        from sklearn.metrics import classification_report, confusion_matrix

        predicted, numbers = chances.argmax(axis=1), range(len(names))
        report = {"labels": numbers, "target_names": names, "zero_division": 0, "digits": 4}
        counted, counted_as = (np.tile(column, self.times_counted) for column in (truths, predicted))
        by_class = classification_report(counted, counted_as, output_dict=True, **report)
        scores = {
            "labels": names,
            "support": len(counted),
            "accuracy": float((predicted == truths).mean()),
            "macro_f1": by_class["macro avg"]["f1-score"],
            "by_class": by_class,
            "confusion_matrix": confusion_matrix(counted, counted_as, labels=numbers).tolist(),
        }
        write_text(folder / paths.TEST_TEXT, classification_report(counted, counted_as, **report))
        write_csv(
            folder / paths.TEST_PREDICTIONS,
            [*columns, "truth", "predicted", *(f"p_{name}" for name in names)],
            (
                [*about, names[truth], names[guess], *(f"{chance:.6f}" for chance in chances_of_one)]
                for *about, truth, guess, chances_of_one in zip(
                    *columns.values(), truths, predicted, chances, strict=True
                )
            ),
        )
        write_json(folder / paths.TEST_REPORT, scores)
        return scores


def probabilities(model: torch.nn.Module, samples: _task.Samples) -> np.ndarray:
    """The probability of each label for every sample, in order: float32 [n, labels]. Raises RunFailed if one is nan."""
    device, parts, order = next(model.parameters()).device, [], []
    with torch.inference_mode():
        for ids in samples.batches(BATCH):
            batch = samples.batch(ids, int(samples.lengths[ids].max()))
            inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.items() if name != "labels"}
            parts.append(logits(model(**inputs)).float().softmax(dim=1).cpu().numpy())
            order.append(ids)
    chances = np.concatenate(parts)[np.argsort(np.concatenate(order))]
    if np.isnan(chances).any():  # argmax would take the first nan for the prediction
        raise RunFailed(NO_NUMBERS)
    return chances


def macro_f1(labels: torch.Tensor, predicted: torch.Tensor, classes: int) -> float:
    """Macro-F1: the mean over classes of 2 * hits / (truths + guesses), 0 for a class without either.

    labels, predicted: [n]. It equals scikit-learn's figure, whose import would cost every rank over a second.
    """
    hits, truths, guesses = (
        part.bincount(minlength=classes) for part in (labels[labels == predicted], labels, predicted)
    )
    return (2 * hits / (truths + guesses).clamp(min=1)).mean().item()
