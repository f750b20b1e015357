"""Activations that are computed again in the backward pass: the same gradients from less memory, in every strategy."""

import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from lockstep.errors import RunFailed
from lockstep.model import convnets, models
from tests.conftest import HOROVOD, copy_project

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
SMALL = """
data: {limit: 300}
model: {hidden_size: 32, layers: 2}
hardware: {device: cpu, threads: 1, processes: 2, timeout: 400, oversubscribe: true}
train: {activation_checkpointing: true, max_steps: 4, eval_every: 0, checkpoint: last}
rows:
  fsdp_bf16: {strategy: fsdp, precision: bf16}
  lora: {strategy: ddp, lora: 4}
  forgets: {strategy: forgets}
"""
FORGETS = '''
"""forgets: keeps its activations, whatever it is told."""

from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        model.gradient_checkpointing_disable()
        super().set_up(model, make_optimizer)
'''
MORE = """
rows:
  tp: {strategy: tp}
  pp: {strategy: pp, accumulation: 2}
  recipe: {strategy: recipe, compile: static}
  deepspeed_3: {strategy: deepspeed, stage: 3}
"""
PROVEN = ("ddp", "fsdp_bf16", "lora", "tp", "pp", "recipe", "deepspeed_3", "trainer", "accelerate", "fabric", "horovod")


def bert(dropout: float) -> torch.nn.Module:
    torch.manual_seed(1)
    chances = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**SIZES, **chances)).train()


def llama() -> torch.nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def backward(model: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step, and how many numbers were kept for the backward pass."""
    torch.manual_seed(2)
    ids, kept = torch.randint(0, 50, (4, 16)), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids).logits.square().mean()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], sum(kept.values())


@pytest.mark.parametrize("make", [lambda: bert(0.0), lambda: bert(0.1), llama])
def test_the_gradients_are_the_same_and_less_is_kept(make):
    plain, kept = backward(make())
    model = make()
    assert not models.checkpoints_activations(model)
    models.checkpoint_activations(model)
    assert models.checkpoints_activations(model)
    again, kept_then = backward(model)
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))  # dropout draws the same units the second time
    assert kept_then < kept / 3


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(RunFailed, match="activation_checkpointing: BasicNet can't compute its activations again"):
        models.checkpoint_activations(convnets.BasicNet(1, 28, 28, 10))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = copy_project(tmp_path_factory.mktemp("activations"))
    place.path("small.yaml").write_text(SMALL)
    place.path("more.yaml").write_text(MORE)
    place.path("workflow/scripts/lockstep/strategies/forgets.py").write_text(FORGETS)
    for script in ("prepare", "plan"):
        assert place.script(script, "--config=small.yaml", "--config=more.yaml").returncode == 0
    return place


def verdict(place, row: str) -> dict:
    return json.loads(place.path(f"results/parity/{row}/n2/rep1/verdict.json").read_text())


def prove(place, *rows: str):
    words = [word for row in rows for word in ("--row", row)]
    return place.script("parity", "--config=small.yaml", "--config=more.yaml", *words, timeout=900)


@pytest.mark.slow
@pytest.mark.ci
def test_rows_are_proven_with_it_and_one_that_forgets_it_is_refused(place):
    done = prove(place, "reference", "fsdp", "forgets")
    assert verdict(place, "fsdp")["proof"] == "equal", done.stdout + done.stderr
    assert max(verdict(place, "fsdp")["fp64"].values()) < 1e-9
    made = json.loads(place.path("results/parity/fsdp/n2/rep1/record.json").read_text())
    assert made["settings"]["activation_checkpointing"] is True
    # They are held against one that keeps its activations.
    reference = json.loads(place.path("results/parity/reference_fp64/n1/rep1/record.json").read_text())
    assert reference["settings"]["activation_checkpointing"] is False
    failed = json.loads(place.path("results/parity/forgets/n2/rep1/failed.json").read_text())
    assert "activation_checkpointing: the row asks for True, but forgets uses False" in failed["reason"]
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("row", PROVEN)
def test_more_rows_are_proven_with_it(place, row):
    if row == "horovod" and not HOROVOD:
        pytest.skip("needs: Horovod")
    if not place.path("results/parity/reference_bf16").is_dir():
        assert prove(place, "reference").returncode == 0
    done = prove(place, row)
    made = verdict(place, row)
    assert made["proof"] in ("equal", "within-tolerance"), done.stdout + done.stderr
    assert not made["fp64"] or max(made["fp64"].values()) < 1e-9
