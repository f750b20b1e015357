"""LoRA's updates: where peft puts them, how they begin, and what they come to in a plain model."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, FNetConfig, FNetForSequenceClassification

from lockstep.errors import RunFailed
from lockstep.model import lora

pytest.importorskip("peft", reason="needs peft: make setup")


def model() -> BertForSequenceClassification:
    """A small one, with the same weights each time."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=3, **size))


def test_updates_begin_alike_on_every_rank_whose_dropout_differs():
    made, drawn = [], []
    for seed, each in enumerate((model(), model())):
        torch.manual_seed(seed)
        made.append(lora.adapted(each, 4).state_dict())
        drawn.append(torch.rand(1).item())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert drawn[0] != drawn[1]


def test_merged_is_a_plain_model_with_the_updates_added():
    start, wrapper = model().state_dict(), lora.adapted(model(), 4)
    adapted = wrapper.get_base_model()
    assert type(adapted) is BertForSequenceClassification
    assert all(torch.equal(weight, start[name]) for name, weight in lora.merged(wrapper).items())
    updates = {name: weight for name, weight in adapted.named_parameters() if ".lora_" in name}
    with torch.no_grad():
        for weight in updates.values():
            weight.fill_(0.5)
    merged = lora.merged(wrapper)
    assert list(merged) == list(start)
    for name, weight in merged.items():
        added = 4 * 0.5 * 0.5 if name.endswith(("query.weight", "value.weight")) else 0.0
        torch.testing.assert_close(weight, start[name] + added)
    assert all((weight == 0.5).all() for weight in updates.values())  # the live model has its updates apart


def test_a_live_model_tells_its_rank():
    assert lora.rank_of(model()) == 0
    assert lora.rank_of(lora.adapted(model(), 8).get_base_model()) == 8


def test_a_model_that_peft_does_not_know():
    without_attention = FNetForSequenceClassification(FNetConfig(hidden_size=8, num_hidden_layers=1))
    with pytest.raises(RunFailed, match="lora: peft can't adapt fnet; take lora: 0"):
        lora.adapted(without_attention, 4)
