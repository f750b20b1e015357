"""Figures of quality: how good a model is, as tasks measure it. Each is one entry here, with its name's words in
workflow/report/words.yaml; the literal QUALITY of a task's file says which it has.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    name: str  # of the column, in a task's scores and in its report on the test split
    counted: str  # what it is a figure of: samples, tokens, pixels
    reads: tuple[str, ...] = ("confusion_matrix", "labels")  # what else the report takes from that on the test split
    lower_is_better: bool = False
    compared_by: str = ""  # another figure that tells the same and by which rows are compared; empty: by itself
    digits: int = 4  # after the point, where a test is told of
    # What a model is compared by that has learnt nothing, from a test. None: nothing is known of that.
    of_nothing: Callable[[dict], float] | None = None

    def score(self, figures: dict) -> float:
        """By what figures of a test, or of the dev split, are compared: the higher, the better."""
        value = figures[self.compared_by if self.compared_by in figures else self.name]
        return -value if self.lower_is_better else value


def _truths(test: dict) -> list[int]:
    """How many there are of each label."""
    return [sum(line) for line in test["confusion_matrix"]]


def _f1_of_one_label(test: dict) -> float:
    """Macro-F1 of a model that always names the most frequent label: that one's F1, and 0 of the others."""
    truths = _truths(test)
    share = max(truths) / sum(truths)
    return 2 * share / (1 + share) / len(truths)


def _iou_of_one_label(test: dict) -> float:
    """mIoU of the same: its label's share of all, and 0 of the others, of which those that exist count."""
    truths = _truths(test)
    return max(truths) / sum(truths) / sum(count > 0 for count in truths)


QUALITIES = {
    quality.name: quality
    for quality in (
        Quality("accuracy", "samples"),
        Quality("macro_f1", "samples", of_nothing=_f1_of_one_label),
        Quality(
            "perplexity",
            "tokens",
            ("loss", "trigram_perplexity"),
            lower_is_better=True,
            compared_by="loss",  # its logarithm
            digits=2,
            of_nothing=lambda test: -math.log(test["trigram_perplexity"]),
        ),
        Quality("pixel_accuracy", "pixels"),
        Quality("miou", "pixels", of_nothing=_iou_of_one_label),
    )
}
LOSS = Quality("loss", "samples", lower_is_better=True)  # which every task has of the dev split
KEPT_BY = {**QUALITIES, "loss": LOSS}  # what says which weights were best (train.best), of those that a task has
