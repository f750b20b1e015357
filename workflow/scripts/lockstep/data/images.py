"""Images as they are stored, decoded once, and batches made of them; and the sources that they come from.

A source yields (name, pixels, label, part): pixels are uint8 [channels, height, width]; part is the split ("train",
"test") that the source itself puts an image in, or "".
"""

import gzip
import hashlib
import io
import itertools
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import numpy as np

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import mapped, prepared, sources
from lockstep.errors import BadInput, brief
from lockstep.files import hash_arrays, read_json, write_json
from lockstep.paths import require

PIXELS, LABELS, NAMES = "pixels.npy", "labels.npy", "names.npy"
ABOUT = "images.json"  # of a prepared data set, and of a converted model: how pixels become numbers
ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
DIVIDED = {"train", "training", "dev", "val", "valid", "validation", "test", "testing"}  # folders that are no classes
PART = 1000  # so many images are worked on at a time
WHITE = 2**16 - 1  # of images of 16 bits
IDX_BYTE = 0x08  # the type of an idx file's numbers: unsigned bytes

Image = tuple[str, np.ndarray, object, str]


class Images:
    """One prepared split: pixels uint8 [n, channels, height, width], memory-mapped, and labels int64 [n].

    mean, std: float32 [channels], of pixels from 0 to 1.
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
        """The split stored at a folder, as in results/data/dataset/train."""
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


def read(data: Data, downloads: Path, notes: list[str]) -> tuple[str, Iterator[Image]]:
    """The source's name, and its images, at most `data.limit` of them. Raises BadInput."""
    if data.embedded:
        name, images = "scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels)", _digits(data)
    elif data.path:
        name, images = data.path, _folder(Path(data.path), data, notes)
    elif data.url:
        raise BadInput(
            "data.url: names one file. For images set data.mirrors and data.files, or data.path to a folder."
        )
    elif data.files:
        name, images = " or ".join(data.mirrors), _idx(_fetched(data, downloads), data)
    else:
        name, images = f"{data.hub}@{data.revision}", _hub(data)
    return name, itertools.islice(images, data.limit)


def _digits(data: Data) -> Iterator[Image]:
    from sklearn.datasets import load_digits  # E. Alpaydin, C. Kaynak: UCI, 1998; values from 0 to 16

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True), 1):
        yield f"{number}", _grey(np.round(pixels * (255 / 16)).astype(np.uint8), data), int(label), ""


def _folder(folder: Path, data: Data, notes: list[str]) -> Iterator[Image]:
    """A folder of idx files, or one with a folder of files for each class."""
    if not folder.is_dir():
        raise BadInput(
            f"data.path: {folder} is not a folder. Name one of idx files, or with a folder for each class."
            f"{containers.outside(str(folder))}"
        )
    idx = sorted(file for file in folder.iterdir() if "idx3" in file.name and not _hidden(file, folder))
    if idx:
        yield from _idx(idx, data)
        return
    classes = sorted(part for part in folder.iterdir() if part.is_dir() and not _hidden(part, folder))
    if not classes:
        raise BadInput(f"data.path: {folder} has neither idx files (*-images-idx3-ubyte) nor a folder for each class.")
    if all(part.name.lower() in DIVIDED and any(inner.is_dir() for inner in part.iterdir()) for part in classes):
        raise BadInput(
            f"data.path: {folder} has {', '.join(part.name for part in classes)}, and not a folder for each class. Name"
            f" one of them, as {classes[0]}; Lockstep divides it by data.splits."
        )
    for part in classes:
        inside = sorted(file for file in part.rglob("*") if not file.is_dir() and not _hidden(file, folder))
        images = [file for file in inside if file.suffix.lower() in ENDINGS]
        if len(images) < len(inside):
            others = sorted({file.suffix or file.name for file in inside if file.suffix.lower() not in ENDINGS})
            notes.append(
                f"{part}: {len(inside) - len(images)} files are no images by their ending: {', '.join(others)}"
            )
        if not images:
            notes.append(f"{part} holds no image, and is not a class")
        for file in images:
            name = str(file.relative_to(folder))
            if sources.HALF.search(name):
                raise BadInput(f"{str(file)!a}: its name is not UTF-8. Rename it, or its folder.")
            yield name, _decode(file, str(file), data), part.name, ""


def _hidden(file: Path, folder: Path) -> bool:
    """Whether a file below `folder` is what systems and editors put beside one's own: ._1.png, .ipynb_checkpoints."""
    return any(part.startswith(".") or part == "__MACOSX" for part in file.relative_to(folder).parts)


def _idx(files: list[Path], data: Data) -> Iterator[Image]:
    """Images and labels of idx files, those of the training set first. One beside a training set is its test set."""
    images = [file for file in files if "images" in file.name and "idx3" in file.name]
    if not images:
        raise BadInput(f"{files[0].parent}: holds no images (*-images-idx3-ubyte).")
    several = any("train" in file.name for file in images) and len(images) > 1
    for file in sorted(images, key=lambda file: ("train" not in file.name, file.name)):
        label_file = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1"))
        fetched = {other.name: other for other in files}
        pixels, labels = read_idx(file, 3), read_idx(fetched.get(label_file.name, label_file), 1)
        if not pixels[0:1].size and len(pixels):
            raise BadInput(f"{file}: its images have no pixels: {pixels.shape[2]} x {pixels.shape[1]}. Fetch it again.")
        if len(pixels) != len(labels):
            raise BadInput(f"{file}: holds {len(pixels)} images, and {label_file.name} {len(labels)} labels.")
        part = ("train" if "train" in file.name else "test") if several else ""
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            yield f"{file.name.split('-')[0]} {number}", _grey(image, data), int(label), part


def _grey(pixels: np.ndarray, data: Data) -> np.ndarray:
    """uint8 [height, width] as an image, [1, height, width], of the size that is asked for."""
    if data.image_size is None:
        return pixels[None]
    from PIL import Image as Picture

    return _decode(Picture.fromarray(pixels), "", data)


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """The unsigned bytes of an idx file (http://yann.lecun.com/exdb/mnist/), gzip-compressed or not: uint8 [n, ...].

    It begins with 0, 0, the type of its numbers, how many dimensions it has, and the size of each, in four bytes that
    begin with the highest. Raises BadInput.
    """
    if not file.is_file():
        raise BadInput(f"{file}: is not a file. Labels stand beside images, under the same name with labels and idx1.")
    try:
        with (gzip.open if sources.packed(file) else open)(file, "rb") as stream:
            content = stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{file}: is not a whole gzip file: {error}. Fetch it again.") from None
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, IDX_BYTE, dimensions)):
        raise BadInput(
            f"{file}: is not an idx file of bytes (dimensions: {dimensions}): it begins"
            f" with {content[:4].hex(' ') or 'nothing'}, not 00 00 08 {dimensions:02x}."
        )
    if len(content) < header:
        raise BadInput(f"{file}: ends within its first {header} bytes, which say what it holds. Fetch it again.")
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected = int(np.prod(sizes, dtype=object))
    if len(content) - header != expected:
        shape = " x ".join(map(str, sizes))
        raise BadInput(
            f"{file}: says that it holds {shape} bytes, which are {expected:,}, and has {len(content) - header:,}."
            " It is truncated or damaged; fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _fetched(data: Data, downloads: Path) -> list[Path]:
    """The files of data.files, from the first mirror that has each."""
    files = []
    for name, sha256 in data.files.items():
        reasons = []
        for mirror in data.mirrors:
            try:
                file = sources.download(urljoin(mirror.rstrip("/") + "/", name), sha256, downloads)
                break
            except BadInput as error:
                reasons.append(str(error))
        else:
            none = "data.mirrors: is empty; name the folders that hold data.files."
            raise BadInput("; ".join(reasons) or none)
        named = downloads / name
        if not named.exists() or not named.samefile(file):
            named.unlink(missing_ok=True)
            named.hardlink_to(file)
        files.append(named)
    return files


def _hub(data: Data) -> Iterator[Image]:
    for number, row in sources.hub_rows(data):
        where = f"{data.hub}@{data.revision}, row {number}"
        for column in (data.image, data.label):
            if column not in row:
                raise BadInput(f"{where}: has no column {column!r}; it has {', '.join(map(repr, row))}.")
        yield f"{number}", _decode(row[data.image], where, data), row[data.label], ""


def decode_file(file: Path, size: int | None, channels: int) -> np.ndarray:
    """An image file, to predict it: uint8 [channels, height, width]. Raises BadInput."""
    return scaled_pixels(file, str(file), size, "L" if channels == 1 else "RGB")


def _decode(source, where: str, data: Data) -> np.ndarray:
    return scaled_pixels(source, where, data.image_size, None)


def scaled_pixels(source, where: str, size: int | None, mode: str | None) -> np.ndarray:
    """An image as PIL reads it; grey where it is grey, else red, green and blue, unless `mode` says which."""
    from PIL import Image as Picture
    from PIL import ImageOps, UnidentifiedImageError

    try:
        picture = source if isinstance(source, Picture.Image) else Picture.open(source)
        picture = ImageOps.exif_transpose(picture)  # as its camera was held
        mode = mode or ("L" if picture.mode in ("1", "L", "LA") or picture.mode.startswith("I") else "RGB")
        if picture.mode.startswith("I"):  # 16 bits, which PIL would cut off instead of scaling
            values = np.asarray(picture)
            if values.min() < 0 or values.max() > WHITE:
                raise ValueError(f"it has numbers from {values.min()} to {values.max()}, and white is {WHITE}")
            picture = Picture.fromarray((values / 257).round().astype(np.uint8))
        if picture.mode == "F":  # which PIL would cut off to whole numbers
            raise ValueError("its pixels are fractions, of which nobody says what is white")
        picture = picture.convert(mode)
        if size:
            picture = picture.resize((size, size), Picture.Resampling.BILINEAR)
        pixels = np.asarray(picture, dtype=np.uint8)
    except FileNotFoundError:
        raise BadInput(f"{where}: is not a file. Name an existing one.") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Picture.DecompressionBombError) as error:
        raise BadInput(f"{where}: can't be decoded as an image: {brief(error)}. Remove it, or save it anew.") from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


class Written:
    """The images of a source, written to a file as they come: pixels are read from there when they are needed."""

    def __init__(self, images: Iterator[Image], file: Path):
        self.names: list[str] = []
        self.labels: list = []  # the different ones
        codes, tests, numbers = array("q"), array("b"), {}
        digests = bytearray()
        self.shape: tuple[int, ...] | None = None
        with file.open("wb") as stream:
            for name, pixels, label, part in images:
                if self.shape is None:
                    self.shape = pixels.shape
                if pixels.shape != self.shape:
                    raise BadInput(
                        f"{name}: is {_size(pixels.shape)}, and {self.names[0]} is {_size(self.shape)}. Images must be"
                        " alike: set data.image_size to have all brought to one size, and save grey and coloured ones"
                        " alike."
                    )
                stream.write(np.ascontiguousarray(pixels).tobytes())
                digests += hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
                self.names.append(name)
                codes.append(numbers.setdefault((type(label), label), len(numbers)))
                tests.append(part == "test")
        if not self.names:
            return
        self.labels = [label for _, label in numbers]
        self.codes = np.frombuffer(codes, np.int64)  # of each image, where its label stands among them
        self.tests = np.frombuffer(tests, np.int8).astype(bool)  # whether its source keeps it for the test
        self.pixels = np.memmap(file, np.uint8, mode="r", shape=(len(self.names), *self.shape))
        self.digests = np.frombuffer(digests, "S16")


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[2]} x {shape[1]} pixels (channels: {shape[0]})"


def store(written: Written, numbers: np.ndarray, parts: dict[str, np.ndarray], data: Data, folder: Path) -> dict:
    """Write every split of images to `folder`. Returns the hash, and how pixels become numbers.

    numbers: int64, each image's label; parts: the positions of each split's images.
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
    mean, std = _statistics(arrays["train/pixels"])
    for key, given in (("mean", data.mean), ("std", data.std)):
        if given is not None and len(given) != written.shape[0]:
            raise BadInput(f"data.{key}: has {len(given)} numbers, and the images have {written.shape[0]} channels.")
    about = {
        "mean": data.mean or mean,
        "std": data.std or std,
        "shape": list(written.shape),
        "image_size": data.image_size,
    }
    write_json(folder / ABOUT, about)
    return {"hash": hash_arrays(arrays), "images": about}


def _statistics(pixels: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, of pixels from 0 to 1; a channel without any variation has 1."""
    counts = np.stack([np.bincount(pixels[:, channel].ravel(), minlength=256) for channel in range(pixels.shape[1])])
    values, total = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / total
    std = np.sqrt(counts @ values**2 / total - mean**2)
    return mean.tolist(), np.where(std > 0, std, 1.0).tolist()


def png(pixels: np.ndarray) -> bytes:
    """A stored image, uint8 [channels, height, width], as a PNG file."""
    from PIL import Image as Picture

    stream = io.BytesIO()
    shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    Picture.fromarray(shown).save(stream, format="PNG", optimize=True)
    return stream.getvalue()
