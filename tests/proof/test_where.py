"""Where a trial differs from its reference: the first step, and the weights."""

import math

import pytest
import torch

from lockstep.proof.parity import FP64, Trained

NAMES = ("embeddings.weight", "layer.0.weight", "layer.0.attention.key.bias", "classifier.weight")
START = {name: torch.zeros(4, dtype=torch.float64) for name in NAMES}
REFERENCE = Trained([1.0, 0.9, 0.8], 2.0, {name: torch.ones(4, dtype=torch.float64) for name in NAMES})


def trained(losses=(1.0, 0.9, 0.8), **changed) -> Trained:
    """The reference with other losses, and with these numbers added to weights."""
    weights = {name: weight + changed.get(name.split(".")[0], 0.0) for name, weight in REFERENCE.weights.items()}
    return Trained(list(losses), 2.0, weights)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (trained(), "its losses agree, and its weights agree"),
        (trained((1.0, 0.9, 0.7)), "its loss differs from step 3 on, and its weights agree"),
        (trained((1.5, 0.9, 0.8)), "its loss differs from step 1 on, and its weights agree"),
        (trained((math.nan, 0.9, 0.8)), "its loss differs from step 1 on, and its weights agree"),
        (trained(classifier=0.5), "its losses agree, and 1 of 3 weights differ, classifier.weight most"),
        (trained(layer=0.5, classifier=1e-3), "its losses agree, and 2 of 3 weights differ, layer.0.weight most"),
        (
            trained(layer=0.5, embeddings=math.nan),
            "its losses agree, and 2 of 3 weights differ, embeddings.weight most",
        ),
        (trained(classifier=1e-12), "its losses agree, and its weights agree"),
    ],
)
def test_the_first_step_and_the_farthest_weight_are_named(other, said):
    assert REFERENCE.where(other, START, FP64) == said


def test_a_weight_that_only_the_other_has_moved_is_the_farthest():
    still = Trained([1.0], 2.0, REFERENCE.weights | {"classifier.weight": START["classifier.weight"]})
    other = Trained([1.0], 2.0, {name: weight + 0.5 for name, weight in still.weights.items()})
    assert still.where(other, START, FP64).endswith("3 of 3 weights differ, classifier.weight most")


def test_the_distances_are_those_of_all_weights_together():
    """update: of 12 numbers, each moved by 1, four are .5 away, and the key's bias does not count."""
    distances = REFERENCE.distances(trained((1.0, 0.7, 0.8), layer=0.5), START)
    assert distances.losses == pytest.approx(0.2)
    assert distances.weights == 0.5
    assert distances.norm == 0
    assert distances.update == pytest.approx((4 * 0.25 / 12) ** 0.5)
