"""Master weights: an optimizer of fp32 weights for a model that computes in bf16."""

import copy

import pytest
import torch
from torch.optim import AdamW

from lockstep.model import batch_norm
from lockstep.model.master_weights import MasterWeights, in_bf16

CLIP = 0.05


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in fp32, the same one each time, and its copy in bf16."""
    torch.manual_seed(0)
    master = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return master, copy.deepcopy(master).to(torch.bfloat16)


def backward(model: torch.nn.Module, step: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
    model(inputs.to(next(model.parameters()).dtype)).float().square().sum().backward()


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_it_is_the_optimizer_by_itself_on_gradients_of_bf16(clip):
    master, working = models()
    alone = copy.deepcopy(master)
    optimizer, plain = MasterWeights(AdamW(master.parameters()), master, working, clip), AdamW(alone.parameters())
    for step in range(4):
        backward(working, step)
        for weight, computed in zip(alone.parameters(), working.parameters(), strict=True):
            weight.grad = computed.grad.float()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in alone.parameters()])
        assert norm > CLIP  # otherwise this would not test clipping
        if clip:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
        for kept, weight, rounded in zip(master.parameters(), alone.parameters(), working.parameters(), strict=True):
            assert torch.equal(kept, weight)
            assert torch.equal(rounded, kept.to(torch.bfloat16))
            assert rounded.dtype == torch.bfloat16
            assert kept.grad is rounded.grad is None


def test_updates_too_small_for_bf16_add_up():
    def moved(model):
        return (before - model[0].weight.float()).abs().max()

    master, working = models()
    (_, without), before = models(), working[0].weight.detach().float()
    kept, rounded = AdamW(master.parameters(), lr=1e-5), AdamW(without.parameters(), lr=1e-5, weight_decay=0)
    optimizer = MasterWeights(kept, master, working, 0.0)
    large = before.abs() > 0.1  # there neighbouring numbers of bf16 differ by at least 1e-4
    for _ in range(300):
        for model, stepped in ((working, optimizer), (without, rounded)):
            backward(model, 0)
            stepped.step()
            stepped.zero_grad()
    assert torch.equal(before[large], without[0].weight.detach().float()[large])
    assert not torch.equal(before[large], working[0].weight.detach().float()[large])


def test_weights_that_are_not_trained_stay():
    master, working = models()
    for model in (master, working):
        model[0].requires_grad_(False)
    start = copy.deepcopy(master.state_dict())
    optimizer = MasterWeights(AdamW(master[2].parameters()), master, working, CLIP)
    backward(working, 0)
    optimizer.step()
    assert {name for name, weight in master.state_dict().items() if not torch.equal(weight, start[name])} == {
        "2.weight",
        "2.bias",
    }


def test_a_schedule_sets_the_optimizer_inside():
    master, working = models()
    inside = AdamW(master.parameters(), lr=0.1)
    optimizer = MasterWeights(inside, master, working, 0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    backward(working, 0)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in inside.param_groups] == [0.05]
    assert optimizer.state is inside.state


@pytest.mark.parametrize("shared", [False, True])
def test_batch_normalisation_keeps_its_statistics_in_the_model_that_is_saved(shared):
    torch.manual_seed(0)
    master = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    working, plain = in_bf16(master), copy.deepcopy(master)
    if shared:  # as rows do with sync_batchnorm
        working = batch_norm.synchronised(working, batch_norm.shared(lambda sums: sums))
    assert [weight.dtype for weight in working.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    optimizer = MasterWeights(AdamW(master.parameters()), master, working, 0.0)
    images = torch.randn(8, 1, 6, 6)
    for model, dtype in ((working, torch.bfloat16), (plain, torch.float32)):
        model(images.to(dtype)).float().square().sum().backward()
    optimizer.step()
    kept = master[1]
    assert int(kept.num_batches_tracked) == 1
    assert kept.running_var.dtype == torch.float32
    torch.testing.assert_close(kept.running_mean, plain[1].running_mean, atol=2e-3, rtol=0)
    torch.testing.assert_close(kept.running_var, plain[1].running_var, atol=2e-3, rtol=0)
    assert not torch.equal(kept.weight, plain[1].weight), "its weights are trained"
