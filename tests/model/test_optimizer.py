"""The optimizers and schedules that every strategy gets."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, get_scheduler
from transformers.optimization import get_polynomial_decay_schedule_with_warmup

from lockstep.config import reading
from lockstep.config.fixed import EPS
from lockstep.model import muon
from lockstep.model.optimizer import hyperparameters, make_optimizer, make_schedule, wrap_optimizer
from lockstep.model.schedule import lr_factor

TRAIN = reading.parse({}).train
LLAMA = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
KINDS = ((True, True), (False, True), (False, False))  # of weights: whether Muon takes it, whether it is decayed
SCHEDULES = ["constant", "linear", "cosine", "polynomial", "step", "constant_then_linear"]
ASKED = {
    "adamw": {"betas": [0.8, 0.99]},
    "adam": {"betas": [0.8, 0.99]},
    "sgd": {"momentum": 0.9, "nesterov": True},
}


def asked(optimizer: str):
    return replace(TRAIN, optimizer=optimizer, **ASKED[optimizer])


@pytest.mark.parametrize("optimizer", ASKED)
def test_an_optimizer_has_what_is_asked_for_in_every_group(optimizer):
    made = make_optimizer(torch.nn.Linear(64, 64), asked(optimizer))
    assert type(made).__name__.lower() == optimizer
    wanted = {"momentum": 0.9, "nesterov": True, "dampening": 0} if optimizer == "sgd" else {"betas": (0.8, 0.99)}
    for group, decay in zip(made.param_groups, (0.01, 0.0), strict=True):
        assert group.items() >= (wanted | {"lr": 0.0015, "weight_decay": decay, "fused": True}).items()
        assert group.items() >= hyperparameters(asked(optimizer)).items()


def test_unless_told_otherwise_it_is_the_adamw_that_it_was():
    made = make_optimizer(torch.nn.Linear(64, 64), TRAIN)
    assert type(made) is torch.optim.AdamW
    assert all(
        group.items() >= {"betas": (0.9, 0.999), "eps": EPS, "fused": True}.items() for group in made.param_groups
    )


@pytest.mark.parametrize("optimizer", ASKED)
def test_an_optimizer_is_remade_with_its_groups_and_settings(optimizer):
    """zero_redundancy does so; both optimizers then train the same model."""
    models = [torch.nn.Linear(5, 5) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole, copied = (make_optimizer(model, asked(optimizer)) for model in models)
    copied = wrap_optimizer(copied, lambda groups, optimizer_class, **settings: optimizer_class(groups, **settings))
    assert type(copied) is type(whole)
    for _ in range(4):
        for model, stepping in zip(models, (whole, copied), strict=True):
            model(torch.ones(3, 5)).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_in_8_bits_weights_groups_and_settings_are_the_same():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install -r requirements-dev.txt")
    model = torch.nn.Linear(64, 64)
    whole, small = (make_optimizer(model, replace(TRAIN, optimizer=name)) for name in ("adamw", "adamw8bit"))
    for ours, theirs in zip(small.param_groups, whole.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))
        assert (ours["weight_decay"], ours["lr"]) == (theirs["weight_decay"], theirs["lr"])
        assert (tuple(ours["betas"]), ours["eps"]) == (theirs["betas"], EPS)
    for group in small.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    small.step()
    matrix, bias = (small.state[group["params"][0]]["state1"].dtype for group in small.param_groups)
    assert (matrix, bias) == (torch.uint8, torch.float32)  # tensors of fewer than 4096 numbers keep 32 bits


def small_bert():
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=3, **size)).eval()


def test_muon_takes_the_matrices_of_hidden_layers_and_adamw_the_rest():
    model = small_bert()
    made = make_optimizer(model, replace(TRAIN, optimizer="muon", betas=[0.8, 0.99]))
    names = {id(weight): name for name, weight in model.named_parameters()}
    matrices, others, undecayed = ([names[id(weight)] for weight in group["params"]] for group in made.param_groups)
    layer = "bert.encoder.layer.0"
    assert matrices == [
        *(f"{layer}.attention.self.{name}.weight" for name in ("query", "key", "value")),
        f"{layer}.attention.output.dense.weight",
        f"{layer}.intermediate.dense.weight",
        f"{layer}.output.dense.weight",
        "bert.pooler.dense.weight",
    ]
    kinds = ("word", "position", "token_type")
    assert others == [*(f"bert.embeddings.{kind}_embeddings.weight" for kind in kinds), "classifier.weight"]
    assert len(matrices) + len(others) + len(undecayed) == len(names)
    assert [group["weight_decay"] for group in made.param_groups] == [0.01, 0.01, 0.0]
    for group in made.param_groups:
        assert group.items() >= hyperparameters(replace(TRAIN, optimizer="muon", betas=[0.8, 0.99]), group).items()
    assert made.param_groups[0]["momentum"] == 0.95
    assert made.param_groups[1]["betas"] == (0.8, 0.99)


def test_the_output_layer_of_a_language_model_is_none_of_muon_s():
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **size))
    names = {id(weight): name for name, weight in model.named_parameters()}
    matrices = {names[id(weight)] for weight in muon.hidden_matrices(model)}
    assert matrices == {f"model.layers.0.{name}.weight" for name in LLAMA}


def test_muon_steps_as_pytorch_s_two_do_and_goes_on_from_its_state():
    """By rates that a schedule sets, in groups that a strategy has divided, and from a state that was saved."""
    ours, theirs = small_bert(), small_bert()
    train = replace(TRAIN, optimizer="muon")
    made = make_optimizer(ours, train)
    made.param_groups[:] = [group | {"params": [weight]} for group in made.param_groups for weight in group["params"]]
    hidden = {id(weight) for weight in muon.hidden_matrices(theirs)}
    parts = [[w for w in theirs.parameters() if (id(w) in hidden, w.ndim > 1) == kind] for kind in KINDS]
    settings = {"lr": train.learning_rate, "betas": tuple(train.betas), "fused": True}
    pair = [
        torch.optim.Muon(parts[0], lr=train.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": parts[1]}, {"params": parts[2], "weight_decay": 0.0}], **settings),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (made, *pair)]
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(made.state_dict())
            made = make_optimizer(ours, train)
            made.param_groups[:] = [
                group | {"params": [weight]} for group in made.param_groups for weight in group["params"]
            ]
            made.load_state_dict(state)
            schedules[0].optimizer = made
        for model in (ours, theirs):
            model.zero_grad()
            model(torch.arange(6)[None] % 9, labels=torch.tensor([1])).loss.backward()
        for each in (made, *pair):
            each.step()
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The learning rate of each step, and the one after the last step."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return [*seen, schedule.optimizer.param_groups[0]["lr"]]


def bare(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "polynomial"]),
    steps=st.integers(1, 60),
    warmup=st.floats(0, 0.9) | st.integers(1, 20).map(float),
    power=st.sampled_from([1.0, 0.5, 2.0, 3.7]),
    rate=st.floats(1e-6, 1),
)
@example("polynomial", 5, 1.0, 2.0, 0.1)
@example("linear", 3, 20.0, 1.0, 0.1)
def test_schedules_are_those_of_transformers_to_the_last_bit(schedule, steps, warmup, power, rate):
    train = replace(TRAIN, schedule=schedule, warmup=warmup, power=power, learning_rate=rate)
    ramp = round(warmup * steps) if warmup < 1 else int(warmup)
    if schedule == "polynomial":
        if ramp >= steps:
            return  # which transformers divides by zero at
        theirs = get_polynomial_decay_schedule_with_warmup(bare(rate), ramp, steps, power=power)
    else:
        name = "constant_with_warmup" if schedule == "constant" else schedule
        theirs = get_scheduler(name, bare(rate), num_warmup_steps=ramp, num_training_steps=steps)
    assert rates(make_schedule(bare(rate), train, steps), steps) == rates(theirs, steps)


@given(per_epoch=st.integers(1, 9), epochs=st.integers(1, 9), every=st.integers(1, 4), gamma=st.floats(0.01, 1))
def test_step_is_pytorch_s_steplr_over_epochs(per_epoch, epochs, every, gamma):
    of = [step // per_epoch for step in range(per_epoch * epochs)]
    train = replace(TRAIN, schedule="step", step_epochs=every, gamma=gamma, warmup=0, learning_rate=0.1)
    ours = rates(make_schedule(bare(0.1), train, len(of), of), len(of))[:-1]
    theirs = rates(torch.optim.lr_scheduler.StepLR(bare(0.1), every, gamma), epochs)
    assert ours == pytest.approx([theirs[epoch] for epoch in of])


@given(per_epoch=st.integers(1, 9), constant=st.integers(1, 4), falling=st.integers(1, 5))
def test_constant_then_linear_stays_for_so_many_epochs_and_ends_at_zero(per_epoch, constant, falling):
    of = [step // per_epoch for step in range(per_epoch * (constant + falling))]
    train = replace(TRAIN, schedule="constant_then_linear", constant_epochs=constant, warmup=0)
    shares = list(map(lr_factor(train, len(of), of), range(len(of) + 1)))
    stays, falls = shares[: per_epoch * constant], shares[per_epoch * constant :]
    assert set(stays) == {1.0}
    assert falls == pytest.approx([1 - step / (per_epoch * falling) for step in range(len(falls))])


@given(
    start=st.floats(0, 1),
    warmup=st.integers(1, 20),
    schedule=st.sampled_from(SCHEDULES),
)
def test_warm_up_rises_in_a_line_from_its_start_to_the_rate(start, warmup, schedule):
    train = replace(
        TRAIN, schedule=schedule, warmup=float(warmup), warmup_start=start, step_epochs=9, constant_epochs=9
    )
    share = lr_factor(train, 40, [0] * 40)
    assert share(0) == start
    assert share(warmup) == pytest.approx(1, abs=1e-9)
    for step in range(1, warmup):
        assert share(step) - share(step - 1) == pytest.approx((1 - start) / warmup, abs=1e-9)


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 50),
    warmup=st.floats(0, 80),
)
def test_no_schedule_leaves_zero_to_one_or_rises_after_warm_up(schedule, steps, warmup):
    """This holds even if warm-up takes all steps or more."""
    train = replace(TRAIN, schedule=schedule, warmup=warmup)
    epochs = [step // 7 for step in range(steps)]
    shares = list(map(lr_factor(train, steps, epochs), range(steps + 1)))
    assert all(0 <= share <= 1 and math.isfinite(share) for share in shares)
    ramp = round(warmup * steps) if warmup < 1 else int(warmup)
    assert shares[ramp:] == sorted(shares[ramp:], reverse=True)
