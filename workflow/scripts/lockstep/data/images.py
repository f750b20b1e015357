"""Store decoded images, and make batches of them."""

import hashlib
import io
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lockstep.config.sections import Data
from lockstep.data import mapped, prepared
from lockstep.data.image_sources import Image
from lockstep.data.labels import Labels
from lockstep.errors import BadInput
from lockstep.files import hash_arrays, read_json, write_json
from lockstep.paths import require

PIXELS, LABELS, NAMES = "pixels.npy", "labels.npy", "names.npy"
ABOUT = "images.json"  # how pixels are normalised; part of a prepared data set and of a converted model
PART = 1000  # the number of images in memory at a time


class Images:
    """One prepared split: pixels uint8 [n, channels, height, width], memory-mapped, and labels int64 [n].

    mean, std: float32 [channels], for pixels from 0 to 1.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, mean, std):
        self.pixels, self.labels = pixels, labels
        self.lengths = np.ones(len(labels), dtype=np.int64)
        std = np.asarray(std, dtype=np.float32)
        self.scale = (1 / (255 * std))[:, None, None].astype(np.float32)
        self.shift = (np.asarray(mean, dtype=np.float32) / std)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def load(split: Path) -> "Images":
        """Load the split stored in a folder such as results/data/dataset/train."""
        require(split / PIXELS, "prepare.py")
        about = read_json(split.parent / ABOUT)
        try:
            pixels = mapped.array(split / PIXELS)
            labels = np.load(split / LABELS, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise prepared.damaged(split, error) from None
        return Images(pixels, labels, about["mean"], about["std"])

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Images `ids`: pixel_values float32 [len(ids), channels, height, width], labels [len(ids)]."""
        return {"pixel_values": self.pixels[ids] * self.scale - self.shift, "labels": self.labels[ids]}

    def batches(self, size: int) -> list[np.ndarray]:
        """All ids in batches of at most `size`."""
        return np.array_split(np.arange(len(self)), range(size, len(self), size))


class Written:
    """The images of a source, written to a file while they are read; their pixels are memory-mapped from there."""

    def __init__(self, images: Iterator[Image], file: Path, labels: Labels):
        self.names: list[str] = []
        codes, tests, digests = array("q"), array("b"), bytearray()
        self.shape: tuple[int, ...] | None = None
        with file.open("wb") as stream:
            for name, pixels, label, part in images:
                if self.shape is None:
                    self.shape = pixels.shape
                if pixels.shape != self.shape:
                    raise BadInput(
                        f"{name}: is {size(pixels.shape)}, but {self.names[0]} is {size(self.shape)}. All images must"
                        " have one shape: set data.image_size to resize them, and save all in grey or all in colour."
                    )
                stream.write(np.ascontiguousarray(pixels).tobytes())
                digests += hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
                self.names.append(name)
                codes.append(labels.number(label, name))
                tests.append(part == "test")
        if not self.names:
            return
        self.codes = np.frombuffer(codes, np.int64)  # each image's label, as its number in `labels`
        self.tests = np.frombuffer(tests, np.int8).astype(bool)  # whether the source assigns it to the test split
        self.pixels = np.memmap(file, np.uint8, mode="r", shape=(len(self.names), *self.shape))
        self.digests = np.frombuffer(digests, "S16")


def size(shape: tuple[int, ...]) -> str:
    """The shape of an image, [channels, height, width], in words."""
    return f"{shape[2]} x {shape[1]} pixels (channels: {shape[0]})"


def store(written: Written, numbers: np.ndarray, parts: dict[str, np.ndarray], data: Data, folder: Path) -> dict:
    """Write every split of images to `folder`. Returns the hash, and how pixels are normalised.

    numbers: int64 [n], each image's label; parts: the positions of each split's images.
    """
    arrays = {}
    for name, places in parts.items():
        split = folder / name
        split.mkdir()
        pixels = np.lib.format.open_memmap(
            split / PIXELS, mode="w+", dtype=np.uint8, shape=(len(places), *written.shape)
        )
        for first in range(0, len(places), PART):
            pixels[first : first + PART] = written.pixels[places[first : first + PART]]
        pixels.flush()
        np.save(split / LABELS, numbers[places])
        np.save(split / NAMES, np.array([written.names[position] for position in places]))
        arrays |= {f"{name}/pixels": np.asarray(pixels), f"{name}/labels": numbers[places]}
    about = normalisation(arrays["train/pixels"], data)
    write_json(folder / ABOUT, about)
    return {"hash": hash_arrays(arrays | asked_normalisation(data)), "images": about}


def normalisation(pixels: np.ndarray, data: Data) -> dict:
    """Mean and standard deviation for normalising pixels: those of `data`, or else of the training split.

    pixels: the training split, uint8 [n, channels, height, width]. Raises BadInput if `data` has another number of
    channels.
    """
    for key, given in (("mean", data.mean), ("std", data.std)):
        if given is not None and len(given) != pixels.shape[1]:
            raise BadInput(f"data.{key}: has {len(given)} numbers, but the images have {pixels.shape[1]} channels.")
    mean, std = _statistics(pixels)
    return {
        "mean": data.mean or mean,
        "std": data.std or std,
        "shape": list(pixels.shape[1:]),
        "image_size": data.image_size,
    }


def asked_normalisation(data: Data) -> dict[str, np.ndarray]:
    """The mean and deviation that `data` sets, for the hash of a data set; others follow from its pixels."""
    asked = {"mean": data.mean, "std": data.std}
    return {name: np.array(numbers, dtype=np.float64) for name, numbers in asked.items() if numbers is not None}


def _statistics(pixels: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, for pixels from 0 to 1; 1 for a constant channel's deviation."""
    counts = np.stack([np.bincount(pixels[:, channel].ravel(), minlength=256) for channel in range(pixels.shape[1])])
    values, total = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / total
    varies = np.count_nonzero(counts, axis=1) > 1  # of a constant channel rounding may leave a variance of 1e-17
    std = np.sqrt(np.where(varies, counts @ values**2 / total - mean**2, 1.0))
    return mean.tolist(), std.tolist()


def png(pixels: np.ndarray) -> bytes:
    """A stored image, uint8 [channels, height, width], as a PNG file."""
    from PIL import Image as Picture

    return encoded(Picture.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))


def encoded(picture) -> bytes:
    """A PIL image as a PNG file."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return stream.getvalue()
