"""Read images from folders, idx files, a data set of the hub, or scikit-learn's digits, one image at a time.

A source yields (name, pixels, label, part): pixels are uint8 [channels, height, width]; part is the split ("train" or
"test") that the source assigns to an image, or "".
"""

import gzip
import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import numpy as np

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import decoding, sources
from lockstep.data.decoding import ENDINGS, Remarks
from lockstep.data.labels import HALF
from lockstep.errors import BadInput, listed
from lockstep.files import open_bytes

# Names of folders that are splits of a data set rather than classes: train, Test_set, validation-images.
SPLIT = re.compile(
    r"(train(ing)?|trn|dev|val|valid|validation|eval|evaluation|test(ing)?|tst)([ _-]?(set|data|images?|imgs|split))?",
    re.IGNORECASE,
)
# A weaker sign, used if the folders' content also suggests splits: seg_train, fold1, 2019, x_test, 训练集.
PART = re.compile(r"tr(ai)?n|te?st|val|eval|dev|pred|fold|part|split|\d|训练|测试|验证", re.IGNORECASE)
IDX_BYTE = 0x08  # the type code of unsigned bytes in an idx file
# Names of folders that hold the samples for training, and those for tests, of a data set that is divided already.
FOR_TRAINING = re.compile(r"(?<![a-z])(train|trn|lern|entra[iî]n|labell?ed)|训练")
FOR_TESTS = re.compile(
    r"(?<![a-z])(te?st|valid|val(?![a-z])|eval|dev(?![a-z])|query|holdout|pred|unlabel)|[测验]试?证?集"
)
IDX_PART = re.compile(r"(train|test|t10k)[-_.]*$")  # the split at the end of an idx file's name before "images"

Image = tuple[str, np.ndarray, object, str]


def read(data: Data, downloads: Path, notes: list[str]) -> tuple[str, Iterator[Image]]:
    """The source's name, and its images, at most `data.limit`. `notes` is complete after the last image.

    Raises BadInput.
    """
    remarks = Remarks()
    if data.embedded:
        name, images = "scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels)", _digits(data, remarks)
    elif data.path:
        name, images = data.path, _folder(Path(data.path), data, notes, remarks)
    elif data.url:
        raise BadInput(
            "data.url: names a single file. For images set data.mirrors and data.files, or data.path to a folder."
        )
    elif data.files:
        name, images = " or ".join(data.mirrors), _idx(_fetched(data, downloads), data, remarks)
    else:
        name, images = f"{data.hub}@{data.revision}", _hub(data, remarks)
    return name, _remarked(itertools.islice(images, data.limit), remarks, notes)


def _remarked(images: Iterator[Image], remarks: Remarks, notes: list[str]) -> Iterator[Image]:
    yield from images
    notes += remarks.notes()


def _digits(data: Data, remarks: Remarks) -> Iterator[Image]:
    from sklearn.datasets import load_digits  # E. Alpaydin, C. Kaynak: UCI, 1998; values from 0 to 16

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True), 1):
        pixels = np.round(image * (255 / 16)).astype(np.uint8)
        yield f"{number}", _grey(pixels, f"{number}", data, remarks), int(label), ""


def _folder(folder: Path, data: Data, notes: list[str], remarks: Remarks) -> Iterator[Image]:
    """Read a folder of idx files, or one that has a folder of image files for each class."""
    if not folder.is_dir():
        raise BadInput(
            f"data.path: {folder} is not a folder. Name one with idx files, or with a folder for each class."
            f"{containers.outside(str(folder))}"
        )
    if idx := _idx_files(folder):
        yield from _idx(idx, data, remarks)
        return
    for part in _classes(folder, notes):
        inside = _files(part)
        images = [file for file in inside if file.suffix.lower() in ENDINGS]
        if len(images) < len(inside):
            others = sorted({file.suffix or file.name for file in inside if file.suffix.lower() not in ENDINGS})
            notes.append(f"{part}: {len(inside) - len(images)} files have no ending of an image: {listed(others)}")
        if not images:
            notes.append(f"{part} holds no image, and is not taken for a class")
        for file in images:
            name = str(file.relative_to(folder))
            if HALF.search(name):
                raise BadInput(f"{str(file)!a}: its name is not UTF-8. Rename it, or its folder.")
            yield name, decoding.pixels(file, str(file), data.image_size, remarks=remarks), part.name, ""


def _idx_files(folder: Path) -> list[Path]:
    """The idx files in a folder.

    Some archives unpack each idx file into a folder of its name; if there are no files, those folders are searched.
    """
    files = [file for file in folder.iterdir() if re.search("idx[13]", file.name) and not _hidden(file.name)]
    if not any(file.is_file() for file in files):
        files = [inner for part in files if part.is_dir() for inner in part.iterdir() if "idx" in inner.name]
    return sorted(file for file in files if file.is_file())


def _classes(folder: Path, notes: list[str]) -> list[Path]:
    """The folders in `folder`, which are the classes. Raises BadInput if they seem to be something else."""
    parts = sorted(part for part in folder.iterdir() if part.is_dir() and not _hidden(part.name))
    if not parts:
        raise BadInput(f"data.path: {folder} has neither idx files (*-images-idx3-ubyte) nor a folder for each class.")
    # For each folder, its subfolders that hold images.
    inner = {part: [sub for sub in sorted(part.iterdir()) if sub.is_dir() and _holds_image(sub)] for part in parts}
    splits = [part for part in parts if SPLIT.fullmatch(part.name)]
    trains = [part for part in splits if part.name.lower().startswith("tr")]
    if trains or len(splits) > 1 or any(inner[part] for part in splits):
        with_classes = next((part for part in [*trains, *splits] if len(inner[part]) > 1), None)
        name = f"Set data.path: {with_classes}" if with_classes else "Make one for each class"
        raise BadInput(
            f"data.path: {folder} is split already ({listed(part.name for part in parts)}), and has no folder for each"
            f" class. {name}; Lockstep splits it by data.splits."
        )
    names = [{sub.name for sub in inner[part]} for part in parts]
    if len(parts) > 1 and len(names[0]) > 1 and all(each == names[0] for each in names):
        found = f"each of its folders ({listed(part.name for part in parts)}) has the same subfolders"
        found += f" ({listed(sorted(names[0]))})"
        if all(PART.search(part.name) for part in parts):
            raise BadInput(f"data.path: {folder}: {found}. Those seem to be the classes: set data.path: {parts[0]}.")
        notes.append(f"{folder}: {found}; the outer folders are taken for the classes")
    if any(names) and all(SPLIT.fullmatch(name) for each in names for name in each):
        raise BadInput(
            f"data.path: {folder}: its classes are split already ({parts[0].name}/{min(names[0] | {''})}...). Put the"
            " images of each class into one folder; Lockstep splits them by data.splits."
        )
    training, tests = ([part for part in parts if kind.search(part.name.lower())] for kind in (FOR_TRAINING, FOR_TESTS))
    if training and tests and 2 * len({*training, *tests}) >= len(parts):
        raise BadInput(
            f"data.path: {folder}: its folders are named like parts of a data set that is divided already"
            f" ({listed(part.name for part in parts)}), not like classes. Make a folder for each class, with all of its"
            " images; Lockstep splits them by data.splits. If these are the classes, rename them."
        )
    for part in splits:
        notes.append(f"{part}: is taken for a class, though it is named like a split of a data set")
    if loose := sum(_is_image(file) for file in folder.iterdir()):
        notes.append(f"{folder}: {loose} images are in no class's folder, and are left out")
    direct = [part for part in parts if any(_is_image(file) for file in part.iterdir())]
    deep = [part for part in parts if part not in direct and len(inner[part]) > 1]
    if deep and (direct or len(parts) == 1):
        inside = listed(part.name for part in inner[deep[0]])
        beside = f", and {listed(part.name for part in direct)} images of its own" if direct else ""
        raise BadInput(
            f"data.path: {folder}: its {deep[0].name} holds folders of images ({inside}){beside}. If those are the"
            f" classes, set data.path: {deep[0]}. If not, move the images of {deep[0].name} into that folder itself."
        )
    return parts


def _holds_image(folder: Path) -> bool:
    return not _hidden(folder.name) and any(_is_image(file) for file in _files(folder))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS and not _hidden(file.name) and file.is_file()


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, sorted; links to folders are followed, each folder once."""
    files, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else [name for name in folders if not _hidden(name)]
        files += [] if real in seen else [Path(place) / name for name in names if not _hidden(name)]
        seen.add(real)
    return sorted(files)


def _hidden(name: str) -> bool:
    """Whether a file or folder was created by an operating system or editor: ._1.png, .ipynb_checkpoints."""
    return name.startswith(".") or name == "__MACOSX"


def _idx(files: list[Path], data: Data, remarks: Remarks) -> Iterator[Image]:
    """Images and labels of idx files, the training set first. Any other set of images beside it is the test set."""
    images = [file for file in files if "images" in file.name and "idx3" in file.name]
    if not images:
        raise BadInput(f"{files[0].parent}: holds no images (*-images-idx3-ubyte).")
    _require_one_data_set(images)
    several = any("train" in file.name for file in images) and len(images) > 1
    by_name = {other.name: other for other in files}
    for file in sorted(images, key=lambda file: ("train" not in file.name, file.name)):
        label_file = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1"))
        if label_file.name not in by_name:  # one that lies there from another data set is not meant
            raise BadInput(
                f"{label_file}: is not a file, or not among data.files. The labels must be beside the images, under the"
                " same name with labels and idx1."
            )
        pixels, labels = read_idx(file, 3), read_idx(by_name[label_file.name], 1)
        if not pixels[0:1].size and len(pixels):
            raise BadInput(f"{file}: its images have no pixels: {pixels.shape[2]} x {pixels.shape[1]}. Fetch it again.")
        if len(pixels) != len(labels):
            raise BadInput(f"{file}: holds {len(pixels)} images, but {label_file.name} holds {len(labels)} labels.")
        part = ("train" if "train" in file.name else "test") if several else ""
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            name = f"{_before_images(file)} {number}".strip()
            yield name, _grey(image, name, data, remarks), int(label), part


def _before_images(file: Path) -> str:
    """The part of an idx file's name before "images", such as "train" or "emnist-letters-test"."""
    return file.name.partition("images")[0].rstrip("-_.")


def _require_one_data_set(images: list[Path]) -> None:
    """Raise BadInput if files of images belong to several data sets, or if two hold the same set."""
    sets = sorted({IDX_PART.sub("", _before_images(file)).rstrip("-_.") for file in images})
    if len(sets) > 1:
        names = listed(name or "one without a name" for name in sets)
        raise BadInput(
            f"data.path: {images[0].parent} holds several data sets ({names}), and label 1 of one is not"
            " label 1 of another. Move the files of one into a folder of its own."
        )
    parts = [_before_images(file) for file in images]
    if twice := next((part for part in parts if parts.count(part) > 1), None):
        names = " and ".join(file.name for file in images if _before_images(file) == twice)
        raise BadInput(f"data.path: {images[0].parent} holds the same set of images twice: {names}. Remove one.")


def _grey(image: np.ndarray, where: str, data: Data, remarks: Remarks) -> np.ndarray:
    """A grey image, uint8 [height, width], as uint8 [1, height, width], resized if data.image_size says so."""
    if data.image_size is None:
        return image[None]
    from PIL import Image as Picture

    return decoding.pixels(Picture.fromarray(image), where, data.image_size, remarks=remarks)


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes (http://yann.lecun.com/exdb/mnist/), gzip-compressed or not: uint8 [n, ...].

    Its header is 0, 0, the type code, the number of dimensions, and the size of each dimension as a big-endian integer
    of four bytes. Raises BadInput.
    """
    try:
        with open_bytes(file) as stream:
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
        raise BadInput(f"{file}: ends within its header of {header} bytes. Fetch it again.")
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected = int(np.prod(sizes, dtype=object))
    if len(content) - header != expected:
        shape = " x ".join(map(str, sizes))
        raise BadInput(
            f"{file}: its header says {shape} = {expected:,} bytes, but {len(content) - header:,} follow."
            " It is truncated or damaged; fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _fetched(data: Data, downloads: Path) -> list[Path]:
    """The files of data.files, each from the first mirror that has it."""
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


def _hub(data: Data, remarks: Remarks) -> Iterator[Image]:
    for number, row in sources.hub_rows(data):
        where = f"{data.hub}@{data.revision}, row {number}"
        for column in (data.image, data.label):
            if column not in row:
                raise BadInput(f"{where}: has no column {column!r}; it has {', '.join(map(repr, row))}.")
        yield (
            f"{number}",
            decoding.pixels(row[data.image], where, data.image_size, remarks=remarks),
            row[data.label],
            "",
        )
