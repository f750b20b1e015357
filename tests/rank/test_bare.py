"""The bare loop, which is the least time that a training takes: it does the row's work and no less."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from lockstep.rank import bare

PLAN = SimpleNamespace(steps=2, widths=np.array([8, 8]), step_ids=lambda step: np.arange(4))


def batch(ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
    tokens = np.arange(len(ids) * width).reshape(len(ids), width) % 50
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": ids % 3}


def moved(clip: float) -> float:
    """How far two steps of plain gradient descent move the weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **shape)).eval()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    bare.train(model, optimizer, schedule, PLAN, SimpleNamespace(batch=batch), clip=clip)
    return float((torch.nn.utils.parameters_to_vector(model.parameters()) - before).norm())


def test_gradients_are_clipped_as_the_row_says():
    """Two steps of rate 1 move the weights by twice the clipped norm at most, and 0 does not clip."""
    assert moved(clip=0.01) == pytest.approx(0.02, rel=0.05)
    assert moved(clip=0) == moved(clip=1e9) > 0.1
