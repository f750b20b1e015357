"""Images: from idx files and folders to batches, what can be wrong with them, and every strategy on them."""

import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from lockstep.config import reading, registry
from lockstep.data import decoding, image_sources, images, prepare
from lockstep.data.labels import Labels
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json
from lockstep.tasks._classification import probabilities
from lockstep.tasks.image_classification import Task
from tests.conftest import PROJECT, copy_project
from tests.data.test_sources import https_server, line  # noqa: F401 - fixtures

MNIST = PROJECT.parent / "shared" / "data" / "mnist"
SMALL = """
model: {name: basicnet_bn}
train: {epochs: 2, max_steps: 12, eval_every: 6}
hardware: {device: cpu, processes: 3, threads: 1, oversubscribe: true, timeout: 400}
repeats: 1
retries: 0
profile: {steps: 0}
predict: {count: 2}
rows:
  all_threads: null
  ddp_amp: null
  fsdp: {sync_batchnorm: true}
  accelerate: {sync_batchnorm: true}
  fabric: {sync_batchnorm: true}
  horovod: {sync_batchnorm: true}
  trainer: {sync_batchnorm: true}
  deepspeed: {sync_batchnorm: true}
  ddp_spawn: {sync_batchnorm: true}
  ddp_sync: {strategy: ddp, sync_batchnorm: true}
"""
# Enough for a page: what is alone, what synchronises batch normalisation and what does not, and what is sharded.
FEW = """
rows: {all_threads: null, dataparallel: null, ddp_spawn: null, ddp_amp: null, horovod: null, deepspeed: null,
  accelerate: null, trainer: null, fabric: null, fsdp: null}
"""
WORKFLOW = ("--cores", "all", "--configfile", "config/digits.yaml", "small.yaml")


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, prefix, count, seed=0, classes=3, packed=True):
    """Write images whose brightness is a sign of their class, and their labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.uint8) % classes
    pixels = (random.integers(0, 60, (count, 8, 8)) + 60 * labels[:, None, None]).astype(np.uint8)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = idx(array)
        file = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)
    return pixels, labels


def prepared(run_script, *words):
    asked = ["--set", "task=image-classification", "--set", "data.labels=null", *words]
    return run_script("prepare", *asked)


def of(**data) -> str:
    return [word for key, value in data.items() for word in ("--set", f"data.{key}={value}")]


def rows(folder):
    return reading.parse({"task": "image-classification", "data": {"path": str(folder), "labels": None}}).data


@given(
    array=st.integers(1, 3).flatmap(
        lambda dimensions: st.lists(st.integers(0, 5), min_size=dimensions, max_size=dimensions)
    )
)
def test_idx_files_are_read_as_they_were_written(tmp_path_factory, array):
    wanted = np.random.default_rng(0).integers(0, 256, array).astype(np.uint8)
    file = tmp_path_factory.mktemp("idx") / "some"
    file.write_bytes(idx(wanted))
    assert np.array_equal(image_sources.read_idx(file, wanted.ndim), wanted)
    assert np.array_equal(image_sources.read_idx(file, wanted.ndim).shape, array)


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_of_idx_files_becomes_splits(run_script, tmp_path, packed):
    folder = tmp_path / "own"
    folder.mkdir()
    pixels, labels = write_idx(folder, "t10k", 60, packed=packed)
    code, printed, said = prepared(run_script, *of(path="own"))
    assert code == 0, said
    assert "60 rows, 0 duplicates removed; 48 train, 6 dev, 6 test" in printed
    about = read_json(tmp_path / "results/data/data.json")
    assert about["labels"] == ["0", "1", "2"]
    train = images.Images.load(tmp_path / "results/data/dataset/train")
    names = np.load(tmp_path / "results/data/dataset/train" / images.NAMES)
    places = [int(name.split()[1]) for name in names]
    assert np.array_equal(train.pixels[:, 0], pixels[places])
    assert np.array_equal(train.labels, labels[places])
    values = pixels[places] / 255
    batch = train.batch(np.array([3, 1]), 1)
    expected = (values[[3, 1]] - values.mean()) / values.std()
    assert np.abs(batch["pixel_values"][:, 0] - expected).max() < 1e-5
    assert batch["pixel_values"].dtype == np.float32


def test_a_test_set_stays_one(run_script, tmp_path):
    """MNIST has a test set of its own; it is never trained on, whatever data.splits says."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_idx(folder, "train", 90)
    held_out, _ = write_idx(folder, "t10k", 30, seed=1)
    code, printed, said = prepared(run_script, *of(path="own"))
    assert code == 0, said
    assert "80 train, 10 dev, 30 test" in printed
    assert "labels: 0: 40, 1: 40, 2: 40" in printed
    test = images.Images.load(tmp_path / "results/data/dataset/test")
    assert np.array_equal(test.pixels[:, 0], held_out)


def test_a_folder_for_each_class_becomes_splits(run_script, tmp_path):
    for number in range(30):
        part = tmp_path / "own" / ("cats" if number % 2 else "dogs")
        part.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(number)
        Image.fromarray(random.integers(0, 256, (9, 7, 3)).astype(np.uint8)).save(part / f"{number}.png")
    code, printed, said = prepared(run_script, *of(path="own"))
    assert code == 0, said
    assert "images of 7 x 9 pixels, 3 channels" in printed
    split = tmp_path / "results/data/dataset/test"
    first = str(np.load(split / images.NAMES)[0])
    decoded = np.asarray(Image.open(tmp_path / "own" / first)).transpose(2, 0, 1)
    assert np.array_equal(np.load(split / images.PIXELS)[0], decoded)
    assert read_json(tmp_path / "results/data/data.json")["labels"] == ["cats", "dogs"]


def damage(kind, folder):
    """Make a folder of idx files that is wrong in one way."""
    folder.mkdir()
    write_idx(folder, "t10k", 30, packed=False)
    pixels, labels = folder / "t10k-images-idx3-ubyte", folder / "t10k-labels-idx1-ubyte"
    if kind == "truncated":
        pixels.write_bytes(pixels.read_bytes()[:-5])
    elif kind == "other type":
        pixels.write_bytes(b"\0\0\x0d\3" + pixels.read_bytes()[4:])
    elif kind == "empty":
        pixels.write_bytes(b"")
    elif kind == "only its beginning":
        pixels.write_bytes(pixels.read_bytes()[:10])
    elif kind == "no pixels":
        pixels.write_bytes(idx(np.zeros((30, 0, 8), np.uint8)))
    elif kind == "half packed":
        pixels.with_suffix(".gz").write_bytes(gzip.compress(pixels.read_bytes())[:-9])
        pixels.unlink()
        labels.rename(labels.with_suffix(".gz"))
    elif kind == "no labels":
        labels.unlink()
    elif kind == "fewer labels":
        labels.write_bytes(idx(np.zeros(29, np.uint8)))
    elif kind == "swapped":
        pixels.write_bytes(labels.read_bytes())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", "its header says 30 x 8 x 8 = 1,920 bytes, but 1,915 follow. It is truncated"),
        ("other type", "is not an idx file of bytes (dimensions: 3): it begins with 00 00 0d 03, not 00 00 08 03"),
        ("empty", "is not an idx file of bytes (dimensions: 3): it begins with nothing"),
        ("only its beginning", "ends within its header of 16 bytes"),
        ("no pixels", "its images have no pixels: 8 x 0"),
        ("half packed", "is not a whole gzip file"),
        ("no labels", "t10k-labels-idx1-ubyte: is not a file, or not among data.files. The labels must be beside"),
        ("fewer labels", "holds 30 images, but t10k-labels-idx1-ubyte holds 29 labels"),
        ("swapped", "begins with 00 00 08 01, not 00 00 08 03"),
    ],
)
def test_wrong_idx_files_are_one_message(run_script, tmp_path, kind, said):
    damage(kind, tmp_path / "own")
    code, _, errors = prepared(run_script, *of(path="own"))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert said in errors
    assert not (tmp_path / "results" / "data").exists()


def picture(file, shape=(8, 8), seed=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)).save(file)


def deep(file, kind, brightest):
    Image.fromarray(np.linspace(0, brightest, 64).reshape(8, 8).astype(kind)).save(file)


def in_train_and_test(own):
    for part in ("train", "test"):
        (own / part).mkdir()
        for label in "ab":
            shutil.copytree(own / label, own / part / label)
    for label in "ab":
        shutil.rmtree(own / label)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: (own / "a" / "bad.png").write_text("no image"), "bad.png: can't be decoded as an image"),
        (lambda own: picture(own / "b" / "wide.png", (8, 9)), "b/wide.png: is 9 x 8 pixels (channels: 1), but a/0.png"),
        (lambda own: picture(own / "b" / "red.png", (8, 8, 3)), "red.png: is 8 x 8 pixels (channels: 3)"),
        (lambda own: picture(own / "c" / "1.png", seed=99), "too few images with the label c"),
        (lambda own: picture(own / os.fsdecode(b"c\xff") / "1.png"), "c\\udcff/1.png': its name is not UTF-8"),
        (
            lambda own: deep(own / "b" / "x.tif", np.int32, 70000),
            "x.tif: can't be decoded as an image: its values are fro",
        ),
        (
            lambda own: deep(own / "b" / "x.tif", np.float32, 1),
            "its pixels are floating-point numbers, so the value of",
        ),
        (
            in_train_and_test,
            "own is split already (test, train), and has no folder for each class. Set data.path",
        ),
    ],
)
def test_images_that_do_not_fit_are_named(run_script, tmp_path, spoil, said):
    for number in range(20):
        picture(tmp_path / "own" / "ab"[number % 2] / f"{number}.png", seed=number)
    spoil(tmp_path / "own")
    code, _, errors = prepared(run_script, *of(path="own"))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert said in errors


def test_what_is_beside_images_in_their_folders_is_left_out_and_said(run_script, tmp_path):
    own = tmp_path / "own"
    for number in range(20):
        picture(own / "ab"[number % 2] / f"{number}.png", seed=number)
    (own / "a" / "._0.png").write_text("what macOS puts there")
    picture(own / "a" / ".ipynb_checkpoints" / "0.png", seed=99)
    picture(own / "a" / "__MACOSX" / "0.png", seed=98)
    (own / "b" / "list.txt").write_text("no image")
    (own / "c").mkdir()
    code, printed, said = prepared(run_script, *of(path="own"))
    assert code == 0, said
    assert "own: 20 rows, 0 duplicates removed" in printed
    assert (
        "own/b: 1 files have no ending of an image: .txt\nown/c holds no image, and is not taken for a class" in printed
    )


def test_images_are_brought_to_one_size_where_that_is_asked_for(run_script, tmp_path):
    for number in range(20):
        picture(tmp_path / "own" / "ab"[number % 2] / f"{number}.png", (8, 8 + number), seed=number)
    code, printed, said = prepared(run_script, *of(path="own", image_size=10))
    assert code == 0, said
    assert "images of 10 x 10 pixels" in printed


def test_images_of_16_bits_are_scaled_whatever_their_byte_order():
    values = np.linspace(0, 65535, 64).reshape(8, 8).round().astype(np.uint16)
    for mode, order in (("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")):
        picture = Image.frombytes(mode, (8, 8), values.astype(order).tobytes())
        assert np.array_equal(decoding.pixels(picture, "here", None)[0], (values / 257).round())


def test_images_of_idx_files_are_brought_to_one_size_too(run_script, tmp_path):
    (tmp_path / "own").mkdir()
    write_idx(tmp_path / "own", "t10k", 30)
    code, printed, said = prepared(run_script, *of(path="own", image_size=12))
    assert code == 0, said
    assert "images of 12 x 12 pixels" in printed


@pytest.mark.parametrize("numbers", ["[1, 2]", "[1, 2, 1, 2]"])
def test_class_weights_are_one_for_each_label(run_script, tmp_path, numbers):
    (tmp_path / "own").mkdir()
    write_idx(tmp_path / "own", "t10k", 30)
    code, _, errors = prepared(run_script, *of(path="own"), "--set", f"train.class_weights={numbers}")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert f"train.class_weights: has {len(numbers) // 3} numbers, but the data has 3 labels; give one for" in errors


@pytest.mark.parametrize(
    ("same", "limit", "said"),
    [
        (
            True,
            "null",
            "only the label a is left, since every image with another label repeats an earlier one. At least",
        ),
        (False, 10, "all rows of the first 10 (data.limit) have the label a; at least two labels are needed"),
    ],
)
def test_one_label_says_where_the_others_are(run_script, tmp_path, same, limit, said):
    for number in range(20):
        picture(tmp_path / "own" / "ab"[number // 10] / f"{number}.png", seed=number % 10 if same else number)
    code, _, errors = prepared(run_script, *of(path="own", limit=limit))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert said in errors


def test_too_few_images_for_the_proof_are_not_said_to_be_too_few_for_a_batch(run_script, tmp_path):
    (tmp_path / "own").mkdir()
    write_idx(tmp_path / "own", "t10k", 30)
    asked = (*of(path="own"), "--set", "train.global_batch=8", "--set", "profile.steps=0")
    code, _, errors = prepared(run_script, *asked)
    assert code == 0, errors
    asked = ["--set", "task=image-classification", "--set", "data.labels=null", *asked]
    code, printed, errors = run_script("plan", *asked)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "the training split has only 24 samples, but the proof trains steps of 31" in errors
    assert "bucketed-b8-e2-s42: 6 steps of 8" in printed  # the rows' plan is made all the same


def test_a_folder_without_images_says_what_is_looked_for(run_script, tmp_path):
    (tmp_path / "own").mkdir()
    code, _, errors = prepared(run_script, *of(path="own"))
    assert code == 2
    assert "holds neither idx files" in errors or "has neither idx files" in errors


@pytest.mark.parametrize("count", [7, 100, 997])
def test_a_channel_of_one_value_is_not_divided_by_what_rounding_leaves(count):
    """A deviation of 3e-9 would make a million of another value in a held-out image."""
    data = rows("own")
    for value in range(256):
        pixels = np.full((count, 1, 1, 1), value, np.uint8)
        assert images.normalisation(pixels, data)["std"] == [1.0], value


def test_another_normalisation_is_another_data_set(run_script, tmp_path):
    (tmp_path / "own").mkdir()
    write_idx(tmp_path / "own", "train", 60)
    hashes = []
    for mean in ("null", "[0.1]", "[0.2]"):
        code, _, said = prepared(run_script, *of(path="own", mean=mean))
        assert code == 0, said
        hashes.append(read_json(tmp_path / "results/data/data.json")["hash"])
    assert len(set(hashes)) == 3


def test_scores_that_are_no_numbers_are_no_prediction():
    """A model of one's own that divides by an image's deviation, and an image of one colour. argmax takes a nan."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 1))

        def forward(self, pixel_values):
            flat = pixel_values.flatten(1)
            return torch.nn.functional.linear(
                (flat / flat.std(dim=1, keepdim=True)).mean(dim=1, keepdim=True), self.weight
            )

    pixels = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)
    probabilities(Own(), images.Images(pixels, np.zeros(2, np.int64), [0.0], [1.0]))
    pixels[1] = 0
    with pytest.raises(RunFailed, match="are no finite numbers, and predict nothing"):
        probabilities(Own(), images.Images(pixels, np.zeros(2, np.int64), [0.0], [1.0]))


def test_what_a_model_from_elsewhere_does_not_say_is_said(tmp_path):
    """transformers stores how images are made in another way; and a grey model takes no colours."""
    with pytest.raises(BadInput, match=r"holds no images\.json, which says how a model of Lockstep reads images"):
        Task().samples_of(tmp_path, [], None)
    (tmp_path / "images.json").write_text(json.dumps({"image_size": None, "shape": [1, 8, 8]}))
    for name in ("a", "b"):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "1.png").write_bytes(images.png(np.zeros((3, 8, 8), np.uint8)))
    said = r"^a/1\.png: is 8 x 8 pixels \(channels: 3\), but the model was trained on 8 x 8 pixels \(channels: 1\)"
    with pytest.raises(BadInput, match=said):
        Task().read_labelled(tmp_path, rows(tmp_path / "own"), [], Labels())


def test_every_image_is_counted_once_in_evaluation():
    """180 images do not divide into batches of 7; all batches together still hold each image once."""
    samples = images.Images(np.zeros((180, 1, 2, 2), np.uint8), np.zeros(180, np.int64), [0], [1])
    assert np.array_equal(np.sort(np.concatenate(samples.batches(7))), np.arange(180))


def digest(file) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_files_come_from_the_first_mirror_that_has_them(tmp_path, https_server):  # noqa: F811
    www = tmp_path / "www" / "second"
    www.mkdir()
    pixels, labels = write_idx(www, "t10k", 30)
    files = {file.name: digest(file) for file in www.iterdir()}
    mirrors = [f"{https_server}/first", f"{https_server}/second/"]
    data = dataclasses.replace(rows("own"), path=None, mirrors=mirrors, files=files)
    _, read = image_sources.read(data, tmp_path / "kept", [])
    read = list(read)
    assert np.array_equal(np.stack([image[0] for _, image, _, _ in read]), pixels)
    assert [label for _, _, label, _ in read] == labels.tolist()
    other = dataclasses.replace(data, files=dict.fromkeys(files, "0" * 64))
    with pytest.raises(BadInput, match=r"first/t10k-.*can't be fetched.*; .*second/t10k-.* has sha256"):
        list(image_sources.read(other, tmp_path / "others", [])[1])
    assert list((tmp_path / "others").glob("*")) == []


def test_a_data_set_of_images_is_read_by_its_columns(tmp_path):
    """A local folder is named in place of a data set's id on the hub."""
    pictures = [np.full((8, 8), 9 * number, np.uint8) for number in range(4)]
    table = Dataset.from_dict({"digit": [Image.fromarray(each) for each in pictures], "what": [0, 1, 0, 1]})
    (tmp_path / "set").mkdir()
    table.to_parquet(tmp_path / "set" / "train.parquet")
    asked = {"hub": str(tmp_path / "set"), "revision": "main", "image": "digit", "label": "what", "path": None}
    data = dataclasses.replace(rows("own"), **asked)
    read = list(image_sources.read(data, tmp_path, [])[1])
    assert [label for _, _, label, _ in read] == [0, 1, 0, 1]
    assert all(np.array_equal(image[0], each) for (_, image, _, _), each in zip(read, pictures, strict=True))
    with pytest.raises(BadInput, match=r"row 1: has no column 'image'; it has 'digit', 'what'"):
        list(image_sources.read(dataclasses.replace(data, image="image"), tmp_path, [])[1])


@pytest.mark.slow
def test_a_model_of_transformers_takes_images(place):
    """A small vision transformer in a folder, as save_pretrained leaves it, with a head for other classes.

    Its weights have other names in a file than in the live model, as Trainer's checkpoint shows.
    """
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    ViTForImageClassification(ViTConfig(num_labels=3, **size, **shape)).save_pretrained(place.path("vit"))
    asked = ["--config=config/config.yaml", "--config=config/digits.yaml", "--config=small.yaml", "--results=vits"]
    asked += ["--set=model.name=vit", "--set=hardware.processes=2"]
    prepare_, _, *launched = [
        place.script(script, *asked, *more)
        for script, *more in (("prepare",), ("plan",), ("launch", "--row=single"), ("launch", "--row=trainer"))
    ]
    assert prepare_.returncode == 0, prepare_.stderr
    assert "ends in a head of 3 classes, and the data has 10: a new head replaces it" in prepare_.stdout
    assert [finished.returncode for finished in launched] == [0, 0], launched[-1].stderr
    for run in ("single/n1", "trainer/n2"):
        finished = place.script("evaluate", f"vits/runs/{run}/rep1")
        assert finished.returncode == 0, finished.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The project after its workflow over digits with the rows of FEW, with batch normalisation, on three processes."""
    place = copy_project(tmp_path_factory.mktemp("images"))
    place.path("small.yaml").write_text(SMALL, encoding="utf-8")
    place.path("few.yaml").write_text(FEW, encoding="utf-8")
    place.first_run = place.snakemake(*WORKFLOW, "few.yaml")
    return place


@pytest.mark.slow
@pytest.mark.ci
def test_images_are_trained_and_proven(place):
    assert place.first_run.returncode == 0, place.first_run.stderr[-3000:]
    rows_of_images_are_proven(place, {"single", "ddp", "ddp_sync"})


@pytest.mark.slow
def test_every_strategy_trains_images_and_is_proven(place):
    finished = place.snakemake(*WORKFLOW)
    assert finished.returncode == 0, finished.stderr[-3000:]
    everything = {"single", "dataparallel", "ddp", "ddp_sync", "ddp_spawn", "horovod", "deepspeed", "accelerate"}
    rows_of_images_are_proven(place, everything | {"trainer", "fabric", "fsdp"})


def rows_of_images_are_proven(place, rows: set[str]) -> None:
    summary = read_json(place.path("results/report/summary.json"))
    proofs = {row["row"]: row["proof"] for row in summary["rows"]}
    assert set(proofs) == rows
    unequal = {"ddp"}  # each rank normalises by its own share; nn.DataParallel passes through on a CPU
    assert {row for row, proof in proofs.items() if proof == "unequal"} == unequal
    assert {proof for row, proof in proofs.items() if row not in unequal} == {"equal"}
    assert all(row["status"] == "ok" for row in summary["rows"])
    verdict = summary["verdicts"]["ddp"]
    assert "statistics over each device's share" in verdict["by_nature"]
    # Three ranks, each with its share: 1e-4 away at most, as the issue of synchronised statistics goes.
    assert all(summary["verdicts"][row]["distances"]["losses"] < 1e-4 for row in proofs if row not in unequal)


@pytest.mark.slow
@pytest.mark.ci
def test_the_page_shows_images_and_mistakes(place):
    page = place.path("results/report/report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") > 16
    assert "is most confident" in page


@pytest.mark.slow
@pytest.mark.ci
def test_images_are_predicted_from_files(place):
    file = place.path("seven.png")
    split = place.path("results/data/dataset/test")
    at = int(np.flatnonzero(np.load(split / images.LABELS) == 7)[0])
    file.write_bytes(images.png(np.asarray(np.load(split / images.PIXELS)[at])))
    model = "results/runs/single/n1/rep1/model"
    said = place.script("predict", "--model", model, "--image", "seven.png")
    assert said.returncode == 0, said.stderr
    assert "seven.png" in said.stdout
    refused = place.script("predict", "--model", model, "--text", "seven")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "takes no text" in refused.stderr


def test_the_workflow_takes_a_folder_of_one_s_own(tmp_path):
    place = copy_project(tmp_path)
    place.path("mine").mkdir()
    for prefix in ("train", "t10k"):
        write_idx(place.path("mine"), prefix, 30)
    asked = ("-n", "--configfile", "config/mnist.yaml", "--config")
    planned = place.snakemake(*asked, "data={path: mine}")
    assert planned.returncode == 0, planned.stderr
    refused = place.snakemake(*asked, "data={path: yours}")
    assert (refused.returncode, "data.path: yours does not exist" in refused.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's test images are not here")
def test_mnist_is_learnt(place):
    """10,000 images, 9,000 to train on, one epoch: accuracy above .93."""
    asked = ["--config", "config/config.yaml", "--config", "config/mnist.yaml", "--results", "mnist", *of(path=MNIST)]
    asked += [
        word for key in ("device=cpu", "processes=2", "oversubscribe=true") for word in ("--set", f"hardware.{key}")
    ]
    for script, *more in (("prepare",), ("plan",), ("launch", "--row=ddp")):
        finished = place.script(script, *asked, *more)
        assert finished.returncode == 0, finished.stderr
    finished = place.script("evaluate", "mnist/runs/ddp/n2/rep1")
    assert finished.returncode == 0, finished.stderr
    scores = json.loads(place.path("mnist/runs/ddp/n2/rep1/test/report.json").read_text())
    assert scores["support"] == 500
    assert scores["accuracy"] > 0.93


def test_a_task_is_found_by_its_name_and_a_wrong_one_is_refused():
    assert "image-classification" in registry.tasks()
    with pytest.raises(
        BadInput, match=r"task: 'image-clasification' is not one of .*Did you mean image-classification"
    ):
        reading.parse({"task": "image-clasification"})


def test_more_than_one_process_divides_samples_of_any_number():
    """Whatever their number, splits are disjoint, and hold all that is not the same as another."""
    random = np.random.default_rng(0)
    digests = np.array([f"{number:016d}".encode() for number in random.integers(0, 150, 200)])
    codes, known = np.arange(200) % 2, Labels()
    assert [known.number(name, "here") for name in "ab"] == [0, 1]
    data = rows("own")
    numbers, parts, summary = prepare.divide(digests, codes, known, str, data, "own", [], "image")
    places = np.concatenate(list(parts.values()))
    assert len(places) == len(set(places)) == len(np.unique(digests))
    assert len(set(digests[places])) == len(places)
    assert summary["splits"]["train"]["texts"] == len(parts["train"])
    assert torch.equal(torch.from_numpy(numbers), torch.from_numpy(codes))
