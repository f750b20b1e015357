"""Samples that can be seen: some of the test split with truth and prediction, and the mistakes a model is surest of."""

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lockstep import paths
from lockstep.config import registry
from lockstep.report.summary import Summary, good_runs
from lockstep.report.words import Text, say

MOST = 16  # samples of each kind


@dataclass(frozen=True)
class Shown:
    """One sample, as the page shows it."""

    picture: str  # a data address
    name: str
    truth: str
    predicted: str
    probability: str  # of what was predicted
    right: bool


def galleries(summary: Summary, results: Path) -> list[tuple[Text, list[Shown]]]:
    """A title and its samples, by the model of the first row that was tested; none where samples can't be seen."""
    tested = ((row["row"], good_runs(summary.runs[row["row"]])) for row in summary.finished_rows)
    row, runs = next(((row, runs) for row, runs in tested if runs), ("", []))
    task = registry.load_task(summary.data.get("task", "text-classification"))()
    if not runs or not task.VISIBLE:
        return []
    folder = next(iter(paths.run_files(results, paths.TEST_PREDICTIONS, row=row)), None)
    if folder is None:
        return []
    frame = pd.read_csv(folder, keep_default_na=False, dtype=str, encoding="utf-8-sig")
    chances = frame.filter(regex="^p_").astype(float).to_numpy().max(axis=1)
    wrong = np.flatnonzero((frame["truth"] != frame["predicted"]).to_numpy())
    some = np.linspace(0, len(frame) - 1, min(MOST, len(frame))).astype(int)
    surest = wrong[np.argsort(-chances[wrong], kind="stable")][:MOST]
    split = paths.split_folder(paths.data_folder(results), "test")

    def shown(places: np.ndarray) -> list[Shown]:
        return [
            Shown(
                picture="data:image/png;base64," + base64.b64encode(png).decode(),
                name=str(frame.iloc[position, 0]),
                truth=frame["truth"][position],
                predicted=frame["predicted"][position],
                probability=f"{chances[position]:.2f}",
                right=position not in wrong,
            )
            for position, png in zip(places, task.pictures(split, places), strict=True)
        ]

    mistakes = say("gallery_mistakes", row=row, wrong=len(wrong), tested=len(frame))
    return [(say("gallery_some", row=row), shown(some)), (mistakes, shown(surest))]
