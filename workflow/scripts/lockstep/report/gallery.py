"""Samples that can be shown: some of the test split with truth and prediction, and a model's worst mistakes."""

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lockstep import paths
from lockstep.config import registry
from lockstep.data import segments
from lockstep.report.reading import good_runs
from lockstep.report.summary import Summary
from lockstep.report.words import Text, same, say

MOST = 16  # samples per gallery
MOST_WIDE = 6  # of samples with masks, and of the pictures that a run drew while it trained


@dataclass(frozen=True)
class Shown:
    """One sample as the page shows it."""

    picture: str  # a data URL
    name: str
    truth: str
    predicted: Text
    probability: str  # that of the predicted label
    right: bool


@dataclass(frozen=True)
class Gallery:
    """Samples below a title; `legend`: the meaning of their colours as (name, colour), if they have any."""

    title: Text
    shown: list[Shown]
    legend: list[tuple[Text, str]]


def galleries(summary: Summary, results: Path) -> list[Gallery]:
    """The predictions of the first tested row's model for samples; empty if the samples can't be shown."""
    tested = ((row["row"], good_runs(summary.runs[row["row"]])) for row in summary.finished_rows)
    row, runs = next(((row, runs) for row, runs in tested if runs), ("", []))
    task = registry.load_task(summary.data.get("task", "text-classification"))()
    if not runs or not task.VISIBLE:
        return []
    file = next(iter(paths.run_files(results, paths.TEST_PREDICTIONS, row=row)), None)
    if file is None:
        return []
    frame = pd.read_csv(file, keep_default_na=False, dtype=str, encoding="utf-8-sig")
    split = paths.split_folder(paths.data_folder(results), "test")
    if "miou" in frame:
        return _masks(task, row, frame, split, file.parents[1], summary.data["labels"])
    return _labels(task, row, frame, split)


def _labels(task, row: str, frame: pd.DataFrame, split: Path) -> list[Gallery]:
    """Some samples with their labels, and the mistakes of which the model is most confident."""
    chances = frame.filter(regex="^p_").astype(float).to_numpy().max(axis=1)
    wrong = np.flatnonzero((frame["truth"] != frame["predicted"]).to_numpy())
    surest = wrong[np.argsort(-chances[wrong], kind="stable")][:MOST]

    def shown(places: np.ndarray) -> list[Shown]:
        return [
            Shown(
                picture=_address(png),
                name=str(frame.iloc[position, 0]),
                truth=frame["truth"][position],
                predicted=same(frame["predicted"][position]),
                probability=f"{chances[position]:.2f}",
                right=position not in wrong,
            )
            for position, png in zip(places, task.pictures(split, places), strict=True)
        ]

    mistakes = say("gallery_mistakes", row=row, wrong=len(wrong), tested=len(frame))
    return [
        Gallery(say("gallery_some", row=row), shown(_spread(len(frame), MOST)), []),
        Gallery(mistakes, shown(surest), []),
    ]


def _masks(task, row: str, frame: pd.DataFrame, split: Path, run: Path, labels: list[str]) -> list[Gallery]:
    """Some samples with their masks, those with the lowest mIoU, and the pictures drawn during training."""
    ious = frame["miou"].astype(float).to_numpy()

    def shown(places: np.ndarray) -> list[Shown]:
        masks = [paths.test_mask(run, int(place)) for place in places]
        there = [(place, mask) for place, mask in zip(places, masks, strict=True) if mask.is_file()]
        pictures = task.beside(
            split, [place for place, _ in there], [segments.read_mask(mask, None) for _, mask in there]
        )
        return [
            _wide(png, str(frame.iloc[place, 0]), same(f"{frame.iloc[place, 0]}: mIoU {ious[place]:.2f}"))
            for (place, _), png in zip(there, pictures, strict=True)
        ]

    drawn = sorted((run / paths.PICTURES).glob(paths.picture_file(run, "*").name))
    epochs = [
        _wide(file.read_bytes(), file.name, say("gallery_epoch", epoch=int(file.stem.rpartition("-")[2])))
        for file in (drawn[place] for place in _spread(len(drawn), MOST_WIDE))
    ]
    titled = [
        ("gallery_masks", shown(_spread(len(frame), MOST_WIDE))),
        ("gallery_worst", shown(np.argsort(ious, kind="stable")[:MOST_WIDE])),
        ("gallery_epochs", epochs),
    ]
    colours = segments.palette()
    legend = [(same(name), _hex(colours[number])) for number, name in enumerate(labels)]
    legend.append((say("gallery_no_class"), _hex(colours[segments.IGNORED])))
    return [Gallery(say(title, row=row), samples, legend) for title, samples in titled if samples]


def _wide(png: bytes, name: str, told: Text) -> Shown:
    return Shown(_address(png), name, truth="", predicted=told, probability="", right=True)


def _spread(count: int, most: int) -> np.ndarray:
    """At most `most` of `count` positions, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int)) if count else np.zeros(0, int)


def _hex(colour: np.ndarray) -> str:
    return "#" + bytes(colour).hex()


def _address(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
