"""Segmentation: the data and what can be wrong with them, a loss of several terms, its figures, and every strategy."""

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from lockstep import paths
from lockstep.config import reading
from lockstep.config.hardware import World
from lockstep.data import decoding, images, segments, shapes
from lockstep.data.plan import share
from lockstep.data.segments import IGNORED, Segments
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json
from lockstep.model.convnets import Segmented, UNet
from lockstep.rank.dev_split import Chosen, gather_results
from lockstep.rank.drawing import Drawing
from lockstep.tasks import image_segmentation
from lockstep.tasks.image_segmentation import TERMS, Task
from tests.conftest import HOROVOD, copy_project

CLASSES, SIZE = 3, 6
SMALL = """
data: {limit: 60, image_size: 16}
train: {epochs: 3, max_steps: 8, eval_every: 4, log_every: 2, pictures_every: 1}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true, timeout: 400}
repeats: 1
retries: 0
predict: {count: 2}
rows: {all_threads: null}
"""
ASKED = ("--config=config/config.yaml", "--config=config/segmentation.yaml", "--config=small.yaml")


def train_section(**given):
    """The section `train` of a row with these settings."""
    raw = {"task": "image-segmentation", "train": {"best": "miou"} | given}
    return reading.parse(raw | {"rows": {"single": {"strategy": "single"}}}).rows["single"].train


def made_up(count: int, seed: int = 0, ignored: float = 0.2) -> Segments:
    """Images with random masks; a pixel has any class or none, and some images may have no outline."""
    random = np.random.default_rng(seed)
    masks = random.integers(0, CLASSES, (count, SIZE, SIZE)).astype(np.uint8)
    masks[random.random(masks.shape) < random.random((count, 1, 1)) * ignored * 2] = IGNORED
    masks[:, 0, 0] = random.integers(0, CLASSES, count)  # of some class at least
    outlines = (random.random(masks.shape) < 0.3).astype(np.uint8)
    counts = np.stack([np.bincount(mask.ravel(), minlength=256)[:CLASSES] for mask in masks])
    pixels = random.integers(0, 256, (count, 3, SIZE, SIZE)).astype(np.uint8)
    return Segments(pixels, masks, outlines, counts, [0.5] * 3, [0.25] * 3)


def said_of(count: int, seed: int = 1) -> Segmented:
    """Random outputs of a model for `count` images, in float64."""
    random = torch.Generator().manual_seed(seed)
    options = {"generator": random, "dtype": torch.float64}
    return Segmented(torch.randn(count, CLASSES, SIZE, SIZE, **options) * 2, torch.randn(count, SIZE, SIZE, **options))


def labels_of(samples: Segments, ids) -> dict[str, torch.Tensor]:
    return {"mask": torch.from_numpy(samples.labels[ids]), "outlines": torch.from_numpy(samples.outlines[ids])}


def means(task: Task, samples: Segments, said: Segmented, parts: list[np.ndarray]) -> dict[str, float]:
    """Each term's mean over a global batch in parts, one for each rank or micro-batch, as `Replay.loss` computes it."""
    weights = task.weights(samples)
    sums = [
        task.loss(None, Segmented(*(tensor[ids] for tensor in said)), labels_of(samples, ids), torch.float64)
        for ids in parts
    ]
    every = np.concatenate(parts)
    return {name: sum(part[name].item() for part in sums) / weights[name][every].sum() for name in TERMS}


@given(
    count=st.integers(2, 9),
    seed=st.integers(0, 99),
    ranks=st.integers(1, 5),
    weights=st.sampled_from([None, "balanced", [0.5, 2.0, 3.0]]),
    pos_weight=st.sampled_from([None, "balanced", 4.0]),
    hard_share=st.sampled_from([0.1, 0.25, 1.0]),
    smoothing=st.sampled_from([0, 0.1]),
)
@settings(max_examples=60)
def test_a_loss_is_the_same_however_a_batch_is_shared(count, seed, ranks, weights, pos_weight, hard_share, smoothing):
    task = Task(
        train_section(class_weights=weights, pos_weight=pos_weight, hard_share=hard_share, label_smoothing=smoothing)
    )
    samples, said = made_up(count, seed), said_of(count, seed)
    ids = np.random.default_rng(seed).permutation(count)
    parts = [part for part in (share(ids, rank, ranks) for rank in range(ranks)) if len(part)]
    whole = means(task, samples, said, [np.arange(count)])
    assert means(task, samples, said, parts) == pytest.approx(whole, rel=1e-12)
    # And it is what PyTorch has of the whole batch.
    mask, outlines = torch.from_numpy(samples.labels).long(), torch.from_numpy(samples.outlines).double()
    weight = None if task.class_weights is None else torch.from_numpy(task.class_weights)
    options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
    assert whole["cross_entropy"] == pytest.approx(cross_entropy(said.logits, mask, weight, **options).item())
    positive = torch.tensor(float(task.positive), dtype=torch.float64)
    plain = binary_cross_entropy_with_logits(said.boundary, outlines, pos_weight=positive)
    assert whole["boundary"] == pytest.approx(plain.item())
    losses = cross_entropy(said.logits, mask, reduction="none", **options)
    kept = [of[known] for of, known in zip(losses, mask != IGNORED, strict=True)]
    hardest = [of.topk(int(np.ceil(hard_share * len(of)))).values for of in kept]
    assert whole["hard_examples"] == pytest.approx(torch.cat(hardest).mean().item())


def test_hard_examples_of_a_share_instead_of_an_image_make_another_loss():
    """Negative control: if they were chosen within a batch, each rank's choice would differ."""
    samples, said = made_up(8), said_of(8)
    losses = cross_entropy(
        said.logits, torch.from_numpy(samples.labels).long(), ignore_index=IGNORED, reduction="none"
    ).flatten(1)
    valid = samples.counts.sum(axis=1)

    def of_batches(parts):
        most = [int(np.ceil(0.25 * valid[ids].sum())) for ids in parts]
        chosen = [losses[ids].flatten().topk(count).values for ids, count in zip(parts, most, strict=True)]
        return torch.cat(chosen).mean().item()

    one, two = [np.arange(8)], np.array_split(np.arange(8), 2)
    assert abs(of_batches(one) - of_batches(two)) > 1e-4
    task = Task(train_section())
    of_images = [means(task, samples, said, parts)["hard_examples"] for parts in (one, two)]
    assert of_images[0] == pytest.approx(of_images[1], rel=1e-13)


def test_pixels_of_no_class_have_no_gradient_but_for_the_outlines():
    samples, said = made_up(4, ignored=0.5), said_of(4)
    for tensor in said:
        tensor.requires_grad_()
    task = Task(train_section())
    task.weights(samples)
    sum(task.loss(None, said, labels_of(samples, np.arange(4)), torch.float64).values()).backward()
    ignored = torch.from_numpy(samples.labels == IGNORED)
    assert ignored.any()
    assert said.logits.grad.movedim(1, -1)[ignored].abs().max() == 0
    assert said.logits.grad.movedim(1, -1)[~ignored].abs().max() > 0
    assert said.boundary.grad.abs().min() > 0


class Says(torch.nn.Module):
    """A model whose output depends on an image's first pixels, so that it differs between images."""

    def forward(self, pixel_values):
        scores = torch.stack([pixel_values[:, 0] * (number - 1) for number in range(CLASSES)], dim=1)
        return Segmented(scores, pixel_values[:, 1])


def gathered(task: Task, samples, world_size: int, batch: int) -> list[torch.Tensor]:
    """What each of several ranks, here threads, gathers of a split."""
    together, slots = threading.Barrier(world_size), [None] * world_size

    def rank(number: int) -> torch.Tensor:
        def all_gather(tensor):
            slots[number] = tensor
            together.wait(60)
            whole = torch.stack(slots)
            together.wait(60)
            return whole

        model = Says()
        strategy = SimpleNamespace(
            model=model,
            forward=lambda inputs: model(**inputs),
            world=World(number, number, world_size, torch.device("cpu"), "gloo"),
            inputs=lambda arrays: {name: torch.from_numpy(array) for name, array in arrays.items()},
            padded_width=lambda width: width,
            all_gather=all_gather,
            autocast=torch.no_grad,
            gathered=lambda *_: None,
        )
        train, progress = SimpleNamespace(global_batch=batch), SimpleNamespace(alive=lambda: None)
        return gather_results(SimpleNamespace(strategy=strategy, task=task, train=train, progress=progress), samples)

    with ThreadPoolExecutor(world_size) as threads:
        return [done.result() for done in [threads.submit(rank, number) for number in range(world_size)]]


@given(count=st.integers(1, 11), seed=st.integers(0, 99), ranks=st.integers(1, 4), batch=st.integers(1, 6))
@settings(max_examples=25)
def test_figures_are_those_of_all_pixels_each_once_on_any_number_of_ranks(count, seed, ranks, batch):
    task, samples = Task(train_section()), made_up(count, seed)
    task.weights(samples)
    guesses = Says()(**{"pixel_values": torch.from_numpy(samples.batch(np.arange(count), 1)["pixel_values"])})
    truth, guess = samples.labels.ravel(), guesses.logits.argmax(dim=1).numpy().ravel()
    known = truth != IGNORED
    for results in gathered(task, samples, ranks, batch):
        scores = task.scores(results, samples)
        # scikit-learn, too, leaves classes out of the mean that are neither there nor taken for something.
        assert scores["miou"] == pytest.approx(jaccard_score(truth[known], guess[known], average="macro"))
        assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(truth[known], guess[known]))
        everything = Segmented(guesses.logits.double(), guesses.boundary.double())
        whole = means(task, samples, everything, [np.arange(count)])
        assert scores["loss"] == pytest.approx(sum(whole.values()), rel=1e-5)


def test_some_of_the_dev_split_have_figures_of_their_own():
    task, samples = Task(train_section()), made_up(9)
    task.weights(samples)
    some = Chosen(samples, np.array([1, 4, 5]))
    alone = Segments(
        *(array[some.ids] for array in (samples.pixels, samples.labels, samples.outlines, samples.counts)),
        [0.5] * 3,
        [0.25] * 3,
    )
    (chosen,), (own,) = gathered(task, some, 1, 2), gathered(task, alone, 1, 2)
    assert task.scores(chosen, some) == task.scores(own, alone)
    # A picture of them shows the chosen ones' own pixels.
    said = said_of(2)
    drawn = [task.draw(split, ids, said) for split, ids in ((some, np.array([0, 2])), (samples, np.array([1, 5])))]
    assert drawn[0] == drawn[1] != task.draw(samples, np.array([0, 2]), said)


def test_scores_that_are_no_numbers_are_no_prediction():
    """argmax takes the first of them."""
    pixels, masks = np.zeros((1, 3, 8, 8), np.uint8), np.zeros((1, 8, 8), np.uint8)
    model = UNet(3, 2).eval()
    torch.nn.init.constant_(model.classes.bias, torch.nan)
    with pytest.raises(RunFailed, match="are no finite numbers, and predict nothing"):
        image_segmentation._predicted(model, Segments(pixels, masks, masks, np.ones((1, 2)), [0.5] * 3, [0.5] * 3))


def test_a_class_that_is_nowhere_is_no_part_of_the_mean():
    matrix = np.array([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert image_segmentation.ious(matrix) == [0.75, 0.8, None]
    assert image_segmentation.miou(matrix) == pytest.approx(0.775)
    assert image_segmentation.pixel_accuracy(matrix) == 7 / 8


@given(epochs=st.lists(st.integers(1, 4), min_size=1, max_size=7), every=st.integers(0, 4), count=st.integers(1, 9))
def test_pictures_are_due_at_the_ends_of_epochs_and_of_the_run(epochs, every, count):
    """epochs: the steps of each."""
    of_steps = np.repeat(np.arange(len(epochs)), epochs)
    training = SimpleNamespace(train=SimpleNamespace(pictures_every=every))
    drawing = Drawing(training, SimpleNamespace(epochs=of_steps, steps=len(of_steps)), range(count), None)
    due = [int(of_steps[step - 1]) + 1 for step in range(1, len(of_steps) + 1) if drawing.due(step)]
    wanted = [number for number in range(1, len(epochs) + 1) if every and number % every == 0]
    assert due == (sorted({*wanted, len(epochs)}) if every else [])
    assert drawing.ids.tolist() == sorted(set(drawing.ids.tolist()))
    assert 0 <= drawing.ids.min() <= drawing.ids.max() < count


# Data.


def test_shapes_are_the_same_from_the_same_seed_and_have_all_that_is_needed():
    first, again, other = (list(shapes.generate(40, 32, seed)) for seed in (1, 1, 2))
    for ours, theirs in zip(first, again, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(ours[1:], theirs[1:], strict=True))
    assert not np.array_equal(first[0][1], other[0][1])
    masks, outlines = (np.stack([picture[part] for picture in first]) for part in (2, 3))
    assert set(np.unique(masks)) == {0, 1, 2, 3, IGNORED}
    assert 0.03 < (masks == IGNORED).mean() < 0.2
    assert set(np.unique(outlines)) == {0, 1}
    assert outlines[masks == IGNORED].mean() > 0.95  # the band lies on the outline


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 999))
def test_outlines_are_beside_pixels_of_another_number(height, width, seed):
    mask = np.random.default_rng(seed).integers(0, 3, (height, width)).astype(np.uint8)
    for row, column in np.ndindex(height, width):
        beside = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        others = [mask[at] for at in beside if 0 <= at[0] < height and 0 <= at[1] < width]
        assert segments.outlines_of(mask)[row, column] == any(other != mask[row, column] for other in others)


def own(folder, count: int = 20, size: int = 12, mode: str = "L"):
    """A folder of images and masks as users have them."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number, (_, pixels, mask, _) in enumerate(shapes.generate(count, size, 5)):
        (folder / "images" / f"{number}.png").write_bytes(images.png(pixels))
        content = segments.mask_png(mask) if mode == "P" else images.png(mask[None])
        (folder / "masks" / f"{number}.png").write_bytes(content)
    return folder


def prepared(run_script, *words: str):
    return run_script("prepare", "--set", "task=image-segmentation", "--set", "train.best=miou", *words)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_folder_of_images_and_masks_becomes_splits(run_script, tmp_path, mode):
    own(tmp_path / "own", mode=mode)
    code, printed, said = prepared(run_script, "--set", "data.path=own", "--set", "data.labels=[none, a, b, c]")
    assert code == 0, said
    assert "20 rows, 0 duplicates removed; 16 train, 2 dev, 2 test" in printed
    assert "labels: none: 20" in printed
    train = Segments.load(tmp_path / "results/data/dataset/train")
    names = np.load(tmp_path / "results/data/dataset/train" / images.NAMES)
    for at, name in enumerate(names):
        mask = np.asarray(Image.open(tmp_path / "own" / "masks" / f"{name}.png"))
        assert np.array_equal(train.labels[at], mask)
        assert np.array_equal(train.outlines[at], segments.outlines_of(mask))
        assert train.counts[at].tolist() == [int((mask == number).sum()) for number in range(4)]
    batch = train.batch(np.array([2, 0]), 1)
    assert {name: array.shape for name, array in batch.items()} == {
        "pixel_values": (2, 3, 12, 12),
        "labels_mask": (2, 12, 12),
        "labels_outlines": (2, 12, 12),
    }


def test_images_of_many_sizes_are_brought_to_one(run_script, tmp_path):
    own(tmp_path / "own")
    for part in ("images", "masks"):
        file = tmp_path / "own" / part / "3.png"
        Image.open(file).resize((30, 20), Image.Resampling.NEAREST).save(file)
    code, _, said = prepared(run_script, "--set", "data.path=own", "--set", "data.image_size=10")
    assert code == 0, said
    train = Segments.load(tmp_path / "results/data/dataset/train")
    assert train.pixels.shape[1:] == (3, 10, 10)
    assert set(np.unique(train.labels)) <= {0, 1, 2, 3, IGNORED}  # no number between two others
    (tmp_path / "results").rename(tmp_path / "before")
    code, _, said = prepared(run_script, "--set", "data.path=own")
    assert (code, said.count("\n")) == (2, 1), said
    assert "is 30 x 20 pixels, but 0 is 12 x 12" in said


def save(file, array, **options):
    Image.fromarray(array, **options).save(file)


def turned(file):
    """An image that EXIF says to be upside down."""
    picture = Image.open(file)
    exif = picture.getexif()
    exif[decoding.ORIENTATION] = 3
    picture.save(file, exif=exif)


def painted(file, red_first: bool):
    """A mask of numbers 0 and 1 in red and black, or the other way round."""
    mask = Image.fromarray(np.eye(12, dtype=np.uint8), "P")
    mask.putpalette([255, 0, 0, 0, 0, 0] if red_first else [0, 0, 0, 255, 0, 0])
    mask.save(file)


WRONG = {
    "size": (lambda own: save(own / "masks/3.png", np.zeros((9, 12), np.uint8)), r"3\.png: is 12 x 9 pixels, but"),
    "class": (
        lambda own: save(own / "masks/3.png", np.full((12, 12), 4, np.uint8)),
        r"3\.png: holds class 4, but data\.labels names 4 classes",
    ),
    "no image": (
        lambda own: (own / "images/3.png").unlink(),
        r"1 masks have no image of their name \(3\)\. Add images/3\.png, or remove",
    ),
    "no mask": (lambda own: (own / "masks/3.png").unlink(), r"1 images have no mask of their name \(3\)"),
    "colours": (
        lambda own: save(own / "masks/3.png", np.zeros((12, 12, 3), np.uint8)),
        r"3\.png: has colours \(RGB\), whose classes are unknown",
    ),
    "no picture": (lambda own: (own / "masks/3.png").write_bytes(b"no"), r"masks/3\.png: can't be decoded"),
    "lossy": (
        lambda own: (own / "masks/3.png").rename(own / "masks/3.jpg"),
        r"3\.jpg: this format is lossy and would change class numbers",
    ),
    "lossy inside": (
        lambda own: Image.fromarray(np.zeros((12, 12), np.uint8)).save(own / "masks/3.png", "JPEG"),
        r"3\.png: is JPEG, which is lossy and would change class numbers",
    ),
    "turned": (lambda own: turned(own / "images/3.png"), r"3\.png: EXIF says that it is to be turned, and nothing"),
    "colours of a number": (
        lambda own: [painted(own / f"masks/{n}.png", red_first=n % 2 == 0) for n in range(4)],
        r"1\.png: its number 0 has the colour \(0, 0, 0\), which was \(255, 0, 0\) in a mask before",
    ),
    "twice": (
        lambda own: save(own / "images/3.bmp", np.zeros((12, 12, 3), np.uint8)),
        r"images/3\.png: 3\.bmp has the same name",
    ),
    "folder": (lambda own: (own / "masks").rename(own / "labels"), r"has no folder masks\. It must hold images/NAME"),
    "large": (
        lambda own: save(own / "masks/3.png", np.full((12, 12), 700, np.uint16)),
        r"3\.png: holds 700; numbers of classes must be below 255",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_can_t_be_used_are_refused_in_clear_words(run_script, tmp_path, wrong):
    spoil, said = WRONG[wrong]
    spoil(own(tmp_path / "own"))
    code, _, errors = prepared(run_script, "--set", "data.path=own", "--set", "data.labels=[none, a, b, c]")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert re.search(said, errors), errors
    assert not (tmp_path / "results" / "data").exists()


def test_grey_levels_are_no_classes(run_script, tmp_path):
    folder = own(tmp_path / "own")
    for file in (folder / "masks").iterdir():
        save(file, np.asarray(Image.open(file)) // 2 * 128)
    code, _, said = prepared(run_script, "--set", "data.path=own")
    assert (code, said.count("\n")) == (2, 1), said
    assert "of the numbers 0 to 128, its masks hold 0, 128 only, as grey levels do" in said


def test_images_without_a_class_and_repeated_ones_are_left_out(run_script, tmp_path):
    folder = own(tmp_path / "own")
    save(folder / "masks/3.png", np.full((12, 12), IGNORED, np.uint8))
    (folder / "images/5.png").write_bytes((folder / "images/4.png").read_bytes())
    code, printed, said = prepared(run_script, "--set", "data.path=own")
    assert code == 0, said
    assert "20 rows, 1 duplicates removed; 14 train, 2 dev, 2 test" in printed
    assert "images without a pixel of any class, which are left out: 1" in printed
    assert read_json(tmp_path / "results/data/data.json")["duplicates_with_another_label"] == 1


MODEL = """
from torch import nn

class MyModel(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.both = nn.Conv2d(channels, classes + 1, 3, padding=1)

    def forward(self, pixel_values):
        both = self.both(pixel_values)
        return {returned}
"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("both[:, :-1]", r"must return the scores of outlines too, as its boundary: a tensor \[1, 8, 8\]"),
        ("both", r"returns \[1, 5, 8, 8\] for one sample, but must return the scores of 4 classes for each pixel"),
        ("Both(both[:, :-1], both[:, -1])", ""),
    ],
)
def test_a_model_of_one_s_own_returns_both(run_script, tmp_path, returned, said):
    both = "from collections import namedtuple\nBoth = namedtuple('Both', 'logits boundary')\n"
    (tmp_path / "own.py").write_text(both + MODEL.format(returned=returned))
    asked = ("--set", "data.image_size=8", "--set", "data.limit=30", "--set", "model.name=own.py:MyModel")
    code, _, errors = prepared(run_script, *asked)
    assert (code, errors.count("\n")) == ((2, 1) if said else (0, 0)), errors
    assert re.search(said, errors), errors


def test_other_models_are_refused(run_script):
    code, _, errors = prepared(run_script, "--set", "model.name=config")  # a folder, as transformers' models have
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "model.name: image-segmentation has no config. Set it to unet, or to a model of your" in errors


# Settings.


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"train": {"loss_weights": {"edges": 1}}}, "has no term edges; it is the sum of cross_entropy"),
        ({"train": {"loss_weights": {"boundry": 1}}}, "Did you mean boundary?"),
        ({"train": {"loss_weights": dict.fromkeys(TERMS, 0)}}, "all weights are 0, so nothing is trained"),
        ({"train": {"best": "macro_f1"}}, "image-segmentation has no macro_f1. Set it to one of: pixel_accuracy, miou"),
        (
            {"task": "text-classification", "train": {"best": "loss", "pos_weight": 2}},
            "train.pos_weight: text-classification does not accept it, only image-segmentation does",
        ),
        (
            {"task": "image-classification", "train": {"best": "loss", "pictures_every": 2}},
            "train.pictures_every: image-classification does not accept it",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(raw, said):
    whole = {"task": "image-segmentation", "rows": {"single": {"strategy": "single"}}} | raw
    whole["train"] = {"best": "miou"} | whole["train"]
    with pytest.raises(BadInput) as refused:
        reading.parse(whole)
    assert said in str(refused.value)


# From the data to the report.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = copy_project(tmp_path_factory.mktemp("segmentation"))
    place.path("small.yaml").write_text(SMALL)
    place.prepare(*ASKED)
    return place


@pytest.fixture(scope="module")
def trained(place):
    """`single`, trained and tested; its folder, and what was said."""
    finished = place.script("launch", *ASKED, "--row", "single")
    assert finished.returncode == 0, finished.stderr
    run = place.path("results/runs/single/n1/rep1")
    tested = place.script("evaluate", str(run))
    assert tested.returncode == 0, tested.stderr
    return run, finished.stdout


def test_each_term_is_logged_and_the_loss_is_their_weighted_sum(trained):
    run, said = trained
    record = read_json(run / paths.RECORD)
    terms = np.array([record["terms"][name] for name in TERMS])
    assert terms.shape == (len(TERMS), 8)
    assert np.array([1, 1, 0.5]) @ terms == pytest.approx(np.array(record["losses"]), rel=1e-6)
    number = r"(\d+\.\d{4})"
    line = rf"step (\d)/8: loss {number} \(cross_entropy {number}, hard_examples {number}, boundary {number}\)"
    told = [list(map(float, found)) for found in re.findall(line, said)]
    wanted = [[step, record["losses"][step - 1], *terms[:, step - 1]] for step in (2, 4, 6, 8)]
    assert np.array(told) == pytest.approx(np.array(wanted), abs=1e-4)


def test_pictures_are_drawn_as_epochs_end_and_the_best_is_kept_by_miou(trained):
    run, _ = trained
    assert [file.name for file in sorted((run / paths.PICTURES).iterdir())] == [
        f"epoch-{number:04d}.png" for number in (1, 2, 3)
    ]
    with Image.open(run / paths.PICTURES / "epoch-0001.png") as picture:
        assert picture.size == (3 * 128 + 2 * 4, 4 * 128 + 3 * 4)  # image, truth, prediction; of four images
    record = read_json(run / paths.RECORD)
    best = max(record["dev"], key=lambda scores: scores["miou"])
    assert read_json(run / "native" / "manifest.json")["step"] == best["step"]


def test_masks_of_0_and_255_are_told_what_255_means(run_script, tmp_path):
    """As editors save masks of one class."""
    folder = own(tmp_path / "own")
    for file in (folder / "masks").iterdir():
        mask = np.asarray(Image.open(file))
        Image.fromarray(np.where(mask > 0, 255, 0).astype(np.uint8)).save(file)
    code, _, said = prepared(run_script, "--set", "data.path=own", "--set", "data.labels=null")
    assert code == 2
    assert "255 means no class: where it is one in these masks, write 1 in its place." in said


def test_a_test_holds_each_image_s_mask_and_the_figures_of_all(trained, place):
    run, _ = trained
    report, frame = read_json(run / paths.TEST_REPORT), pd.read_csv(run / paths.TEST_PREDICTIONS)
    test = Segments.load(place.path("results/data/dataset/test"))
    masks = np.stack([segments.read_mask(paths.test_mask(run, number), None) for number in range(len(test))])
    known = test.labels != IGNORED
    assert report["support"] == known.sum() == frame["pixels"].sum()
    assert report["miou"] == pytest.approx(jaccard_score(test.labels[known], masks[known], average="macro"))
    assert report["pixel_accuracy"] == pytest.approx((test.labels == masks)[known].mean())
    assert f"mIoU {report['miou']:.4f}" in (run / paths.TEST_TEXT).read_text()


def test_a_model_predicts_masks_and_is_tested_on_one_s_own_images(trained, place, tmp_path):
    run, _ = trained
    folder = own(tmp_path / "own", count=5, size=16)
    asked = ("--model", str(run / "model"), "--image", str(folder / "images/3.png"), "--output", str(tmp_path / "said"))
    finished = place.script("predict", *asked)
    assert finished.returncode == 0, finished.stderr
    assert "%" in finished.stdout
    mask = segments.read_mask(tmp_path / "said" / "1-3.png", None)
    assert (mask.shape, mask.max() < 4) == ((16, 16), True)
    finished = place.script(
        "test", "--model", str(run / "model"), "--data", str(folder), "--output", str(tmp_path / "t")
    )
    assert finished.returncode == 0, finished.stderr
    tested = segments.read_mask(paths.test_mask(tmp_path / "t", 3), None)
    assert np.array_equal(tested, mask)
    # Others are brought to the size that the configuration has them brought to (data.image_size).
    own(tmp_path / "large", count=3, size=20)
    finished = place.script("test", "--model", str(run / "model"), "--data", str(tmp_path / "large"))
    assert finished.returncode == 0, finished.stderr
    assert "of 3 images" in finished.stdout


def test_the_report_shows_figures_terms_and_masks(trained, place):
    few = place.path("few.yaml")
    dropped = ["dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed"]
    dropped += ["accelerate", "trainer", "fabric", "fsdp"]
    few.write_text(f"rows: {{{', '.join(f'{name}: null' for name in dropped)}}}\n")
    for script in ("predict", "report"):
        finished = place.script(script, *ASKED, "--config=few.yaml")
        assert finished.returncode == 0, finished.stderr
    report = place.path("results/report")
    (row,) = pd.read_csv(report / paths.TABLE).to_dict("records")
    tested = read_json(trained[0] / paths.TEST_REPORT)
    assert (row["miou"], row["pixel_accuracy"]) == pytest.approx((tested["miou"], tested["pixel_accuracy"]))
    assert np.isnan(row["macro_f1"])
    page = (report / paths.PAGE).read_text()
    assert page.count('<div class="gallery wide">') == 3
    assert page.count('src="data:image/png;base64,') >= 6 + 3
    for words in (
        "The terms of single&#39;s loss",
        "boundary (x 0.5)",
        "no class: not counted",
        f"mIoU {row['miou']:.4f}",
    ):
        assert words in page
    assert (report / paths.PLOTS / "terms.svg").is_file()
    assert len(list(place.path("results/predict").glob("*.single.png"))) == 2


# Frameworks that give the model's layers weights in bf16, where batch normalisation and pixels need another treatment.
WEIGHTS_IN_BF16 = """
rows:
  fsdp_policy: {strategy: fsdp, precision: bf16, mixed_precision: policy, sync_batchnorm: true}
  deepspeed_native: {strategy: deepspeed, precision: bf16, native_precision: true, sync_batchnorm: true}
  weights_bf16: {strategy: recipe, precision: bf16, weights: bf16, sync_batchnorm: true}
"""
ROWS = ("dataparallel", "ddp", "ddp_spawn", "ddp_amp", "deepspeed", "accelerate", "trainer", "fabric", "fsdp")
NEED_HOROVOD = pytest.mark.skipif(not HOROVOD, reason="needs: make horovod")


@pytest.fixture(scope="module")
def reference(place):
    proven = place.script("parity", *ASKED, "--row", "reference", timeout=600)
    assert proven.returncode == 0, proven.stderr
    return place


def verdict(place, row: str, *words: str) -> dict:
    place.script("parity", *ASKED, *words, "--row", row)
    (file,) = place.path("results/parity").glob(f"{row}/n*/rep1/{paths.VERDICT}")
    return read_json(file)


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, pytest.param("horovod", marks=NEED_HOROVOD)])
def test_every_row_trains_the_same_model(reference, row):
    found = verdict(reference, row)
    assert found["proof"] == ("within-tolerance" if row == "ddp_amp" else "equal"), found["reason"]
    if row not in ("ddp_amp", "deepspeed"):  # which can't train in float64
        assert max(found["fp64"].values()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fsdp_policy", "deepspeed_native", "weights_bf16"])
def test_layers_with_weights_in_bf16_take_pixels_and_normalise_batches(reference, row):
    reference.path("bf16.yaml").write_text(WEIGHTS_IN_BF16)
    found = verdict(reference, row, "--config=bf16.yaml")
    assert found["proof"] == "within-tolerance", found["reason"]


@pytest.mark.slow
def test_hard_examples_of_a_batch_are_found_out(reference):
    """Negative control: a rank that chooses in its share of a batch trains another model, and the proof says so."""
    task = reference.path("workflow/scripts/lockstep/tasks/image_segmentation.py")
    honest = task.read_text()
    line = "hardest = plain.sort(dim=1, descending=True, stable=True).values\n"
    of_batch = line.replace("plain.", "plain.view(1, -1).") + "        most = most.sum()[None]\n"
    assert line in honest
    task.write_text(honest.replace(line, of_batch))
    try:
        proven = reference.script("parity", *ASKED, "--row", "reference", timeout=600)
        assert proven.returncode == 0, proven.stderr
        found = verdict(reference, "ddp")
    finally:
        task.write_text(honest)
    assert found["proof"] == "unequal"
    assert found["fp64"]["losses"] > 1e-4


@pytest.mark.slow
@pytest.mark.ci
def test_an_interrupted_run_carries_on_with_its_terms_and_pictures(place):
    asked = [*ASKED, "--set", "train.checkpoint_every=1", "--row", "ddp"]
    whole = place.script("launch", *asked, "--results", "results")
    assert whole.returncode == 0, whole.stderr
    run = place.path("results/runs/ddp/n2/rep1")
    undisturbed, drawn = read_json(run / paths.RECORD), (run / paths.PICTURES / "epoch-0001.png").read_bytes()
    for file in (run / paths.SAVED).iterdir():
        file.rename(run / f"gone-{file.name}")
    command = [sys.executable, "workflow/scripts/launch.py", *asked, "--results", "results"]
    started = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = time.monotonic() + 120
    while not any(saved.name >= "step-00000004" for saved in paths.saved_states(run)) and time.monotonic() < end:
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    said = started.communicate(timeout=120)[0]
    assert started.returncode, said
    finished = place.script("launch", *asked)
    assert finished.returncode == 0, finished.stderr
    record = read_json(run / paths.RECORD)
    assert record["resumed"], said
    assert (record["losses"], record["terms"]) == (undisturbed["losses"], undisturbed["terms"])
    assert (run / paths.PICTURES / "epoch-0001.png").read_bytes() == drawn


def test_the_network_takes_images_of_any_size():
    for height, width in ((32, 32), (13, 7), (5, 30)):
        said = UNet(3, 4).eval()(torch.zeros(2, 3, height, width))
        assert said.logits.shape == (2, 4, height, width)
        assert said.boundary.shape == (2, height, width)
