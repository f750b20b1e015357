"""Ranks on a mesh: they divide layers (tp) or tokens (cp), hold some layers (pp), or share the model in groups (fsdp).

And Muon, whose matrices are gathered there. Proven with 2 and 4 ranks, resumed, refused; such mistakes are found.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import BadInput, RunFailed
from lockstep.run import refusals
from lockstep.strategies import cp, pp, tp
from tests.conftest import copy_project
from tests.rank.test_resumption import kill, wait_for_step

# Gradients are clipped in every step, by the norm of the whole model.
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 4, heads: 4, dropout: 0.1}
train: {epochs: 1, global_batch: 31, eval_every: 7, checkpoint: last, checkpoint_every: 5, log_every: 6, clip: 0.2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 3}
repeats: 1
retries: 0
rows:
  ddp_amp: null
  two: {strategy: tp}
  four: {strategy: tp, tensor: 4, processes: 4}
  pairs: {strategy: tp, processes: 4, accumulation: 2}
  sharded: {strategy: tp, processes: 4, accumulation: 2, shard: true}
  sharded_groups: {strategy: tp, processes: 8, accumulation: 2, shard: true, replicate: 2}
  sequence: {strategy: tp, sequence: true}
  sequence_pairs: {strategy: tp, sequence: true, processes: 4, accumulation: 2}
  sequence_sharded: {strategy: tp, sequence: true, processes: 4, accumulation: 2, shard: true}
  vocabulary: {strategy: tp, vocabulary: true}
  vocabulary_4: {strategy: tp, vocabulary: true, tensor: 4, processes: 4}
  vocabulary_sharded: {strategy: tp, vocabulary: true, sequence: true, processes: 4, accumulation: 2, shard: true}
  three: {strategy: tp, tensor: 3, processes: 3}
  hybrid: {strategy: fsdp, replicate: 2, processes: 4}
  uneven: {strategy: fsdp, replicate: 2, processes: 3}
  stages: {strategy: pp, accumulation: 3, global_batch: 30}
  stages_4: {strategy: pp, stages: 4, processes: 4, accumulation: 5, pipeline: 1f1b, global_batch: 30}
  stages_pairs: {strategy: pp, processes: 4, accumulation: 3, pipeline: 1f1b, global_batch: 30}
  looped: {strategy: pp, accumulation: 4, pipeline: interleaved, global_batch: 28}
  looped_pairs: {strategy: pp, processes: 4, accumulation: 2, pipeline: interleaved, global_batch: 28}
  tokens: {strategy: cp}
  tokens_3: {strategy: cp, context: 3, processes: 3}
  tokens_4: {strategy: cp, context: 4, processes: 4}
  tokens_pairs: {strategy: cp, processes: 4, replicate: 2, accumulation: 2}
  plain: {strategy: ddp}
  accelerate: {strategy: accelerate}
  fabric: {strategy: fabric}
  trainer: {strategy: trainer}
  threads: {strategy: dataparallel}
"""
# A Llama, whose plan is transformers' own; SGD shows a gradient of a wrong scale in the weights, which AdamW hides.
DECODER = ("--set=task=language-modelling", "--set=train.optimizer=sgd", "--set=train.best=perplexity")
# What a run may not have of its own that goes on from another.
SAME = (
    "--set=rows.stages.pipeline=1f1b",
    "--set=rows.stages.accumulation=5",
)
SEQUENCE = ("sequence", "sequence_pairs", "sequence_sharded")
STAGED = ("stages", "stages_4", "stages_pairs", "looped", "looped_pairs")
IN_CI = ("no_all_reduce", "divided_twice")  # of the mistakes: one of divided layers, one of stages
MUON = ("--set=train.optimizer=muon",)
# Each is a strategy with one mistake, and what tells of it.
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
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step 1 on",
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
        for parameters in tp.by_mesh(self.with_gradient()):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step \d on",
    ),
    "drops_others": (
        """
import torch
class Strategy(tp.Strategy):
    def wrap(self):
        super().wrap()
        torch.manual_seed(self.world.rank)
""",
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step 1 on",
    ),
    "replicas_summed": (
        """
class Strategy(tp.Strategy):
    def backward(self, loss, last):
        super().backward(loss * self.world.replicas, last)
""",
        r"norm 1 is above",
    ),
}
MISTAKES |= {
    "groups_counted_alone": (
        """
from torch.distributed.fsdp import FSDPModule
from lockstep.strategies import fsdp
class Strategy(fsdp.Strategy):
    def wrap(self):
        super().wrap()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(self.world.size / self.options["replicate"])
""",
        r"norm 1 is above",
    ),
    "divided_twice": (
        """
from lockstep.strategies import pp
right = pp.SCHEDULES["gpipe"]
def scaled(stage, number, loss_fn, scale_grads):
    return right(stage, number, loss_fn=loss_fn)
pp.SCHEDULES = {"gpipe": scaled}
class Strategy(pp.Strategy):
    pass
""",
        r"norm 0\.67 is above",
    ),
    "norm_of_each_stage": (
        """
import torch
from lockstep.strategies import pp
class Strategy(pp.Strategy):
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
        r"in fp64 losses .* is above 1e-09",
    ),
    "muon_of_shards": (
        """
import torch
from torch.distributed.tensor import DTensor
from torch.optim import _muon
from lockstep.model import muon
from lockstep.strategies import fsdp
muon.gather = lambda matrices, state: None
whole = _muon._zeropower_via_newtonschulz
def of_shard(update, *settings):
    if not isinstance(update, DTensor):
        return whole(update, *settings)
    return DTensor.from_local(whole(update.to_local(), *settings), update.device_mesh, update.placements)
_muon._zeropower_via_newtonschulz = of_shard
class Strategy(fsdp.Strategy):
    pass
""",
        r"in fp64 losses .* is above 1e-09",
    ),
}
STAGES = "accumulation: 3, global_batch: 30"
MISTAKES |= {
    "norms_of_own_tokens": (
        """
from torch.distributed.tensor.parallel import SequenceParallel
class Plain(SequenceParallel):
    def _apply(self, module, mesh):
        return module
tp.SequenceParallel = Plain
class Strategy(tp.Strategy):
    def live(self):
        return super().live() | {"sequence": True}
""",
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step \d on",
    ),
}
OF = {
    "norms_of_own_tokens": "sequence: true",
    "replicas_summed": "processes: 4",
    "groups_counted_alone": "processes: 4, replicate: 2",
}
OF |= {"divided_twice": STAGES, "norm_of_each_stage": STAGES}
# Of ranks that divide the tokens of a sequence.
OF_TOKENS = {
    "positions_begin_anew": (
        """
import torch
class Strategy(cp.Strategy):
    def own_tokens(self, batch):
        own = super().own_tokens(batch)
        positions = own["position_ids"]
        return own | {"position_ids": positions - positions[:, :1]}
""",
        r"in fp64 losses .* is above 1e-09",
    ),
    "attends_to_own_tokens": (
        """
import torch
class Strategy(cp.Strategy):
    def own_tokens(self, batch):
        own = super().own_tokens(batch)
        columns = torch.arange(batch["input_ids"].shape[1]) // own["input_ids"].shape[1]
        mask = torch.as_tensor(own["attention_mask"]) & (columns == self.part)
        return own | {"attention_mask": mask if torch.is_tensor(own["attention_mask"]) else mask.numpy()}
""",
        r"in fp64 losses .* is above 1e-09",
    ),
    "gradients_of_keys_kept": (
        """
from torch.distributed.tensor import DTensor, Shard
def whole(own, mesh, dim):
    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False).full_tensor()
cp.whole = whole
class Strategy(cp.Strategy):
    pass
""",
        r"in fp64 losses .* is above 1e-09; in fp64 norm .* is above 1e-09",
    ),
    "loss_of_each_part": (
        """
class Strategy(cp.Strategy):
    def backward(self, loss, last):
        super().backward(loss / self.options["context"], last)
""",
        r"norm 0\.5 is above",
    ),
}
MISTAKES |= OF_TOKENS
# Of a Qwen3, which has norms of each head.
OF_HEADS = {
    "norms_of_own_heads": (
        """
class Strategy(tp.Strategy):
    def wrap(self):
        super().wrap()
        self.of_own_heads = []
""",
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step 2 on",
    ),
}
MISTAKES |= OF_HEADS
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with every mistake as a strategy, and prepared data of a BERT and of a Llama."""
    copy = copy_project(tmp_path_factory.mktemp("tp"))
    for name, (code, _) in MISTAKES.items():
        file = copy.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py")
        file.write_text("from lockstep.strategies import cp, tp\n" + code, encoding="utf-8")
    rows = "".join(f"  wrong_{name}: {{strategy: wrong_{name}, {OF.get(name, '')}}}\n" for name in MISTAKES)
    copy.path("small.yaml").write_text(SMALL + rows, encoding="utf-8")
    copy.prepare(*CONFIGS)
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


def bring_data(place, results: str) -> None:
    """Have what `prepare` and `plan` made in a results folder of its own, too."""
    if not place.path(f"{results}/data").is_dir():
        shutil.copytree(place.path("results/data"), place.path(f"{results}/data"))


def launch(place, row: str, *asked: str, results: str = "results") -> dict:
    bring_data(place, results)
    finished = place.script("launch", *CONFIGS, "--row", row, "--results", results, *asked)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (file,) = place.path(results).glob(f"runs/{row}/n*/rep1/{paths.RECORD}")
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param("two", marks=pytest.mark.ci),
        "four",
        "pairs",
        "sharded",
        "sharded_groups",
        "hybrid",
        *SEQUENCE,
        "vocabulary_4",
        *STAGED,
    ],
)
def test_an_encoder_is_proven(prove, row):
    verdict = prove(row)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        *("two", "pairs", "sharded", "sequence_pairs", "vocabulary", "vocabulary_sharded", "stages_4", "looped"),
        *("tokens", "tokens_3", "tokens_4", "tokens_pairs"),
    ],
)
def test_a_decoder_is_proven_with_sgd(prove, row):
    verdict = prove(row, "decoder", *DECODER)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.fixture(scope="module")
def of_heads(place, prove):
    """What asks for a Qwen3 of the size and tokenizer of the Llama."""
    prove("plain", "decoder", *DECODER)
    tokenizer = AutoTokenizer.from_pretrained(place.path("decoder/data/tokenizer"))
    decoder("qwen3", vocab_size=len(tokenizer), num_hidden_layers=4).save_pretrained(place.path("qwen3"))
    tokenizer.save_pretrained(place.path("qwen3"))
    return "heads", *DECODER, "--set=model.name=qwen3"


@pytest.mark.slow
@pytest.mark.parametrize("row", ["two", "sharded", "sequence_pairs", "vocabulary_sharded", "tokens", "looped"])
def test_a_model_with_norms_of_each_head_is_proven(prove, of_heads, row):
    verdict = prove(row, *of_heads)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["plain", "threads", "accelerate", "fabric", "trainer", "two", "pairs", "sharded", "hybrid"]
)
def test_muon_is_proven_also_where_matrices_are_sharded(prove, row):
    verdict = prove(row, "muon", *MUON)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [pytest.param(name, marks=[pytest.mark.ci] * (name in IN_CI)) for name in MISTAKES])
def test_a_mistake_is_found(prove, mistake, request):
    if mistake in OF_HEADS:
        of = request.getfixturevalue("of_heads")
    else:
        of = ("muon", *MUON) if "muon" in mistake else ("decoder", *DECODER) if mistake in OF_TOKENS else ()
    verdict = prove(f"wrong_{mistake}", *of)
    assert verdict["proof"] == "unequal"
    assert re.search(MISTAKES[mistake][1], verdict["reason"]), verdict["reason"]


def killed(place, results: str, row: str, *asked: str) -> None:
    """Train in a results folder of its own, and kill the whole run after step 8, where the state of step 5 is saved."""
    bring_data(place, results)
    command = [sys.executable, "workflow/scripts/launch.py", *CONFIGS, "--row", row, "--results", results, *asked]
    process = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(process, place.path(results), row, 8)
    kill(process)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["two", "sharded", "sequence", "stages", "looped"])
def test_a_killed_run_goes_on_to_the_bit(place, row):
    """Dropped units included, which each rank draws for its own heads, or its own layers."""
    whole = launch(place, row)
    killed(place, f"parted-{row}", row)
    parted = launch(place, row, results=f"parted-{row}")
    assert parted["resumed"] in ([5], [10])
    assert parted["losses"] == whole["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ("SIGSTOP", r"no progress for 6 s, so the run was ended as hung \(.*rank \d \(stopped\) after step"),
        ("SIGKILL", "died"),
    ],
)
@pytest.mark.parametrize("row", ["stages", "looped", "two", "hybrid"])
def test_a_rank_that_stands_still_or_dies_ends_the_run(place, row, sent, says):
    """Also one that others wait for in the midst of a pipeline, whose sends and receives have no end of their own."""
    results, asked = f"{sent}-{row}".lower(), ("--set=hardware.timeout=6", "--set=train.epochs=200")
    bring_data(place, results)
    assert place.script("plan", *CONFIGS, *asked, "--results", results).returncode == 0
    command = [sys.executable, "workflow/scripts/launch.py", *CONFIGS, "--row", row, "--results", results, *asked]
    process = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(process, place.path(results), row, 8)
    (file,) = place.path(results).glob(f"{paths.RUNS}/{row}/n*/rep1/{paths.PROGRESS}")
    ranks = [int(rank) for rank in np.fromfile(file, dtype=np.int64).reshape(-1, 5)[:, 0]]
    os.kill(ranks[-1], getattr(signal, sent))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert re.search(says, said), said
    end = time.monotonic() + 20  # one that stood still is gone once it has been killed and its parent knows
    while any(map(psutil.pid_exists, ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "ranks", "then", "asked"),
    [
        ("pairs", 4, "four", ("--set=rows.four.accumulation=2",)),
        ("pairs", 4, "sequence_sharded", ()),
        ("stages", 2, "stages_4", SAME),
        ("looped", 2, "stages_4", ("--set=rows.stages_4.accumulation=4", "--set=rows.stages_4.global_batch=28")),
    ],
)
def test_another_mesh_goes_on(place, first, ranks, then, asked):
    """Four ranks of one replica from two replicas of two; sharded layers from whole ones; four stages from two."""
    asked = ("--set=model.dropout=0", *asked)
    whole = launch(place, first, *asked, results="still")
    killed(place, f"from-{first}", first, *asked)
    record = launch(place, then, *asked, "--resume", f"from-{first}/runs/{first}/n{ranks}/rep1", results=f"to-{then}")
    assert record["resumed"] in ([5], [10])
    assert np.abs(np.subtract(record["losses"], whole["losses"])).max() < 1e-5


@pytest.mark.slow
def test_divided_tokens_and_vocabularies_are_evaluated_profiled_and_resumed(place):
    asked = (*DECODER, "--set=model.dropout=0", "--set=train.epochs=13")
    place.prepare(*CONFIGS, "--results", "tokens", *asked)
    ran = {row: launch(place, row, *asked, results="tokens") for row in ("plain", "tokens", "vocabulary")}
    whole = ran["tokens"]
    losses = {row: [dev["loss"] for dev in record["dev"]] for row, record in ran.items()}
    assert losses["tokens"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["vocabulary"] == pytest.approx(losses["plain"], rel=1e-5)
    finished = place.script("launch", *CONFIGS, *asked, "--results", "tokens", "--row", "tokens", "--profile")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # The latter two have other numbers of groups of weights that are divided alike.
    for first, then in (("tokens", "tokens_4"), ("vocabulary", "sequence")):
        for results in (f"{first}-killed", f"{first}-on"):
            shutil.copytree(place.path("tokens/data"), place.path(f"{results}/data"))
        killed(place, f"{first}-killed", first, *asked)
        resume = ("--resume", f"{first}-killed/runs/{first}/n2/rep1")
        record = launch(place, then, *asked, *resume, results=f"{first}-on")
        assert record["resumed"] in ([5], [10])
        assert np.abs(np.subtract(record["losses"], whole["losses"])).max() < 1e-5


@pytest.mark.slow
def test_tokens_that_ranks_can_t_share_evenly_are_padded_also_where_replicas_are_sharded(place):
    asked = (*DECODER, "--set=model.dropout=0", "--set=data.max_length=37")
    place.prepare(*CONFIGS, "--results", "odd", *asked)
    losses = [launch(place, row, *asked, results="odd")["losses"] for row in ("plain", "sequence_sharded")]
    assert np.abs(np.subtract(*losses)).max() < 1e-5


@pytest.mark.slow
def test_a_divided_model_is_profiled_and_converted(place):
    record = launch(place, "pairs")
    assert record["settings"]["options"] == {
        "backend": "gloo",
        "tensor": 2,
        "replicate": 1,
        "divided_tensors": 48,
        "shard": False,
        "sequence": False,
        "vocabulary": False,
    }
    assert record["replicas"] == 2
    finished = place.script("convert", "results/runs/pairs/n4/rep1")
    assert finished.returncode == 0, finished.stderr
    finished = place.script("launch", *CONFIGS, "--row", "pairs", "--profile")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    profile = json.loads(place.path("results/profile/pairs/n4/rep1/profile.json").read_text())
    assert profile["seconds"]["communication"] > 0


@pytest.mark.slow
def test_hybrid_shards_and_whole_momenta_are_resumed(place):
    """Of a run that was killed, also by other ranks: what two groups of two saved, one of four goes on from."""
    whole = launch(place, "hybrid", *MUON, "--set=model.dropout=0")
    assert whole["settings"]["options"].items() >= {"replicate": 2, "shard": 2}.items()
    for name, asked in {"again": (), "alone": ("--set=rows.hybrid.replicate=1",)}.items():
        name = f"hybrid-{name}"
        killed(place, name, "hybrid", *MUON, "--set=model.dropout=0")
        resume = ("--resume", f"{name}/runs/hybrid/n4/rep1")
        record = launch(place, "hybrid", *MUON, "--set=model.dropout=0", *asked, *resume, results=f"{name}-on")
        assert record["resumed"] in ([5], [10])
        assert np.abs(np.subtract(record["losses"], whole["losses"])).max() < 1e-3


@pytest.mark.slow
def test_heads_that_ranks_can_t_share_are_refused_before_one_starts(place):
    finished = place.script("launch", *CONFIGS, "--row", "three")
    assert finished.returncode == 2
    assert finished.stderr == (
        "error: rows.three.tensor: 3: 3 ranks can't share the model's 4 heads (num_attention_heads) evenly. Take a"
        " divisor of 4.\n"
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
            refusals.refuse_heads(row, heads)
    else:
        refusals.refuse_heads(row, heads)


def test_more_stages_than_layers_are_refused():
    hardware = {"device": "cpu", "processes": 5, "oversubscribe": True}
    row = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "pp", "stages": 5}}}).rows["x"]
    with pytest.raises(BadInput, match=r"rows\.x\.stages: 5: the model has 4 layers, and each of 5"):
        refusals.refuse_layers(row, 4)
    refusals.refuse_layers(row, 5)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"strategy": "pp", "stages": 3, "chunks": 3},
            "pipeline: gpipe, chunks: 3: a rank has several stages only if they are interleaved",
        ),
        ({"strategy": "tp"}, "tensor: 2: 2 ranks hold one replica of the model together, but there are 3 ranks."),
        (
            {"strategy": "fsdp", "replicate": 2},
            "replicate: 2: 2 groups are to share the ranks evenly, but there are 3 ranks.",
        ),
        (
            {"strategy": "zero_redundancy", "optimizer": "muon"},
            "optimizer: muon: ZeroRedundancyOptimizer makes an optimizer of a single kind",
        ),
        ({"strategy": "deepspeed", "optimizer": "muon"}, "optimizer: muon: ZeRO clips the step of its own Muon"),
        ({"strategy": "horovod", "optimizer": "muon"}, "optimizer: muon: Horovod makes an optimizer of its own"),
        (
            {"strategy": "pp", "stages": 2},
            "stages: 2: 2 ranks hold one replica of the model together, but there are 3 ranks.",
        ),
        (
            {"strategy": "pp", "stages": 1, "global_batch": 31},
            "31 samples can't be shared evenly by 3 devices: stages",
        ),
        (
            {"strategy": "pp", "stages": 3, "optimizer": "muon"},
            "optimizer: muon: Muon leaves out the layer that makes the outputs",
        ),
        ({"strategy": "pp", "stages": 3, "precision": "fp16"}, "precision: fp16: the loss is scaled on the last stage"),
        (
            {"strategy": "pp", "stages": 3, "pipeline": "1f1b", "accumulation": 2},
            "x.accumulation: 2, but pipeline: 1f1b on 3 ranks needs at least 3: each stage works on one of them",
        ),
        (
            {"strategy": "pp", "stages": 3, "pipeline": "interleaved", "accumulation": 4},
            "x.accumulation: 4, but pipeline: interleaved on 3 ranks needs a multiple of 3: its stages take them in",
        ),
        ({"strategy": "tp", "tensor": 3, "precision": "fp16"}, "precision: fp16"),
        ({"strategy": "tp", "tensor": 3, "replicate": 2}, "shard: False, replicate: 2: without shard each replica is"),
        (
            {"strategy": "tp", "tensor": 3, "shard": True, "replicate": 2},
            "replicate: 2, tensor: 3: 6 groups are to share the ranks evenly, but there are 3 ranks.",
        ),
    ],
)
def test_what_can_t_be_is_refused(row, says):
    hardware = {"device": "cpu", "processes": 3, "oversubscribe": True}
    with pytest.raises(BadInput, match=re.escape(says)):
        reading.parse({"hardware": hardware, "rows": {"x": row}}).rows["x"].refuse()


@pytest.mark.parametrize(("groups", "processes", "trial"), [(1, 6, 4), (2, 6, 4), (3, 6, 3), (4, 8, 4), (1, 1, 2)])
def test_a_trial_has_ranks_for_all_groups(groups, processes, trial):
    hardware = {"device": "cpu", "processes": processes, "oversubscribe": True}
    rows = {"x": {"strategy": "fsdp", "replicate": groups}}
    checked = reading.parse({"hardware": hardware, "rows": rows})
    proven = checked.trial(checked.rows["x"])
    proven.refuse()
    assert proven.hardware.processes == trial


def test_a_trial_has_whole_rounds_of_micro_batches():
    hardware = {"device": "cpu", "processes": 4, "oversubscribe": True}
    rows = {"x": {"strategy": "pp", "accumulation": 16, "pipeline": "interleaved"}, "y": {"strategy": "pp"}}
    checked = reading.parse({"hardware": hardware, "rows": rows})
    assert [checked.trial(row).train.accumulation for row in checked.rows.values()] == [14, 1]
    assert [checked.trial(row).train.global_batch for row in checked.rows.values()] == [28, 30]


def test_a_trial_may_have_more_ranks():
    hardware = {"device": "cpu", "processes": 8, "oversubscribe": True}
    rows = {"x": {"strategy": "tp"}, "y": {"strategy": "fsdp", "processes": 6}}
    checked = reading.parse({"hardware": hardware, "rows": rows, "trial_processes": 8})
    assert [checked.trial(row).hardware.processes for row in checked.rows.values()] == [8, 6]


@pytest.mark.parametrize(("rows", "parts"), [(8, 2), (7, 2), (7, 3), (1, 1), (1024, 3)])
def test_padding_has_no_gradient_on_the_rank_that_has_it_only(rows, parts):
    """PyTorch divides as torch.chunk does."""
    chunks = torch.arange(rows).chunk(parts)
    for row in (0, rows // 2, rows - 1):
        places = [tp.place_in_part(row, rows, parts, part) for part in range(len(chunks))]
        there = {part: place for part, place in enumerate(places) if place is not None}
        assert [int(chunks[part][place]) for part, place in there.items()] == [row]


def test_a_model_that_it_can_t_divide_is_named():
    with pytest.raises(RunFailed, match="how to divide the layers of Linear: transformers has no plan for it"):
        tp.plan_of(torch.nn.Linear(2, 2))


def decoder(family: str, **settings):
    """A small language model of a family of transformers."""
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **size | settings, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("gemma2", {}, "cp would change Gemma2ForCausalLM, whose attention PyTorch's kernels do not compute"),
        ("gpt_oss", {}, "cp would change GptOssForCausalLM"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            "cp can't divide Lfm2ForCausalLM: not only its attention",
        ),
        ("bloom", {"n_head": 4}, "cp can't reach the attention of BloomForCausalLM"),
        *((family, {}, "") for family in ("llama", "qwen3", "mistral", "gpt2")),
    ],
)
def test_tokens_are_divided_only_where_nothing_but_attention_looks_at_others(family, settings, says):
    """Otherwise a run would end well, and have trained another model."""
    model = decoder(family, **settings)
    usual = model.config._attn_implementation
    if says:
        with pytest.raises(RunFailed, match=re.escape(says)):
            cp.require_attention_alone(model)
    else:
        cp.require_attention_alone(model)
    assert (model.config._attn_implementation, model.training) == (usual, True)


@pytest.mark.parametrize("multiplier", [1.0, 12.0])
def test_stages_are_refused_where_each_would_scale_the_embeddings_again(multiplier):
    model = decoder("granite", embedding_multiplier=multiplier)
    if multiplier == 1:
        pp.require_plain_ends(model)
    else:
        with pytest.raises(RunFailed, match="pp can't divide GraniteForCausalLM: it changes hidden states between"):
            pp.require_plain_ends(model)
    assert model.training
    assert not model.model.layers[0]._forward_pre_hooks


def test_stages_of_a_classifier_and_of_a_model_without_a_pooler_are_taken():
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, **size))
    pp.require_plain_ends(model)
    model.bert.pooler = None
    pp.require_plain_ends(model)


def test_a_weight_that_two_stages_would_have_is_refused():
    model = decoder("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(RunFailed, match=r"pp can't divide LlamaForCausalLM: lm_head\.weight is tied to another weight"):
        pp.plan_of(model)


@pytest.mark.parametrize(
    ("attention", "hidden", "by_tokens"), [(0.5, 0.0, False), (0.0, 0.5, False), (0.5, 0.0, True), (0.0, 0.5, True)]
)
def test_ranks_drop_units_of_their_own_in_their_own_heads_or_tokens_only(attention, hidden, by_tokens):
    """Where all compute the same they drop the same; and the replica's random numbers go on alike."""
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    dropped = {"attention_probs_dropout_prob": attention, "hidden_dropout_prob": hidden}
    torch.manual_seed(0)
    weights, outputs, states = None, [], []
    for part in (0, 1, 1):
        model = BertModel(BertConfig(vocab_size=9, **size, **dropped)).train()
        model.load_state_dict(weights := weights or model.state_dict())
        tp.draw_differently(model, tp.BERT, part, by_tokens)
        torch.manual_seed(7)
        outputs.append(model(torch.arange(8)[None]).last_hidden_state)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[0], outputs[1]) == (attention == 0 and not by_tokens)
