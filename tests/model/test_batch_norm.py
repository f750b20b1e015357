"""Batch normalisation over all ranks: what one rank computes, and which models can't be synchronised."""

import copy

import pytest
import torch
from torch import nn

from lockstep.config import reading
from lockstep.errors import RunFailed
from lockstep.model import batch_norm
from lockstep.model.convnets import BasicNetBN, ResNet


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("plain", "shape"), [(nn.BatchNorm1d(5), (7, 5)), (nn.BatchNorm1d(5), (7, 5, 3)), (nn.BatchNorm2d(5), (4, 5, 3, 2))]
)
def test_alone_it_computes_what_pytorch_s_does(plain, shape, momentum):
    torch.manual_seed(0)
    plain = copy.deepcopy(plain).double()
    plain.momentum = momentum
    nn.init.normal_(plain.weight)
    shared = batch_norm.shared(lambda tensor: tensor)(copy.deepcopy(plain))
    for module in (plain, shared):
        module.seen = [
            torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)
        ]
        for batch in module.seen:
            batch.requires_grad_(True)
            module(batch).square().mul(torch.arange(batch.numel()).view(shape)).sum().backward()
    for ours, theirs in ((plain.seen[0].grad, shared.seen[0].grad), (plain.weight.grad, shared.weight.grad)):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    assert torch.allclose(plain.running_var, shared.running_var, rtol=1e-12)
    assert torch.equal(plain.num_batches_tracked, shared.num_batches_tracked)
    assert torch.allclose(plain.eval()(plain.seen[0]), shared.eval()(plain.seen[0]))


def test_every_normalisation_of_a_model_is_replaced_and_keeps_its_place():
    model = ResNet(channels=1, classes=3)
    names = list(model.state_dict())
    assert not batch_norm.is_synchronised(model)
    model = batch_norm.synchronised(model, batch_norm.shared(lambda tensor: tensor))
    assert batch_norm.is_synchronised(model)
    assert list(model.state_dict()) == names


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))


def test_a_normalisation_that_is_not_known_is_named():
    model = nn.Sequential(nn.Linear(3, 3), OwnNorm())
    with pytest.raises(RunFailed, match=r"sync_batchnorm: 1 is a OwnNorm, which Lockstep can't synchronise"):
        batch_norm.synchronised(model, batch_norm.shared(lambda tensor: tensor))


@pytest.mark.parametrize(
    ("model", "depends"),
    [
        (BasicNetBN(1, 8, 8, 3), True),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3)), False),
        (nn.InstanceNorm2d(3, track_running_stats=True), False),
        (OwnNorm(), True),
    ],
)
def test_which_models_depend_on_the_batch(model, depends):
    assert any(batch_norm.depends_on_batch(module) for module in model.modules()) == depends


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"strategy": "single"}, ""),
        ({"strategy": "ddp", "sync_batchnorm": True}, ""),
        ({"strategy": "horovod", "sync_batchnorm": True}, ""),
        ({"strategy": "ddp"}, "over each device's share of the batch; sync_batchnorm: true takes them over all"),
        ({"strategy": "pp", "processes": 4}, "over each device's share of the batch"),  # has no such option
        ({"strategy": "ddp", "sync_batchnorm": True, "accumulation": 2}, "over a micro-batch"),
    ],
)
def test_where_shares_are_normalised_apart_a_row_is_another_model(row, why):
    asked = reading.parse({"hardware": {"device": "cpu", "processes": 2, "oversubscribe": True}, "rows": {"x": row}})
    told = asked.trial(asked.rows["x"]).splits_batch_statistics
    assert told == (f"batch normalisation takes its statistics {why}" if why else "")
