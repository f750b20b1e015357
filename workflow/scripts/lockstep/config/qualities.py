"""Figures of a model's quality, such as macro-F1. Each is one entry here, with its texts in workflow/report/words.yaml.

The literal QUALITY of a task's file lists the task's figures. Everything else follows from the entry: the column of the
table (lockstep/columns.py), the description of a test, the choices for train.best, and the comparison of rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    name: str  # its key in a task's scores and in the report on the test split, and its column
    counted: str  # what it is computed over: samples, tokens or pixels
    reads: tuple[str, ...] = ("confusion_matrix", "labels")  # further keys of the test's report that the page shows
    lower_is_better: bool = False
    compared_by: str = ""  # an equivalent figure by which rows are compared; empty: this one
    digits: int = 4  # after the decimal point, for display
    least: float = 0  # the valid range
    most: float = 1
    terminal: int = 9  # its column's position in the order in which narrow terminals drop columns
    # Computes, from a test's report, the score of a model that has learnt nothing. None: it is unknown.
    of_nothing: Callable[[dict], float] | None = None

    def score(self, figures: dict) -> float:
        """The number by which figures of a test, or of the dev split, are compared; higher is better."""
        value = figures[self.compared_by if self.compared_by in figures else self.name]
        return -value if self.lower_is_better else value


def _truths(test: dict) -> list[int]:
    """The number of samples or pixels of each label."""
    return [sum(line) for line in test["confusion_matrix"]]


def _f1_of_one_label(test: dict) -> float:
    """Macro-F1 of a model that always predicts the most frequent label, whose F1 alone is above 0."""
    truths = _truths(test)
    frequency = max(truths) / sum(truths)
    return 2 * frequency / (1 + frequency) / len(truths)


def _iou_of_one_label(test: dict) -> float:
    """mIoU of a model that always predicts the most frequent label: its frequency, averaged over existing labels."""
    truths = _truths(test)
    return max(truths) / sum(truths) / sum(count > 0 for count in truths)


QUALITIES = {
    quality.name: quality
    for quality in (
        Quality("accuracy", "samples", terminal=3),
        Quality("macro_f1", "samples", terminal=7, of_nothing=_f1_of_one_label),
        Quality(
            "perplexity",
            "tokens",
            ("loss", "trigram_perplexity"),
            lower_is_better=True,
            compared_by="loss",  # perplexity is exp(loss)
            digits=2,
            least=1,
            most=math.inf,
            terminal=8,
            of_nothing=lambda test: -math.log(test["trigram_perplexity"]),
        ),
        Quality("pixel_accuracy", "pixels", terminal=4),
        Quality("miou", "pixels", of_nothing=_iou_of_one_label),
    )
}
LOSS = Quality("loss", "samples", lower_is_better=True)  # every task has it for the dev split
KEPT_BY = {**QUALITIES, "loss": LOSS}  # the choices for train.best, of which a task has some
