"""image-segmentation: a class and an outline for each pixel, by a small U-Net or your own model.

A model takes pixel_values, float [n, channels, height, width], and returns two tensors by name: `logits`, of the
classes, float [n, classes, height, width], and `boundary`, the logit of an outline, float [n, height, width].

The loss is a weighted sum of three terms, each a mean over the whole global batch:

cross_entropy  of all pixels with a class, weighted by class (`train.class_weights`).
hard_examples  the cross entropy of the `train.hard_share` of each image's pixels with the highest loss (online hard
               example mining: Shrivastava et al. 2016, arXiv:1604.03540). They are chosen within an image. Often they
               are chosen within a batch; then each share of the batch has another choice, so that two ranks, or two
               micro-batches, train another model than one.
boundary       the binary cross entropy of outlines over all pixels, with weight `train.pos_weight` for those on one.

Pixels without a class (255) count neither in the first two terms nor in any score.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from lockstep import paths
from lockstep.config.fixed import factors
from lockstep.data import decoding, images, segments
from lockstep.data.segments import IGNORED
from lockstep.errors import BadInput, RunFailed
from lockstep.files import atomic_folder, read_json, write_csv, write_json, write_text
from lockstep.model import convnets, models, own
from lockstep.model.outputs import NO_NUMBERS, logits
from lockstep.tasks import _task

MODELS = ("unet",)
QUALITY = ("pixel_accuracy", "miou")
TERMS = ("cross_entropy", "hard_examples", "boundary")
TAKES = ("loss_weights", "pos_weight", "hard_share", "pictures_every")
BATCH = 64  # the batch size of a test


class Task(_task.Task):
    UNIT, INPUT, EXAMPLE = "images", "image", "as in --image my.png"
    VISIBLE = True
    positive = 1.0  # the weight of a pixel on an outline in the boundary term

    def prepare(self, config, downloads, work, target):
        notes: list[str] = []
        source, pairs = segments.read(config.data, notes)
        written = segments.write(pairs, source, work)
        with atomic_folder(target / paths.DATASET) as temporary:
            summary = segments.store(written, config.data, source, notes, temporary)
        channels, height, width = written.pixels.shape[1:]
        model, shape = self._initial(config, summary["labels"], channels, height, width)
        with atomic_folder(target / paths.WEIGHTS) as temporary:
            models.save(model, temporary, summary["labels"])
        return summary | {"shape": asdict(shape), "inputs": f"images of {width} x {height} pixels, {channels} channels"}

    @staticmethod
    def _initial(config, labels: list[str], channels: int, height: int, width: int):
        """The model with its initial weights, and its shape, from which operations are counted."""
        from lockstep.model import metrics

        name = "unet" if config.model.name == "scratch" else config.model.name
        if name not in MODELS and not config.model.file:
            raise BadInput(
                f"model.name: image-segmentation has no {name}. Set it to {', '.join(MODELS)}, or to a model of your"
                " own (my_model.py:MyModel)."
            )
        inputs = {"pixel_values": torch.zeros(1, channels, height, width)}
        sizes = {"channels": channels, "height": height, "width": width, "classes": len(labels)}
        asked = convnets.NAMES.get(name, name), sizes, config.train.seed
        tried = own.initialise(*asked)
        own.require_scores(tried, inputs, (1, len(labels), height, width), f"{len(labels)} classes for each pixel")
        with torch.no_grad():
            outlines = _boundary(tried.eval()(**inputs))
        if not isinstance(outlines, torch.Tensor) or outlines.shape != (1, height, width):
            raise BadInput(
                f"model.name: {name} must return the scores of outlines too, as its boundary: a tensor"
                f" {[1, height, width]} for one sample, as a NamedTuple with logits and boundary does."
            )
        if hasattr(tried, "loss"):
            raise BadInput(
                f"model.name: {name} has a loss of its own, but that of image-segmentation is a sum of"
                f" {', '.join(TERMS)}. Remove it; train.loss_weights sets the weight of each."
            )
        return own.initialise(*asked), metrics.Shape.counted(tried, inputs)  # anew, as a forward pass may change it

    def load(self, split):
        return segments.Segments.load(split)

    def weights(self, samples):
        self.weigh_classes(samples.counts.sum(axis=0))
        self.positive = self.train.pos_weight or 1.0
        if self.positive == "balanced":
            on_outline = int(samples.outlines.sum(dtype=np.int64))
            self.positive = (samples.outlines.size - on_outline) / max(on_outline, 1)
        return self._counted(samples.counts, samples.labels[0].size)

    def _counted(self, counts: np.ndarray, pixels: int) -> dict[str, np.ndarray]:
        """Each image's weight in the mean of each term: float64 [n]. counts: its pixels of each class, [n, classes]."""
        each = np.ones(counts.shape[1]) if self.class_weights is None else self.class_weights[: counts.shape[1]]
        return {
            "cross_entropy": counts @ each,
            "hard_examples": np.ceil(self.train.hard_share * counts.sum(axis=1)),
            "boundary": np.full(len(counts), float(pixels)),
        }

    def loss(self, module, outputs, labels, dtype):
        return {name: of_images.sum() for name, of_images in self._losses(outputs, labels, dtype).items()}

    def _losses(self, outputs, labels: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Each term's sum over the pixels of each image: [n]."""
        mask, outlines = labels["mask"].long(), _boundary(outputs).to(dtype)
        count = len(mask)
        scores, flat = logits(outputs).to(dtype).movedim(1, -1).flatten(0, -2), mask.flatten()
        known = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": self.train.label_smoothing}
        plain = cross_entropy(scores, flat, **known).view(count, -1)
        weight = self.class_weights_beside(scores)
        weighted = plain if weight is None else cross_entropy(scores, flat, weight, **known).view(count, -1)
        most = (self.train.hard_share * (mask != IGNORED).flatten(1).sum(dim=1).double()).ceil()
        hardest = plain.sort(dim=1, descending=True, stable=True).values
        chosen = torch.arange(hardest.shape[1], device=hardest.device) < most[:, None]
        truth = labels["outlines"].to(dtype)
        counts = 1 + (self.positive - 1) * truth
        found = binary_cross_entropy_with_logits(outlines, truth, weight=counts, reduction="none")
        return {
            "cross_entropy": weighted.sum(dim=1),
            "hard_examples": (hardest * chosen).sum(dim=1),
            "boundary": found.flatten(1).sum(dim=1),
        }

    def results(self, outputs, labels):
        """Each image's confusion matrix, [classes * classes], and the sums of its terms: float32 [n, any]."""
        sums = self._losses(outputs, labels, torch.float32)
        confusions = confusion(logits(outputs), labels["mask"]).flatten(1).float()
        return torch.cat([confusions, *(sums[name][:, None] for name in TERMS)], dim=1)

    def scores(self, results, samples):
        classes = round((results.shape[1] - len(TERMS)) ** 0.5)
        confusions = results[:, : classes**2].double().view(-1, classes, classes).numpy()
        counted = self._counted(confusions.sum(axis=2), samples.labels[0].size)
        sums = dict(zip(TERMS, results[:, classes**2 :].double().sum(dim=0).tolist(), strict=True))
        means = [sums[name] / counted[name].sum() for name in TERMS]
        whole = confusions.sum(axis=0)
        counts = factors(self.train.loss_weights, TERMS)
        return {
            "loss": float(sum(factor * mean for factor, mean in zip(counts, means, strict=True))),
            "pixel_accuracy": pixel_accuracy(whole),
            "miou": miou(whole),
        }

    def draw(self, samples, ids, outputs):
        predicted = logits(outputs).argmax(dim=1).cpu().numpy().astype(np.uint8)
        truths = (np.asarray(samples.batch(np.array([at]), 1)["labels_mask"][0]) for at in ids)
        pixels = (_pixels(samples, int(at)) for at in ids)
        return segments.drawn(list(zip(pixels, truths, predicted, strict=True)))

    def convert(self, state, data, folder):
        super().convert(state, data, folder)
        shutil.copyfile(data / paths.DATASET / segments.ABOUT, folder / segments.ABOUT)

    def given(self, inputs):
        return [(file, "", Path(file)) for file in inputs]

    def choose(self, wanted, data):
        if wanted.texts or wanted.file:
            raise BadInput(
                "predict.texts, predict.file: this task predicts images, not texts. Leave both out: then it predicts"
                " held-out images."
            )
        split = paths.split_folder(data, "test")
        samples, names = self.load(split), _names(split)
        labels = read_json(data / paths.ABOUT_DATA)["labels"]
        if wanted.label is not None and wanted.label not in labels:
            raise BadInput(f"predict.label: {wanted.label!r} is not one of {', '.join(labels)}.")
        holds = samples.counts[:, labels.index(wanted.label)] > 0 if wanted.label else np.ones(len(samples), dtype=bool)
        places = np.flatnonzero(holds)
        chosen = places[np.random.default_rng(wanted.seed).permutation(len(places))[: wanted.count]]
        return [
            (names[at], segments.fractions(samples.labels[at], labels), np.asarray(samples.pixels[at])) for at in chosen
        ]

    def predict(self, folder, model, inputs):
        """The share of each class in each image, and the predicted mask as a PNG file of the image's size."""
        about = read_json(folder / segments.ABOUT)
        shape, labels = tuple(about["shape"]), about["labels"]
        pixels = [
            decoding.pixels(image, str(image), about["image_size"], "RGB") if isinstance(image, Path) else image
            for image in inputs
        ]
        for image, decoded in zip(inputs, pixels, strict=True):
            if decoded.shape != shape:
                raise BadInput(
                    f"{image}: is {decoded.shape[2]} x {decoded.shape[1]} pixels, but the model was trained on"
                    f" {shape[2]} x {shape[1]}. Resize it."
                )
        unknown = np.zeros((len(inputs), *shape[1:]), np.uint8)
        counts = np.zeros((len(inputs), len(labels)), np.int64)
        samples = segments.Segments(np.stack(pixels), unknown, unknown, counts, about["mean"], about["std"])
        masks = _predicted(model, samples)
        return [(segments.fractions(mask, labels), None, segments.mask_png(mask)) for mask in masks]

    def beside(self, split: Path, ids: list[int], masks: list[np.ndarray]) -> list[bytes]:
        """Images of the split stored in a folder, each drawn beside its true mask and one of `masks`, as PNG files."""
        samples = self.load(split)
        return [
            segments.drawn([(np.asarray(samples.pixels[at]), np.asarray(samples.labels[at]), mask)])
            for at, mask in zip(ids, masks, strict=True)
        ]

    def test(self, model, data, folder):
        split = paths.split_folder(data, "test")
        labels = read_json(data / paths.ABOUT_DATA)["labels"]
        return self._report(model, self.load(split), _names(split), labels, folder)

    def test_file(self, stored, model, data, folder, notes):
        """Test the model in `stored` on the images and masks that `data` names; writes the same files as `test`."""
        about = read_json(stored / segments.ABOUT)
        asked = replace(data, image_size=about["image_size"], labels=about["labels"])
        source, pairs = segments.read(asked, notes)
        names, pixels, masks, outlines = [], [], [], []
        for name, image, mask, outline in pairs:
            if image.shape != tuple(about["shape"]):
                raise BadInput(
                    f"{source}: {name} is {image.shape[2]} x {image.shape[1]} pixels, but the model was trained on"
                    f" {about['shape'][2]} x {about['shape'][1]}. Resize it."
                )
            names.append(name)
            pixels.append(image)
            masks.append(mask)
            outlines.append(outline)
        if not names:
            raise BadInput(f"{source}: holds no images.")
        counts = np.stack([np.bincount(mask.ravel(), minlength=IGNORED)[: len(about["labels"])] for mask in masks])
        arrays = (np.stack(array) for array in (pixels, masks, outlines))
        samples = segments.Segments(*arrays, counts, about["mean"], about["std"])
        return self._report(model, samples, names, about["labels"], folder)

    def _report(self, model, samples: segments.Segments, names: list[str], labels: list[str], folder: Path) -> dict:
        """Compare the model's predictions with the masks; writes the report, and a line and a mask for each image."""
        masks = _predicted(model, samples)
        confusions = [
            _confusion(np.asarray(truth), mask, len(labels)) for truth, mask in zip(samples.labels, masks, strict=True)
        ]
        whole = np.sum(confusions, axis=0)
        scores = {
            "labels": labels,
            "support": int(whole.sum()) * self.times_counted,
            "images": len(samples) * self.times_counted,
            "pixel_accuracy": pixel_accuracy(whole),
            "miou": miou(whole),
            "iou": dict(zip(labels, ious(whole), strict=True)),
            "confusion_matrix": (whole * self.times_counted).tolist(),
        }
        write_text(folder / paths.TEST_TEXT, _table(scores, whole))
        write_csv(
            folder / paths.TEST_PREDICTIONS,
            ["image", "pixels", "pixel_accuracy", "miou", *(f"iou_{name}" for name in labels)],
            (
                [name, int(of_image.sum()), f"{pixel_accuracy(of_image):.6f}", f"{miou(of_image):.6f}"]
                + ["" if iou is None else f"{iou:.6f}" for iou in ious(of_image)]
                for name, of_image in zip(names, confusions, strict=True)
            ),
        )
        for number, mask in enumerate(masks):
            file = paths.test_mask(folder, number)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(segments.mask_png(mask))
        write_json(folder / paths.TEST_REPORT, scores)
        return scores


def _boundary(outputs) -> torch.Tensor | None:
    """The logits of outlines that a model returned, float [n, height, width]; None if it returned none."""
    return outputs.get("boundary") if isinstance(outputs, dict) else getattr(outputs, "boundary", None)


def _names(split: Path) -> list[str]:
    return np.load(split / images.NAMES, allow_pickle=False).tolist()


def _pixels(samples, at: int) -> np.ndarray:
    """A stored image of a split, or of a subset of a split: uint8 [channels, height, width]."""
    whole, at = (samples.samples, int(samples.ids[at])) if hasattr(samples, "ids") else (samples, at)
    return np.asarray(whole.pixels[at])


def _predicted(model: torch.nn.Module, samples: segments.Segments) -> np.ndarray:
    """The most likely class of each pixel of every image, in order: uint8 [n, height, width]. nan raises RunFailed."""
    device, parts = next(model.parameters()).device, []
    with torch.inference_mode():
        for ids in samples.batches(BATCH):
            pixels = torch.from_numpy(samples.batch(ids, 1)["pixel_values"]).to(device)
            scores = logits(model(pixel_values=pixels))
            if scores.isnan().any():  # argmax would take the first nan for the prediction
                raise RunFailed(NO_NUMBERS)
            parts.append(scores.argmax(dim=1).cpu().numpy().astype(np.uint8))
    return np.concatenate(parts)


def confusion(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The confusion matrix of each image, over its pixels: int64 [n, classes, classes], the true class first.

    scores: [n, classes, height, width]; masks: [n, height, width], whose pixels without a class are not counted.
    """
    count, classes = scores.shape[:2]
    truth, guess = masks.long(), scores.argmax(dim=1)
    image = torch.arange(count, device=scores.device).view(-1, 1, 1)
    places = ((image * classes + truth) * classes + guess)[truth != IGNORED]
    return places.bincount(minlength=count * classes**2).view(count, classes, classes)


def _confusion(truth: np.ndarray, guess: np.ndarray, classes: int) -> np.ndarray:
    """The confusion matrix of one image's mask and its predicted mask: int64 [classes, classes]."""
    known = truth != IGNORED
    places = truth[known].astype(np.int64) * classes + guess[known]
    return np.bincount(places, minlength=classes**2).reshape(classes, classes)


def pixel_accuracy(matrix: np.ndarray) -> float:
    """The share of pixels whose class is predicted correctly; matrix: [classes, classes], the true class first."""
    return float(np.trace(matrix) / max(matrix.sum(), 1))


def ious(matrix: np.ndarray) -> list[float | None]:
    """Intersection over union (Jaccard index) of each class, as for PASCAL VOC (Everingham et al. 2010).

    It is None for a class that has no pixel, neither true nor predicted.
    """
    right, union = np.diag(matrix), matrix.sum(axis=0) + matrix.sum(axis=1) - np.diag(matrix)
    return [float(hits / pixels) if pixels else None for hits, pixels in zip(right, union, strict=True)]


def miou(matrix: np.ndarray) -> float:
    """The mean intersection over union of the classes that have any pixel, true or predicted."""
    there = [iou for iou in ious(matrix) if iou is not None]
    return float(np.mean(there)) if there else 0.0


def _table(scores: dict, matrix: np.ndarray) -> str:
    """The test report as text: the figures of each class, and of all classes."""
    lines = [f"{'':<20}{'IoU':>10}{'precision':>12}{'recall':>10}{'pixels':>12}"]
    for number, (name, iou) in enumerate(scores["iou"].items()):
        right, taken, there = matrix[number, number], matrix[:, number].sum(), matrix[number].sum()
        figures = [iou, right / taken if taken else None, right / there if there else None]
        told = ["-" if figure is None else f"{figure:.4f}" for figure in figures]
        lines.append(f"{name:<20}{told[0]:>10}{told[1]:>12}{told[2]:>10}{int(there):>12,}")
    pixels = f"over {int(matrix.sum()):,} pixels of {scores['images']:,} images; pixels of no class are not counted"
    return "\n".join(
        [*lines, "", f"mIoU {scores['miou']:.4f}, pixel accuracy {scores['pixel_accuracy']:.4f}", pixels, ""]
    )
