"""Ranks that divide each layer: proven with 2 and 4 of them, resumed, refused; and mistakes of that kind are found."""

import json
import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import BadInput, RunFailed
from lockstep.strategies import tp
from tests.conftest import copy_project
from tests.rank.test_resumption import kill, wait_for_step

# Gradients are clipped in every step, by the norm of the whole model.
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 2, heads: 4, dropout: 0.1}
train: {epochs: 1, global_batch: 31, eval_every: 7, checkpoint: last, checkpoint_every: 5, log_every: 6, clip: 0.2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 120, oversubscribe: true}
profile: {steps: 3}
repeats: 1
retries: 0
rows:
  ddp_amp: null
  two: {strategy: tp}
  four: {strategy: tp, tensor: 4, processes: 4}
  pairs: {strategy: tp, processes: 4, accumulation: 2}
  three: {strategy: tp, tensor: 3, processes: 3}
"""
# A Llama, whose plan is transformers' own; SGD shows a gradient of a wrong scale in the weights, which AdamW hides.
DECODER = ("--set=task=language-modelling", "--set=train.optimizer=sgd", "--set=train.best=perplexity")
# Each is `tp` with one mistake, and what tells of it.
MISTAKES = {
    "no_all_reduce": (
        """
from torch.distributed.tensor.parallel import RowwiseParallel
class Rowwise(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(layouts, local, module, outputs, mesh):
        return outputs.to_local()
tp.STYLES = tp.STYLES | {"rowwise": Rowwise}
class Strategy(tp.Strategy):
    pass
""",
        r"ranks 0 and 1 hold replica 0 together, and have other losses from step 1 on",
    ),
    "bias_of_each_rank": (
        """
from torch.distributed.tensor.parallel import RowwiseParallel
class Rowwise(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(layouts, local, module, outputs, mesh):
        whole = RowwiseParallel._prepare_output_fn(layouts, local, module, outputs, mesh)
        return whole + (mesh.size() - 1) * module.bias.to_local()
tp.STYLES = tp.STYLES | {"rowwise": Rowwise}
class Strategy(tp.Strategy):
    pass
""",
        r"in fp64 losses .* is above 1e-09; in fp64 norm .* is above 1e-09",
    ),
    "norm_of_each_part": (
        """
import torch
from torch.distributed.tensor import DTensor
class Strategy(tp.Strategy):
    def step(self):
        own = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in self.with_gradient()]
        norm = torch.nn.utils.get_total_norm(own)
        for parameters in tp.by_kind(self.with_gradient()):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
        r"ranks 0 and 1 hold replica 0 together, and have other losses from step 2 on",
    ),
    "drops_others": (
        """
import torch
class Strategy(tp.Strategy):
    def wrap(self):
        super().wrap()
        torch.manual_seed(self.world.rank)
""",
        r"ranks 0 and 1 hold replica 0 together, and have other losses from step 1 on",
    ),
    "replicas_apart": (
        """
class Strategy(tp.Strategy):
    def backward(self, loss, last):
        super().backward(loss, False)
""",
        r"in fp64 losses",
    ),
}
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with every mistake as a strategy, and prepared data of a BERT and of a Llama."""
    copy = copy_project(tmp_path_factory.mktemp("tp"))
    for name, (code, _) in MISTAKES.items():
        file = copy.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py")
        file.write_text("from lockstep.strategies import tp\n" + code, encoding="utf-8")
    rows = "".join(f"  wrong_{name}: {{strategy: wrong_{name}}}\n" for name in MISTAKES)
    rows = rows.replace("wrong_replicas_apart}", "wrong_replicas_apart, processes: 4}")
    copy.path("small.yaml").write_text(SMALL + rows, encoding="utf-8")
    for script in ("prepare", "plan"):
        finished = copy.script(script, *CONFIGS)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    return copy


@pytest.fixture(scope="module")
def prove(place):
    """Proves a row; returns the verdict. The references are trained once for each model."""

    @cache
    def referenced(results: str, *asked: str) -> None:
        for script in ("prepare", "plan") if asked else ():
            finished = place.script(script, *CONFIGS, "--results", results, *asked)
            assert finished.returncode == 0, finished.stdout + finished.stderr
        finished = place.script("parity", *CONFIGS, "--results", results, *asked, "--row=reference", timeout=900)
        assert finished.returncode == 0, finished.stdout + finished.stderr

    def once(row: str, results: str = "results", *asked: str) -> dict:
        referenced(results, *asked)
        place.script("parity", *CONFIGS, "--results", results, *asked, "--row", row, timeout=900)
        (file,) = place.path(results).glob(f"parity/{row}/n*/rep1/{paths.VERDICT}")
        return json.loads(file.read_text(encoding="utf-8"))

    return once


def launch(place, row: str, *asked: str) -> dict:
    finished = place.script("launch", *CONFIGS, "--row", row, *asked)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (file,) = place.path("results/runs").glob(f"{row}/n*/rep1/{paths.RECORD}")
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param("two", marks=pytest.mark.ci), "four", "pairs"])
def test_a_divided_encoder_is_proven(prove, row):
    verdict = prove(row)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("row", ["two", "pairs"])
def test_a_divided_decoder_is_proven_with_sgd(prove, row):
    verdict = prove(row, "decoder", *DECODER)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [pytest.param(name, marks=pytest.mark.ci) for name in MISTAKES])
def test_a_mistake_of_divided_layers_is_found(prove, mistake):
    verdict = prove(f"wrong_{mistake}")
    assert verdict["proof"] == "unequal"
    assert re.search(MISTAKES[mistake][1], verdict["reason"]), verdict["reason"]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_so_does_another_layout(place):
    """To the bit in the same layout, dropped units included; four ranks go on from two that were killed."""
    whole = launch(place, "two")
    rows = {"two": "two", "four": "two"}
    for row, first in rows.items():
        name = f"to-{row}"
        still = ("--set=model.dropout=0",) if row != first else ()
        place.script("prepare", *CONFIGS, "--results", name)
        place.script("plan", *CONFIGS, "--results", name)
        command = [sys.executable, "workflow/scripts/launch.py", *CONFIGS, "--row", first, "--results", name, *still]
        process = subprocess.Popen(
            command,
            cwd=place.folder,
            env=place.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for_step(process, place.path(name), first, 8)
        kill(process)
        resume = ("--resume", f"{name}/runs/{first}/n2/rep1") if row != first else ()
        finished = place.script("launch", *CONFIGS, "--row", row, "--results", name, *resume, *still)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        (file,) = place.path(name).glob(f"runs/{row}/n*/rep1/{paths.RECORD}")
        record = json.loads(file.read_text(encoding="utf-8"))
        assert record["resumed"] in ([5], [10])
        reference = launch(place, "two", *still) if still else whole
        assert np.abs(np.subtract(record["losses"], reference["losses"])).max() <= (1e-5 if still else 0)


@pytest.mark.slow
def test_a_divided_model_is_profiled_and_converted(place):
    record = launch(place, "pairs")
    assert record["settings"]["options"] == {"backend": "gloo", "tensor": 2, "divided_tensors": 32}
    assert record["replicas"] == 2
    finished = place.script("convert", "results/runs/pairs/n4/rep1")
    assert finished.returncode == 0, finished.stderr
    finished = place.script("launch", *CONFIGS, "--row", "pairs", "--profile")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    profile = json.loads(place.path("results/profile/pairs/n4/rep1/profile.json").read_text())
    assert profile["seconds"]["communication"] > 0


@pytest.mark.slow
def test_heads_that_ranks_can_t_share_are_refused_before_one_starts(place):
    finished = place.script("launch", *CONFIGS, "--row", "three")
    assert finished.returncode == 2
    assert finished.stderr == (
        "error: rows.three.tensor: 3: 3 ranks can't share the model's 4 heads (num_attention_heads) evenly. Take a"
        " number that divides 4.\n"
    )
    assert not place.path("results/runs/three").exists()


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "3 ranks can't share the model's 2 heads (num_key_value",
        ),
        ({}, "the model has no attention heads to divide"),
        ({"num_attention_heads": 6}, ""),
    ],
)
def test_which_heads_can_be_shared(heads, says):
    hardware = {"device": "cpu", "processes": 3, "oversubscribe": True}
    row = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "tp", "tensor": 3}}}).rows["x"]
    row.refuse()
    if says:
        with pytest.raises(BadInput, match=re.escape(says)):
            row.refuse_heads(heads)
    else:
        row.refuse_heads(heads)


def test_ranks_that_are_no_whole_replica_are_refused():
    hardware = {"device": "cpu", "processes": 3, "oversubscribe": True}
    row = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "tp"}}}).rows["x"]
    with pytest.raises(BadInput, match=r"tensor: 2: 2 ranks hold one replica of the model together, and there are 3\."):
        row.refuse()


def test_a_model_that_it_can_t_divide_is_named():
    with pytest.raises(RunFailed, match="how to divide the layers of Linear: transformers has no plan of it"):
        tp.plan_of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("attention", "hidden"), [(0.5, 0.0), (0.0, 0.5)])
def test_ranks_drop_units_of_their_own_in_their_own_heads_only(attention, hidden):
    """Where all compute the same they drop the same; and the replica's random numbers go on alike."""
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    dropped = {"attention_probs_dropout_prob": attention, "hidden_dropout_prob": hidden}
    torch.manual_seed(0)
    weights, outputs, states = None, [], []
    for part in (0, 1, 1):
        model = BertModel(BertConfig(vocab_size=9, **size, **dropped)).train()
        model.load_state_dict(weights := weights or model.state_dict())
        tp.draw_apart(model, tp.BERT, part)
        torch.manual_seed(7)
        outputs.append(model(torch.arange(8)[None]).last_hidden_state)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[0], outputs[1]) == (attention == 0)
