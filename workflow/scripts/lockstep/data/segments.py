"""Data for image segmentation: read a folder of images and masks, or generate shapes; store, batch and draw them.

A mask is an image of the same size whose pixels are the numbers of classes; IGNORED means no class. The outlines are
computed from it: the pixels that have a neighbour with another number.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import decoding, images, mapped, prepared, shapes
from lockstep.data.decoding import ENDINGS, Remarks
from lockstep.data.labels import HALF
from lockstep.data.shapes import IGNORED
from lockstep.errors import BadInput, brief, listed
from lockstep.files import hash_arrays, read_json, write_json
from lockstep.paths import require

MASKS, OUTLINES, COUNTS = "masks.npy", "outlines.npy", "counts.npy"
ABOUT = "segments.json"  # how pixels are normalised; part of a prepared data set and of a converted model
SPLITS = ("train", "dev", "test")
# RGB colours of the classes in a drawing (Okabe & Ito); the first, dark grey, is usually the background.
COLOURS = ((48, 48, 48), (213, 94, 0), (0, 158, 115), (86, 180, 233), (240, 228, 66), (204, 121, 167), (0, 114, 178))
NO_CLASS = (255, 255, 255)  # the colour of IGNORED
FEW = 16  # up to this number, a class that occurs in no mask is nothing unusual
GAP, PANEL = 4, 128  # pixels between the panels of a drawing, and the approximate size that small panels get

Segmented = Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]  # name, pixels, mask, outlines


class Segments(images.Images):
    """One prepared split: pixels, uint8 [n, channels, height, width], with masks and outlines, all memory-mapped.

    labels: the masks, uint8 [n, height, width]; outlines: 1 on an outline, else 0, of the same shape; counts: int64
    [n, classes], the number of pixels of each class in each image.
    """

    def __init__(self, pixels, masks, outlines, counts, mean, std):
        super().__init__(pixels, masks, mean, std)
        self.outlines, self.counts = outlines, counts

    @staticmethod
    def load(split: Path) -> "Segments":
        """Load the split stored in a folder such as results/data/dataset/train."""
        require(split / images.PIXELS, "prepare.py")
        about = read_json(split.parent / ABOUT)
        try:
            arrays = [mapped.array(split / name) for name in (images.PIXELS, MASKS, OUTLINES)]
            counts = np.load(split / COUNTS, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise prepared.damaged(split, error) from None
        return Segments(*arrays, counts, about["mean"], about["std"])

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Images `ids`: pixel_values float32 [n, channels, height, width]; labels_mask and labels_outlines, uint8."""
        pixels = super().batch(ids, width)["pixel_values"]
        return {"pixel_values": pixels, "labels_mask": self.labels[ids], "labels_outlines": self.outlines[ids]}


def read(data: Data, notes: list[str]) -> tuple[str, Segmented]:
    """The source's name, and its images with masks and outlines, at most `data.limit`. Raises BadInput.

    `notes` is complete after the last image.
    """
    if data.embedded:
        count, size = data.limit or shapes.COUNT, data.image_size or shapes.SIZE
        return f"made-up shapes, {size} x {size} pixels", shapes.generate(count, size, data.seed)
    if not data.path:
        raise BadInput("data.url, data.files, data.hub: image-segmentation reads a folder. Set data.path to one.")
    if data.labels and len(data.labels) > IGNORED:
        raise BadInput(f"data.labels: has {len(data.labels)} names; a mask holds at most {IGNORED} classes.")
    remarks = Remarks()
    return data.path, _remarked(itertools.islice(_folder(Path(data.path), data, remarks), data.limit), remarks, notes)


def _remarked(pairs: Segmented, remarks: Remarks, notes: list[str]) -> Segmented:
    yield from pairs
    notes += remarks.notes()


def _folder(folder: Path, data: Data, remarks: Remarks) -> Segmented:
    """Read a folder with images/NAME.png (or another image format) and masks/NAME.png."""
    for part in ("images", "masks"):
        if not (folder / part).is_dir():
            raise BadInput(
                f"data.path: {folder} has no folder {part}. It must hold images/NAME.png and, for each image,"
                f" masks/NAME.png.{containers.outside(str(folder))}"
            )
    found = {part: _by_name(folder / part) for part in ("images", "masks")}
    for part, other in (("images", "masks"), ("masks", "images")):
        if alone := sorted(found[part].keys() - found[other].keys()):
            what = "mask" if other == "masks" else "image"
            raise BadInput(
                f"data.path: {folder}: {len(alone)} {part} have no {what} of their name ({listed(alone)}). Add"
                f" {other}/{alone[0]}.png, or remove {found[part][alone[0]]}."
            )
    palette: dict[int, tuple] = {}
    for name, file in sorted(found["images"].items()):
        pixels = decoding.pixels(file, str(file), None, "RGB", remarks, masked=True)
        mask = read_mask(found["masks"][name], data.labels, palette)
        if mask.shape != pixels.shape[1:]:
            raise BadInput(
                f"{found['masks'][name]}: is {mask.shape[1]} x {mask.shape[0]} pixels, but {file} is"
                f" {pixels.shape[2]} x {pixels.shape[1]}. A mask must be as large as its image."
            )
        if data.image_size:
            pixels = decoding.pixels(file, str(file), data.image_size, "RGB")
            mask = _resized(mask, data.image_size)
        yield name, pixels, mask, outlines_of(mask)


def _by_name(folder: Path) -> dict[str, Path]:
    """The image files in a folder by their names without ending. Raises BadInput if two have the same name."""
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or file.suffix.lower() not in ENDINGS or not file.is_file():
            continue
        if HALF.search(file.name):
            raise BadInput(f"{str(file)!a}: its name is not UTF-8. Rename it.")
        if file.stem in files:
            raise BadInput(f"{file}: {files[file.stem].name} has the same name without its ending. Remove one of them.")
        files[file.stem] = file
    return files


def read_mask(file: Path, labels: list[str] | None, palette: dict[int, tuple] | None = None) -> np.ndarray:
    """The class numbers in a mask, palette indices or grey values: uint8 [height, width]. Raises BadInput.

    Args:
        labels: the names of the classes, if known; then a number without a name is refused, except IGNORED.
        palette: the colours of the numbers in the masks before, to which this one's are added; another colour for the
            same number is refused.
    """
    from PIL import Image as Picture
    from PIL import UnidentifiedImageError

    if file.suffix.lower() in (".jpg", ".jpeg", ".jfif", ".webp"):
        raise BadInput(f"{file}: this format is lossy and would change class numbers. Masks must be PNG files.")
    try:
        with Picture.open(file, formats=decoding.FORMATS) as picture:
            mode, numbers, kind = picture.mode, np.asarray(picture), picture.format
            colours = picture.getpalette() if mode == "P" else None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Picture.DecompressionBombError) as error:
        raise BadInput(f"{file}: can't be decoded as an image: {brief(error)}. Save it anew.") from None
    if kind in decoding.LOSSY:
        raise BadInput(f"{file}: is {kind}, which is lossy and would change class numbers. Masks must be PNG files.")
    if mode not in ("P", "L", "1") and not mode.startswith("I"):
        raise BadInput(
            f"{file}: has colours ({mode}), whose classes are unknown. Save it with a palette or in grey, so that a"
            " pixel is the number of its class."
        )
    if numbers.max(initial=0) > IGNORED:
        raise BadInput(
            f"{file}: holds {numbers.max()}; numbers of classes must be below {IGNORED}, which means no class."
        )
    numbers = numbers.astype(np.uint8)
    if colours and palette is not None:
        _require_same_colours(file, {int(n): tuple(colours[3 * n : 3 * n + 3]) for n in np.unique(numbers)}, palette)
    known = numbers[numbers != IGNORED]
    if labels and len(known) and known.max() >= len(labels):
        raise BadInput(
            f"{file}: holds class {known.max()}, but data.labels names {len(labels)} classes, numbered from 0"
            f" ({listed(labels)}). Name the others too, or write {IGNORED} where there is no class."
        )
    return numbers


def _require_same_colours(file: Path, colours: dict[int, tuple], palette: dict[int, tuple]) -> None:
    """Raise BadInput if a number has another colour than in the masks before; otherwise remember the new ones."""
    for number, colour in colours.items():
        if palette.setdefault(number, colour) != colour:
            raise BadInput(
                f"{file}: its number {number} has the colour {colour}, which was {palette[number]} in a mask before, so"
                " the same number may mean two classes. Save all masks with one palette, or in grey."
            )


def _resized(mask: np.ndarray, size: int) -> np.ndarray:
    """A mask resized to `size` x `size` by nearest neighbour."""
    from PIL import Image as Picture

    return np.asarray(Picture.fromarray(mask).resize((size, size), Picture.Resampling.NEAREST))


def outlines_of(mask: np.ndarray) -> np.ndarray:
    """The pixels with a different number to the left, right, above or below, as 1 among 0: uint8 [height, width]."""
    outlines = np.zeros(mask.shape, dtype=bool)
    across, down = mask[:, 1:] != mask[:, :-1], mask[1:] != mask[:-1]
    outlines[:, 1:] |= across
    outlines[:, :-1] |= across
    outlines[1:] |= down
    outlines[:-1] |= down
    return outlines.astype(np.uint8)


@dataclass(frozen=True)
class Written:
    """The images of a source, written to disk and memory-mapped from there."""

    names: list[str]
    pixels: np.ndarray  # uint8 [n, channels, height, width]
    masks: np.ndarray  # uint8 [n, height, width]
    outlines: np.ndarray  # uint8 [n, height, width]
    digests: np.ndarray  # [n], equal for equal images
    masks_digests: np.ndarray


def write(pairs: Segmented, source: str, folder: Path) -> Written:
    """Write the images of a source to files in `folder` while they are read. Raises BadInput if sizes differ."""
    names: list[str] = []
    shape: tuple[int, ...] = ()
    digests: tuple[list[bytes], list[bytes]] = [], []
    files = [folder / name for name in ("pixels", "masks", "outlines")]
    with files[0].open("wb") as pixels_file, files[1].open("wb") as masks_file, files[2].open("wb") as outlines_file:
        for name, pixels, mask, outlines in pairs:
            shape = shape or pixels.shape
            if pixels.shape != shape:
                raise BadInput(
                    f"{source}: {name} is {pixels.shape[2]} x {pixels.shape[1]} pixels, but {names[0]} is {shape[2]} x"
                    f" {shape[1]}. All images must have one size: set data.image_size to resize them."
                )
            for stream, array in ((pixels_file, pixels), (masks_file, mask), (outlines_file, outlines)):
                stream.write(np.ascontiguousarray(array).tobytes())
            for kept, array in zip(digests, (pixels, mask), strict=True):
                kept.append(hashlib.blake2b(array.tobytes(), digest_size=16).digest())
            names.append(name)
    if not names:
        raise BadInput(f"{source}: holds no images.")
    sizes = (len(names), *shape), (len(names), *shape[1:]), (len(names), *shape[1:])
    arrays = [np.memmap(file, np.uint8, mode="r", shape=size) for file, size in zip(files, sizes, strict=True)]
    return Written(names, *arrays, *(np.array(kept, "S16") for kept in digests))


def store(written: Written, data: Data, source: str, notes: list[str], folder: Path) -> dict:
    """Divide images among the splits by `data.splits` and `data.seed`, and write each split to `folder`.

    Only the first of equal images is kept, so that none is in two splits. Returns the summary for data.json. Raises
    BadInput if a split would be empty, or there are fewer than two classes.
    """
    labels, counts = _classes(written, data, source)
    _, first, which = np.unique(written.digests, return_index=True, return_inverse=True)
    known = counts.sum(axis=1) > 0
    if unknown := int((~known[np.sort(first)]).sum()):
        notes.append(f"images without a pixel of any class, which are left out: {unknown}")
    kept = np.sort(first[known[first]])
    other_mask = int((written.masks_digests != written.masks_digests[first[which]]).sum())
    parts = _divided(kept, data, source)
    arrays: dict[str, np.ndarray] = {}
    for name, places in parts.items():
        split = folder / name
        split.mkdir()
        for file, array in ((images.PIXELS, written.pixels), (MASKS, written.masks), (OUTLINES, written.outlines)):
            stored = np.lib.format.open_memmap(
                split / file, mode="w+", dtype=np.uint8, shape=(len(places), *array.shape[1:])
            )
            for begin in range(0, len(places), images.PART):
                stored[begin : begin + images.PART] = array[places[begin : begin + images.PART]]
            stored.flush()
            arrays[f"{name}/{file}"] = stored
        np.save(split / COUNTS, counts[places])
        np.save(split / images.NAMES, np.array([written.names[place] for place in places]))
    for part, places in parts.items():
        if absent := [name for name, count in zip(labels, counts[places].sum(axis=0), strict=True) if not count]:
            notes.append(f"no image of the {part} split has a pixel of {listed(absent)}")
    about = images.normalisation(arrays[f"train/{images.PIXELS}"], data) | {"labels": labels}
    write_json(folder / ABOUT, about)
    return {
        "source": source,
        "synthetic": data.embedded,
        "notes": notes,
        "labels": labels,
        "rows_read": len(written.names),
        "duplicates_removed": len(written.names) - len(first),
        "duplicates_with_another_label": other_mask,
        "splits": {
            part: {"texts": len(places), "labels": dict(zip(labels, _holding(counts[places]), strict=True))}
            for part, places in parts.items()
        },
        "hash": hash_arrays(arrays | images.asked_normalisation(data)),
        "images": about,
    }


def _holding(counts: np.ndarray) -> list[int]:
    """The number of images that contain each class: [classes]."""
    return (counts > 0).sum(axis=0).tolist()


def _classes(written: Written, data: Data, source: str) -> tuple[list[str], np.ndarray]:
    """The names of the classes, and the number of pixels of each class in each image: int64 [n, classes]."""
    every = np.stack([np.bincount(mask.ravel(), minlength=IGNORED + 1) for mask in written.masks])[:, :IGNORED]
    highest = int(np.flatnonzero(every.any(axis=0)).max(initial=-1))
    labels = data.labels or (shapes.NAMES if data.embedded else [str(number) for number in range(highest + 1)])
    if data.embedded and len(labels) != len(shapes.NAMES):
        raise BadInput(f"data.labels: names {len(labels)} classes, but the generated shapes have {len(shapes.NAMES)}.")
    if highest < 0:
        raise BadInput(f"{source}: no pixel of any mask has a class: all are {IGNORED}, which means no class.")
    present = np.flatnonzero(every.any(axis=0))
    if len(labels) < 2 or len(present) < 2:
        only = labels[present[0]] if present[0] < len(labels) else present[0]
        binary = any((mask == IGNORED).any() for mask in written.masks)
        of_255 = f" {IGNORED} means no class: where it is one in these masks, write 1 in its place." if binary else ""
        raise BadInput(
            f"{source}: all pixels with a class have the class {only}; at least two classes are needed.{of_255}"
        )
    if not data.labels and not data.embedded and highest >= FEW and 2 * len(present) <= highest:
        raise BadInput(
            f"{source}: of the numbers 0 to {highest}, its masks hold {listed(map(str, present))} only, as grey levels"
            " do. Number the classes from 0 on without gaps, or name all of them in data.labels."
        )
    return labels, every[:, : len(labels)]


def _divided(places: np.ndarray, data: Data, source: str) -> dict[str, np.ndarray]:
    """The positions of each split's images, drawn at random by `data.seed`."""
    order = np.random.default_rng(data.seed).permutation(places)
    ends = np.cumsum([data.splits[part] for part in SPLITS]) / sum(data.splits[part] for part in SPLITS)
    cut = np.split(order, np.round(ends[:-1] * len(order)).astype(int))
    parts = {part: np.sort(inside) for part, inside in zip(SPLITS, cut, strict=True)}
    if empty := [part for part, inside in parts.items() if not len(inside)]:
        raise BadInput(
            f"{source}: {len(places)} images can't be divided by data.splits: {listed(empty)} would be empty. Give more"
            " images, or other shares."
        )
    return parts


def palette() -> np.ndarray:
    """The colour of each possible number in a mask: uint8 [256, 3]."""
    colours = np.array(COLOURS, dtype=np.uint8)[np.arange(IGNORED + 1) % len(COLOURS)]
    colours[IGNORED] = NO_CLASS
    return colours


def mask_png(mask: np.ndarray) -> bytes:
    """A mask, uint8 [height, width], as a PNG file whose pixels are its numbers, with a palette of visible colours."""
    from PIL import Image as Picture

    picture = Picture.fromarray(mask)
    picture.putpalette(palette().tobytes())
    return images.encoded(picture)


def drawn(rows: list[tuple[np.ndarray, ...]]) -> bytes:
    """Draw images, uint8 [channels, height, width], and masks, uint8 [height, width], side by side: a PNG file.

    `rows` has one tuple for each row of the drawing. Small images are enlarged.
    """
    from PIL import Image as Picture

    colours = palette()
    panels = [
        [
            colours[part] if part.ndim == 2 else np.broadcast_to(part.transpose(1, 2, 0), (*part.shape[1:], 3))
            for part in row
        ]
        for row in rows
    ]
    height, width, _ = panels[0][0].shape
    times = max(1, round(PANEL / max(height, width)))
    whole = [
        [
            np.pad(panel.repeat(times, 0).repeat(times, 1), ((0, GAP), (0, GAP), (0, 0)), constant_values=255)
            for panel in row
        ]
        for row in panels
    ]
    pixels = np.concatenate([np.concatenate(row, axis=1) for row in whole])[:-GAP, :-GAP]
    return images.encoded(Picture.fromarray(np.ascontiguousarray(pixels)))


def fractions(mask: np.ndarray, labels: list[str]) -> str:
    """The share of each class in a mask, the largest first, such as "background 80 %, circle 20 %"."""
    known = mask[mask != IGNORED]
    counted = Counter(known.tolist()).most_common()
    percents = [(labels[number], 100 * count / known.size) for number, count in counted]
    return ", ".join(f"{name} {percent:.0f} %" for name, percent in percents if percent >= 0.5)
