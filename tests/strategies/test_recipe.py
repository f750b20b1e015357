"""What the strategy recipe does to batches, weights and the optimizer, in one process on a CPU."""

import importlib.metadata
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import self_test
from lockstep.config import reading
from lockstep.config.hardware import World
from lockstep.config.row import Row
from lockstep.data.tokens import Tokens
from lockstep.errors import BadInput, RunFailed
from lockstep.model import lora
from lockstep.model.optimizer import make_optimizer, make_schedule
from lockstep.rank import readback
from lockstep.strategies import recipe

HEAD = ("pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias")
TRAINED = ("query.weight", "value.weight", *HEAD)  # by LoRA, of a BERT


def row(**options) -> Row:
    hardware = {"device": "cpu", "processes": 1, "threads": torch.get_num_threads(), "oversubscribe": True}
    return reading.parse({"hardware": hardware, "rows": {"recipe": {"strategy": "recipe"} | options}}).rows["recipe"]


def strategy(**options) -> recipe.Strategy:
    made = recipe.Strategy(row(**options).settings())
    made.start()
    return made


def model() -> BertForSequenceClassification:
    """A small one, with the same weights each time."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=3, **size))


def prepared(**options) -> recipe.Strategy:
    made, train = strategy(**options), row(**options).settings().train
    made.set_up(lora.put_into(model(), train), lambda wrapped: make_optimizer(wrapped, train))
    return made


def logits(classifier: torch.nn.Module) -> torch.Tensor:
    inputs = torch.arange(60).reshape(5, 12)
    return classifier(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits.float()


def step(made: recipe.Strategy) -> None:
    with made.autocast():
        predictions = logits(made.model)
    made.backward(torch.nn.functional.cross_entropy(predictions, torch.tensor([0, 1, 2, 0, 1])), True)
    made.step()


def tokens() -> Tokens:
    lengths = np.array([3, 9, 4, 30, 2])
    return Tokens(np.arange(lengths.sum()) + 5, lengths, np.array([0, 1, 2, 0, 1]), pad_id=1)


def test_alone_it_joins_nobody():
    assert strategy().world == World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)


def test_batches_put_together_on_the_device_are_those_of_the_host():
    ids = np.array([4, 0, 2, 1])
    on_device = strategy(resident=True).batch(tokens(), ids, 9)
    for name, array in tokens().batch(ids, 9).items():
        assert on_device[name].tolist() == array.tolist(), name
        assert on_device[name].dtype == torch.int64


def test_static_widths_are_few():
    made = strategy(compile="static")
    made.module = torch.nn.Identity()
    made.module.config = type("Config", (), {"max_position_embeddings": 40})
    widths = [made.batch(tokens(), np.array([0, 2]), width)["input_ids"].shape[1] for width in (4, 16, 17, 39)]
    assert widths == [16, 16, 32, 40]


@pytest.mark.parametrize(("device", "noted"), [("cpu", False), ("cuda", True)])
def test_memory_that_is_not_counted_within_cuda_graphs_is_noted(device, noted):
    made = strategy(compile="static")
    made.module = made.model = model()
    made.world = replace(made.world, device=torch.device(device))
    made.wrap()
    assert [note for note in made.notes if "reserved_memory_mb has it" in note] == made.notes[: int(noted)]
    assert bool(made.notes) == noted


@pytest.mark.parametrize("compiled", ["dynamic", "static"])
def test_reading_the_precision_leaves_a_compiled_model_whole(monkeypatch, compiled):
    """A hook that takes itself away would break the graph into pieces, which stay."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_by, backend))
    made, asked = prepared(compile=compiled), row(compile=compiled).settings()
    make_schedule(made.optimizer, asked.train, 10)
    live = readback.check(made, asked, {"input_ids": torch.ones(1, 12, dtype=torch.int64)})
    assert (live["computes_in"], graphs) == ("float32", [])
    for _ in range(2):
        step(made)
    assert len(graphs) == 1


def compile_by(module, backend, dynamic, mode="default"):
    module._compiled_call_impl = torch.compile(module._call_impl, dynamic=dynamic, backend=backend)


LORAS = [
    ({}, 1e-6),
    ({"precision": "bf16"}, 1e-6),
    ({"precision": "bf16", "weights": "bf16"}, 1e-2),  # what is kept is the optimizer's weights, in fp32
    ({"packed": True}, 1e-6),
]


@pytest.mark.parametrize(("options", "tolerance"), LORAS)
def test_lora_trains_few_weights_and_keeps_a_plain_model(tmp_path, options, tolerance):
    pytest.importorskip("peft", reason="needs peft: make setup")
    made, start = prepared(lora=4, learning_rate=0.05, **options), model().state_dict()
    for _ in range(3):
        step(made)
    for _ in range(2):  # saving changes nothing
        state = lora.take_out(model(), made.state_dict(), row(lora=4).train, tmp_path)
        assert list(state) == list(start)
        assert {name for name in state if not torch.equal(state[name], start[name])} == {
            name for name in start if name.endswith(TRAINED)
        }
    plain = model().eval()
    before = logits(plain)
    plain.load_state_dict(state, strict=True)
    made.model.eval()
    assert (logits(made.model) - logits(plain)).abs().max() < tolerance
    assert (before - logits(plain)).abs().max() > 10 * tolerance
    step(made)  # and it goes on training
    bias = "classifier.modules_to_save.default.bias"
    assert not torch.equal(made.state_dict()[bias], state["classifier.bias"])


def test_without_lora_every_weight_is_trained():
    made, start = prepared(), model().state_dict()
    step(made)
    same = {name for name, tensor in made.state_dict().items() if torch.equal(tensor, start[name])}
    assert not any(name.endswith(TRAINED) or "embeddings.weight" in name for name in same)


def test_lora_s_optimizer_has_the_updates_and_the_head_only():
    pytest.importorskip("peft", reason="needs peft: make setup")
    matrices, rest = (
        sum(weight.numel() for weight in group["params"]) for group in prepared(lora=4).optimizer.param_groups
    )
    assert (matrices, rest) == (2 * (4 * 32 + 32 * 4) + 32 * 32 + 3 * 32, 32 + 3)
    assert sum(weight.numel() for group in prepared().optimizer.param_groups for weight in group["params"]) > 10_000


def test_the_rank_is_held_against_the_live_one():
    pytest.importorskip("peft", reason="needs peft: make setup")
    asked, made = row(lora=8).settings(), prepared(lora=4)
    make_schedule(made.optimizer, asked.train, 10)
    with pytest.raises(RunFailed, match="lora: the row asks for 8, but recipe uses 4"):
        readback.check(made, asked)


def test_state_in_8_bits_keeps_groups_and_schedule():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install -r requirements-dev.txt")
    asked, made = row(optimizer="adamw8bit").settings(), prepared(optimizer="adamw8bit")
    plain = prepared().optimizer
    schedule = make_schedule(made.optimizer, replace(asked.train, warmup=2), 10)
    live = readback.check(made, asked)
    assert live["optimizer"] == "AdamW8bit"
    assert [group["weight_decay"] for group in live["groups"]] == [0.01, 0.0]
    assert [group["parameters"] for group in live["groups"]] == [
        sum(weight.numel() for weight in group["params"]) for group in plain.param_groups
    ]
    rates = []
    for _ in range(3):
        rates.append(made.optimizer.param_groups[0]["lr"])
        step(made)
        schedule.step()
    assert rates == pytest.approx([0, 0.00075, 0.0015])
    bits = {weight.numel() >= 4096: state["state1"].dtype for weight, state in made.optimizer.state.items()}
    assert bits == {True: torch.uint8, False: torch.float32}
    with pytest.raises(RunFailed, match="optimizer: the row asks for adamw, but recipe uses adamw8bit"):
        readback.check(made, row().settings())


def test_lora_and_state_in_8_bits_each_but_not_both():
    for options in ({"lora": 4}, {"optimizer": "adamw8bit"}):
        row(**options).refuse()
        assert bool(row(**options).lossy) == ("optimizer" in options)
    with pytest.raises(BadInput, match="lora: 4, optimizer: adamw8bit: use one of them"):
        row(lora=4, optimizer="adamw8bit").refuse()


def test_without_peft_only_rows_that_ask_for_it_are_unavailable(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert row(lora=4).unavailable == "peft 0.21.2 is not installed; to install it: make setup"
    assert row(optimizer="adamw8bit").unavailable.startswith("bitsandbytes 0.50.2 is not installed")
    assert row().unavailable == ""
    assert self_test.available("recipe")  # an image without them imports it too
    assert not self_test.available("deepspeed")
