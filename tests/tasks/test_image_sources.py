"""Folders of images as users have them: transparent, split already, nested, several data sets side by side."""

import os
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from lockstep.config import reading
from lockstep.data import decoding, image_sources, segments
from lockstep.data.decoding import Remarks
from lockstep.errors import BadInput
from tests.tasks.test_image_classification import picture, write_idx


def read(folder, **keys):
    """The images of a folder, and the notes on them."""
    data, notes = reading.parse({"task": "image-classification", "data": {"path": str(folder)} | keys}).data, []
    _, images = image_sources.read(data, folder, notes)
    return list(images), notes


def classes(folder) -> list[str]:
    return sorted({label for *_, label, _ in read(folder)[0]})


def ring() -> np.ndarray:
    """The alpha channel of a drawing, 255 where there is ink: uint8 [8, 8]."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[2:6, 2:6] = 255
    alpha[3:5, 3:5] = 0
    alpha[7, 7] = 128  # half of it
    return alpha


def drawing(mode: str, ink: int = 0) -> Image.Image:
    """Ink on a transparent background, whose hidden colour is black."""
    alpha = ring()
    grey = np.where(alpha == 255, ink, 0).astype(np.uint8)
    if mode == "LA":
        return Image.fromarray(np.dstack([grey, alpha]), "LA")
    if mode == "RGBA":
        return Image.fromarray(np.dstack([grey, grey, grey, alpha]), "RGBA")
    palette = Image.fromarray(np.where(alpha == 255, 1, 0).astype(np.uint8), "P")
    palette.putpalette([0, 0, 0, ink, ink, ink])
    return palette


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_transparent_parts_are_white(tmp_path, mode):
    """They once got their hidden colour, usually black, so that a black drawing was a black square."""
    file, remarks = tmp_path / "a.png", Remarks()
    drawing(mode).save(file, **({"transparency": 0} if mode == "P" else {}))
    pixels = decoding.pixels(file, "a.png", None, remarks=remarks)
    expected = 255 - ring()
    if mode == "P":
        expected[7, 7] = 255
    assert pixels.shape == ((1, 8, 8) if mode == "LA" else (3, 8, 8))
    assert all(np.array_equal(channel, expected) for channel in pixels)
    assert remarks.notes() == ["1 images have transparent parts, which are laid over white (a.png)"]
    assert np.array_equal(decoding.decode_file(file, None, len(pixels)), pixels), "as it is predicted"


def test_white_ink_on_a_transparent_ground_is_told():
    """White ink on white is invisible."""
    remarks = Remarks()
    image = drawing("RGBA", ink=255)
    image.putpixel((7, 7), (255, 255, 255, 128))
    decoding.pixels(image, "a.png", None, remarks=remarks)
    assert "1 images are of one colour throughout (a.png)" in remarks.notes()


def test_an_opaque_image_with_an_alpha_channel_is_as_it_was(tmp_path):
    values, remarks = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8), Remarks()
    Image.fromarray(np.dstack([values, np.full((8, 8), 255, np.uint8)]), "RGBA").save(tmp_path / "a.png")
    assert np.array_equal(decoding.pixels(tmp_path / "a.png", "a", None, remarks=remarks), values.transpose(2, 0, 1))
    assert remarks.notes() == []


def test_pages_frames_and_dark_images_are_told(tmp_path):
    for part in "ab":
        (tmp_path / part).mkdir()
        for number in range(4):
            frames = [Image.fromarray(np.full((8, 8), 40 * n + number, np.uint8)) for n in range(3)]
            frames[0].putpixel((0, 0), 255)
            frames[0].save(tmp_path / part / f"{number}.tif", save_all=True, append_images=frames[1:])
        values = np.random.default_rng(0).integers(0, 4096, (8, 8)).astype(np.uint16)  # 12 bits of 16
        Image.fromarray(values).save(tmp_path / part / "x.png")
    _, notes = read(tmp_path)
    assert len(notes) == 2
    assert notes[0].startswith("8 images hold several pages or frames, of which the first is taken (")
    named = re.findall(r"\w\.tif", notes[0])
    assert named == ["0.tif", "1.tif", "2.tif"]  # the first three of eight
    assert notes[0].endswith(", ...)")
    assert re.match(r"2 images have 16 bits, of which 8 are kept, and so fewer than 64 levels", notes[1])


def in_16_bits(values: np.ndarray) -> bytes:
    """A PNG of colours with 16 bits, which PIL does not write. values: [height, width, 3]."""
    height, width, _ = values.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(lines),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("most", "told"), [(1024, True), (2**16, False)])
def test_16_bits_that_leave_few_levels_are_told_in_colour_and_beside_one_bright_pixel(tmp_path, most, told):
    draw = np.random.default_rng(0)
    grey = draw.integers(0, most, (32, 32)).astype(np.uint16)
    grey[0, 0] = 2**16 - 1
    Image.fromarray(grey).save(tmp_path / "grey.png")
    (tmp_path / "colour.png").write_bytes(in_16_bits(draw.integers(0, most, (32, 32, 3))))
    for name in ("grey.png", "colour.png"):
        remarks = Remarks()
        decoding.pixels(tmp_path / name, name, None, remarks=remarks)
        assert (len(remarks.notes()) == 1) == told


def test_notes_are_there_where_only_the_first_images_are_read(tmp_path):
    for part in "ab":
        (tmp_path / part).mkdir()
        for number in range(4):
            drawing("RGBA", ink=number).save(tmp_path / part / f"{number}.png")
    assert read(tmp_path, limit=3)[1][0].startswith("3 images have transparent parts")


def folders(own, *names: str, count: int = 3) -> None:
    for seed, name in enumerate(names):
        for number in range(count):
            picture(own / name / f"{number}.png", seed=100 * seed + number)


@pytest.mark.parametrize(
    ("names", "instead"),
    [
        (("train/cat", "train/dog", "val/cat", "val/dog", "extra/cat", "extra/dog"), "train"),
        (("train/cat", "train/dog", "test"), "train"),
        (("train/cat", "train/dog", "eval/cat", "eval/dog"), "train"),
        (("Train/cat", "Train/dog", "Test_set/cat", "Test_set/dog"), "Train"),
        (("validation/cat", "validation/dog", "TESTING/cat", "TESTING/dog"), "TESTING"),
        (("train-images/cat", "train-images/dog"), "train-images"),
        (("test/cat", "test/dog", "more"), "test"),
        (("trainset", "testset"), None),
        (("train", "other"), None),
        (("images/cat", "images/dog", "docs"), "images"),
        (("data/cat", "data/dog"), "data"),
        (("seg_train/cat", "seg_train/dog", "seg_test/cat", "seg_test/dog"), "seg_test"),
        (("fold1/cat", "fold1/dog", "fold2/cat", "fold2/dog"), "fold1"),
        (("cat/train", "cat/test", "dog/train", "dog/test"), None),
        (("train_cats", "train_dogs", "test_cats", "test_dogs"), None),
        (("trainA", "trainB", "testA", "testB"), None),
        (("bounding_box_train", "bounding_box_test", "query"), None),
        (("seg_train", "seg_test", "seg_pred"), None),
        (("\u8bad\u7ec3\u96c6", "\u6d4b\u8bd5\u96c6"), None),
        (("Lerndaten", "Testdaten"), None),
        (("labeled", "unlabeled"), None),
    ],
)
def test_folders_that_are_no_classes_are_refused(tmp_path, names, instead):
    folders(tmp_path, *names)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    if instead:
        assert f"data.path: {tmp_path / instead}" in str(error.value)
        assert classes(tmp_path / instead) == ["cat", "dog"]
    else:
        assert re.search("(is|are) (split|divided) already", str(error.value))


@pytest.mark.parametrize(
    "names",
    [
        ("cat", "dog"),
        ("test", "control"),  # a word alone is a class's name
        ("contest", "trainer"),
        ("bullet_train", "test_tube", "cat", "dog", "bird"),  # some of many classes
        ("cat/2020", "cat/2021", "dog/2020", "dog/2021"),
        ("cat/2020", "dog"),
    ],
)
def test_folders_that_are_classes_are_taken(tmp_path, names):
    folders(tmp_path, *names)
    assert classes(tmp_path) == sorted({name.split("/")[0] for name in names})


def test_links_to_folders_are_followed_once(tmp_path):
    folders(tmp_path / "store", "cats", "more")
    own = tmp_path / "own"
    folders(own, "dog")
    (own / "cat").mkdir()
    (own / "cat" / "here").symlink_to(tmp_path / "store" / "cats")
    (tmp_path / "store" / "cats" / "back").symlink_to(own / "cat")
    images, _ = read(own)
    assert sorted(name for name, *_ in images) == [f"{part}/{n}.png" for part in ("cat/here", "dog") for n in range(3)]


def test_several_data_sets_of_idx_files_in_one_folder_are_refused(tmp_path):
    """The letter with label 1 and the digit 1 were once one class."""
    for name in ("letters", "digits"):
        write_idx(tmp_path, f"emnist-{name}-train", 30)
        write_idx(tmp_path, f"emnist-{name}-test", 9)
    with pytest.raises(BadInput, match=r"holds several data sets \(emnist-digits, emnist-letters\)"):
        read(tmp_path)
    for file in tmp_path.glob("*letters*"):
        file.unlink()
    images, _ = read(tmp_path)
    assert {name.rpartition(" ")[0] for name, *_ in images} == {"emnist-digits-train", "emnist-digits-test"}


def test_labels_that_nobody_named_are_not_taken(tmp_path):
    """They may be left in the folder of downloads from another data set, whose files have the same names."""
    write_idx(tmp_path, "train", 6, packed=False)
    data = reading.parse({"task": "image-classification", "data": {"path": str(tmp_path)}}).data
    with pytest.raises(BadInput, match=r"train-labels-idx1-ubyte: is not a file, or not among data\.files"):
        list(image_sources._idx([tmp_path / "train-images-idx3-ubyte"], data, Remarks()))


def test_one_data_set_twice_in_a_folder_is_refused(tmp_path):
    write_idx(tmp_path, "train", 30)
    write_idx(tmp_path, "train", 30, packed=False)
    with pytest.raises(
        BadInput, match=r"the same set of images twice: train-images-idx3-ubyte and train-images-idx3-ubyte"
    ):
        read(tmp_path)


@pytest.mark.parametrize("beside", [True, False])
def test_files_within_folders_of_their_names(tmp_path, beside):
    """An archive of MNIST unpacks like this: a folder for each file, and perhaps hidden files beside them."""
    made, own = tmp_path / "made", tmp_path / "own"
    made.mkdir(), own.mkdir()
    write_idx(made, "train", 30, packed=False)
    write_idx(made, "t10k", 9, packed=False)
    for file in made.iterdir():
        (own / file.name).mkdir()
        shutil.copy(file, own / file.name / file.name)
        if beside:
            shutil.copy(file, own / file.name.replace("-idx", ".idx"))
    images, _ = read(own)
    assert [part for *_, part in images] == ["train"] * 30 + ["test"] * 9
    assert images[30][0] == "t10k 0"


def test_what_may_be_meant_otherwise_is_told(tmp_path):
    folders(tmp_path, "cat", "dog", "test")
    picture(tmp_path / "loose.png", seed=7)
    notes = read(tmp_path)[1]
    assert f"{tmp_path / 'test'}: is taken for a class, though it is named like a split of a data set" in notes
    assert f"{tmp_path}: 1 images are in no class's folder, and are left out" in notes


def test_postscript_is_never_run(tmp_path, monkeypatch):
    """PIL would start Ghostscript for it, whatever its ending says."""
    ran = tmp_path / "ran"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    header = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.png").write_text(header)
    with pytest.raises(BadInput, match="can't be decoded as an image"):
        decoding.pixels(tmp_path / "a.png", "a.png", None)
    with pytest.raises(BadInput, match="can't be decoded as an image"):
        segments.read_mask(tmp_path / "a.png", None)
    assert not ran.exists()
