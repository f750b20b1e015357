"""The optimizer that every strategy gets, and the one whose state takes fewer bits."""

import pytest
import torch

from lockstep.config import reading
from lockstep.model.optimizer import BETAS, EPS, in_8_bits, make_optimizer


def test_in_8_bits_weights_groups_and_settings_are_the_same():
    pytest.importorskip("bitsandbytes")
    train = reading.parse({"rows": {"single": {"strategy": "single"}}}).rows["single"].train
    whole = make_optimizer(torch.nn.Linear(64, 64), train)
    small = in_8_bits(whole)
    for ours, theirs in zip(small.param_groups, whole.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))
        assert (ours["weight_decay"], ours["lr"]) == (theirs["weight_decay"], theirs["lr"])
        assert (tuple(ours["betas"]), ours["eps"]) == (BETAS, EPS)
    for group in small.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    small.step()
    matrix, bias = (small.state[group["params"][0]]["state1"].dtype for group in small.param_groups)
    assert (matrix, bias) == (torch.uint8, torch.float32)  # of fewer than 4096 numbers all bits are kept
