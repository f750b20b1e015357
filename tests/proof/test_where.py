"""Where a trial differs from its reference: the first step, the weights, and the first step's gradients."""

import math

import pytest
import torch
import transformers

from lockstep import paths
from lockstep.config import reading
from lockstep.proof import parity
from lockstep.proof.parity import FP64, KEYS_BIAS, Trained, first_gradients, without_gradient

NAMES = ("embeddings.weight", "layer.0.weight", "layer.0.attention.key.bias", "classifier.weight")
START = {name: torch.zeros(4, dtype=torch.float64) for name in NAMES if not name.endswith("key.bias")}
REFERENCE = Trained([1.0, 0.9, 0.8], 2.0, {name: torch.ones(4, dtype=torch.float64) for name in NAMES})


def trained(losses=(1.0, 0.9, 0.8), **changed) -> Trained:
    """The reference with other losses, and with these numbers added to weights."""
    weights = {name: weight + changed.get(name.split(".")[0], 0.0) for name, weight in REFERENCE.weights.items()}
    return Trained(list(losses), 2.0, weights)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((1.0, 0.9, 0.8), "its losses agree"),
        ((1.0, 0.9, 0.7), "its loss differs from step 3 on"),
        ((1.5, 0.9, 0.8), "its loss differs from step 1 on"),
        ((math.nan, 0.9, 0.8), "its loss differs from step 1 on"),
    ],
)
def test_the_first_step_whose_loss_differs_is_named(losses, said):
    assert REFERENCE.where_losses(trained(losses), FP64) == said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (trained(), "its weights agree"),
        (trained(classifier=0.5), "1 of 3 weights differ, classifier.weight most"),
        (trained(layer=0.5, classifier=1e-3), "2 of 3 weights differ, layer.0.weight most"),
        (trained(layer=0.5, embeddings=math.nan), "2 of 3 weights differ, embeddings.weight most"),
        (trained(classifier=1e-12), "its weights agree"),
    ],
)
def test_the_farthest_weight_is_named(other, said):
    assert REFERENCE.where_weights(other, START, FP64) == said


def test_a_weight_that_only_the_other_has_moved_is_the_farthest():
    still = Trained([1.0], 2.0, REFERENCE.weights | {"classifier.weight": START["classifier.weight"]})
    other = Trained([1.0], 2.0, {name: weight + 0.5 for name, weight in still.weights.items()})
    assert still.where_weights(other, START, FP64) == "3 of 3 weights differ, classifier.weight most"


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, (0, None, None)),
        ({"layer": 1.0}, (1, "layer.0.weight", 2.0)),
        ({"layer": -2.0}, (1, "layer.0.weight", 1.0)),  # as large, and in the other direction
        ({"embeddings": 0.5, "layer": -0.5}, (2, "layer.0.weight", 0.5)),
        ({"classifier": 1e-12}, (0, None, None)),
        ({"embeddings": math.nan}, (1, "embeddings.weight", math.nan)),
    ],
)
def test_of_gradients_that_differ_the_nearest_to_the_loss_is_named(changed, first):
    found = first_gradients(REFERENCE, trained(**changed), START)
    assert found["weights"] == 3, "the key's bias has no gradient"
    assert (found["differing"], found["nearest"]) == first[:2]
    assert found["times"] == (first[2] if first[2] is None else pytest.approx(first[2], nan_ok=True))


def test_files_have_another_order_than_the_model():
    other = trained(embeddings=0.5, layer=0.5)
    turned = Trained(other.losses, other.norm, dict(reversed(other.weights.items())))
    assert first_gradients(turned, REFERENCE, START)["nearest"] == "layer.0.weight"


def test_the_distances_are_those_of_all_weights_together():
    """update: of 12 numbers, each moved by 1, four are .5 away, and the key's bias does not count."""
    distances = REFERENCE.distances(trained((1.0, 0.7, 0.8), layer=0.5), START)
    assert distances.losses == pytest.approx(0.2)
    assert distances.weights == 0.5
    assert distances.norm == 0
    assert distances.update == pytest.approx((4 * 0.25 / 12) ** 0.5)


SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SMALL),
        transformers.DebertaV2Config(**SMALL),
        transformers.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        transformers.Qwen2Config(**SMALL, num_key_value_heads=2, pad_token_id=0),
        transformers.PhiConfig(**SMALL, partial_rotary_factor=0.5, pad_token_id=0),
    ],
    ids=("bert", "deberta", "deberta-relative", "qwen", "phi"),
)
def test_the_bias_of_keys_is_left_out_only_where_its_gradient_is_zero(config):
    torch.manual_seed(0)
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = config.attention_dropout = 0.0
    model = transformers.AutoModelForSequenceClassification.from_config(config).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    ids = torch.randint(1, 20, (4, 6))
    model(input_ids=ids, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    biases = {name: weight for name, weight in model.named_parameters() if name.endswith(KEYS_BIAS)}
    assert len(biases) >= 2  # one in each layer, with DeBERTa's positions two
    zero = {name for name, weight in biases.items() if weight.grad.abs().min() < 1e-12}  # Phi's in part
    assert without_gradient(model) == zero


def test_a_trial_compares_no_weight_that_no_gradient_moves(tmp_path):
    row = reading.parse({"rows": {"x": {"strategy": "single"}}}).rows["x"]
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    model.save_pretrained(paths.data_folder(tmp_path) / paths.WEIGHTS)
    compared = parity._start(tmp_path, row)
    assert set(model.state_dict()) - set(compared) == {name for name in model.state_dict() if "key.bias" in name}
    assert compared
