"""image-classification: a label for each image, by a small convolutional network, a transformers model, or your own.

Images are decoded once and memory-mapped; pixels are normalised when a batch is made. A model takes pixel_values, float
[n, channels, height, width], and returns the logits of the labels, float [n, labels].
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from lockstep import paths
from lockstep.data import decoding, image_sources, images
from lockstep.data.labels import Labels
from lockstep.errors import BadInput
from lockstep.files import atomic_folder, read_json
from lockstep.model import convnets, models, own
from lockstep.tasks import _classification

MODELS = ("basicnet", "basicnet_bn", "resnet")


class Task(_classification.Task):
    UNIT, INPUT, EXAMPLE = "images", "image", "as in --image my.png"

    VISIBLE = True

    def prepare(self, config, downloads, work, target):
        from lockstep.data import prepare

        notes: list[str] = []
        labels = Labels(config.data.labels)
        source, rows = image_sources.read(config.data, downloads, notes)
        written = images.Written(rows, work / "pixels", labels)
        if not written.names:
            raise BadInput(f"{source}: holds no images.")
        numbers, parts, summary = prepare.divide(
            written.digests,
            written.codes,
            labels,
            lambda at: f"image {written.names[at]}",
            config.data,
            source,
            notes,
            "image",
            written.tests if written.tests.any() else None,
        )
        summary["synthetic"] = False  # even scikit-learn's digits were written by people
        with atomic_folder(target / paths.DATASET) as temporary:
            summary |= images.store(written, numbers, parts, config.data, temporary)
        channels, height, width = written.shape
        model, shape = self._initial(config, summary["labels"], channels, height, width, notes)
        with atomic_folder(target / paths.WEIGHTS) as temporary:
            models.save(model, temporary, summary["labels"])
        return summary | {"shape": asdict(shape), "inputs": f"images of {width} x {height} pixels, {channels} channels"}

    def alike(self, count, length, config):
        size, channels = config["image_size"], config.get("num_channels", 3)
        height, width = size if isinstance(size, list) else (size, size)
        pixels = np.broadcast_to(np.uint8(0), (count, channels, height, width))
        return images.Images(pixels, np.zeros(count, dtype=np.int64), [0.5] * channels, [0.5] * channels)

    @staticmethod
    def _initial(config, labels: list[str], channels: int, height: int, width: int, notes: list[str]):
        """The model with its initial weights, and its shape, from which operations are counted."""
        from lockstep.model import metrics, pretrained

        name = "basicnet" if config.model.name == "scratch" else config.model.name
        inputs = {"pixel_values": torch.zeros(1, channels, height, width)}
        if name in MODELS or config.model.file:
            sizes = {"channels": channels, "height": height, "width": width, "classes": len(labels)}
            own_name = convnets.NAMES.get(name, name)
            tried = own.initialise(own_name, sizes, config.train.seed)
            own.require_scores(tried, inputs, (1, len(labels)), f"{len(labels)} classes")
            model = own.initialise(own_name, sizes, config.train.seed)  # anew, as a forward pass may change a model
        else:
            from transformers import AutoModelForImageClassification

            torch.manual_seed(config.train.seed)
            model = tried = pretrained.load(AutoModelForImageClassification, config.model, notes, labels)
            try:
                with torch.no_grad():
                    model.eval()(**inputs)
            except (RuntimeError, ValueError) as error:
                raise BadInput(
                    f"model.name: {name} can't take images of {width} x {height} pixels in {channels} channels"
                    f" ({' '.join(str(error).split())}). Set data.image_size to the size that it was trained on."
                ) from None
        return model, metrics.Shape.counted(tried, inputs)

    def load(self, split):
        return images.Images.load(split)

    def columns(self, split):
        return {"image": np.load(split / images.NAMES, allow_pickle=False).tolist()}

    def convert(self, state, data, folder):
        super().convert(state, data, folder)
        shutil.copyfile(data / paths.DATASET / images.ABOUT, folder / images.ABOUT)

    def given(self, inputs):
        return [(file, "", Path(file)) for file in inputs]

    def choose(self, wanted, data):
        if wanted.texts or wanted.file:
            raise BadInput(
                "predict.texts, predict.file: this task predicts images, not texts. Leave both out: then it predicts"
                " held-out images."
            )
        split = paths.split_folder(data, "test")
        samples, names = self.load(split), self.columns(split)["image"]
        chosen = self.held_out(wanted, samples.labels, data)
        return [(names[at], truth, np.asarray(samples.pixels[at])) for at, truth in chosen]

    def pictures(self, split, ids):
        pixels = self.load(split).pixels
        return [images.png(np.asarray(pixels[at])) for at in ids]

    def read_labelled(self, stored, data, notes, labels):
        about = _about(stored)
        _, rows = image_sources.read(replace(data, image_size=about["image_size"]), Path(), notes)
        names, pixels, codes = [], [], []
        for name, image, label, _ in rows:
            _require_shape(name, image, about)
            names.append(name)
            pixels.append(image)
            codes.append(labels.number(label, name))
        return {"image": names}, pixels, codes

    def samples_of(self, folder, inputs, model):
        about = _about(folder)
        pixels = [
            decoding.decode_file(image, about["image_size"], about["shape"][0]) if isinstance(image, Path) else image
            for image in inputs
        ]
        for image, decoded in zip(inputs, pixels, strict=True):
            _require_shape(image, decoded, about)
        unknown = np.zeros(len(inputs), dtype=np.int64)
        return images.Images(np.stack(pixels), unknown, about["mean"], about["std"])


def _about(folder: Path) -> dict:
    """How the model stored in a folder reads images. Raises BadInput if nothing says so."""
    if not (folder / images.ABOUT).is_file():
        raise BadInput(
            f"{folder}: holds no {images.ABOUT}, which says how a model of Lockstep reads images. Other models of"
            " images can't be tested or predict here; train one from it (model.name)."
        )
    return read_json(folder / images.ABOUT)


def _require_shape(image: object, pixels: np.ndarray, about: dict) -> None:
    """Raise BadInput if an image has another shape than those that a model was trained on."""
    if pixels.shape != (wanted := tuple(about["shape"])):
        raise BadInput(
            f"{image}: is {images.size(pixels.shape)}, but the model was trained on {images.size(wanted)}. Convert it."
        )
