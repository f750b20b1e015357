"""The proof, and that it can fail: every mistake below is a strategy of its own, which the proof must catch."""

import json
import re

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import HOROVOD, Workplace

# Each is ddp or single with one mistake of a kind that is found in published comparisons.
MISTAKES = {
    "no_zero_grad": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def step(self):
        gradients = [p.grad.clone() for p in self.model.parameters()]
        super().step()
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
""",
    "summed": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        super().backward(loss * self.world.size, last)
""",
    "same_share": """
from lockstep.data import plan
from lockstep.rank import main
from lockstep.strategies import ddp
plan.Plan.micro_batches = lambda self, step, rank, size, parts: [plan.share(self.step_ids(step), 0, size)]
class Strategy(ddp.Strategy):
    pass
""",
    "whole_batch": """
from lockstep.data import plan
from lockstep.strategies import ddp
plan.Plan.micro_batches = lambda self, step, rank, size, parts: [self.step_ids(step)]
class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        super().backward(loss / self.world.size, last)
""",
    "padded": """
import numpy as np
from lockstep.data import plan
from lockstep.strategies import ddp
def padded(self, step, rank, size, parts):
    ids = self.step_ids(step)
    return [np.concatenate([ids, ids[: -len(ids) % size]])[rank::size]]
plan.Plan.micro_batches = padded
class Strategy(ddp.Strategy):
    pass
""",
    "unequal_means": """
from lockstep.data.plan import share
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        own = len(share(range(31), self.world.rank, self.world.size))
        super().backward(loss * 31 / (self.world.size * own), last)
""",
    "stepped_optimizer": """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
    "other_weights": """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        super().set_up(model, make_optimizer)
""",
    "other_learning_rate": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        if self.world.rank == 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.1
""",
    "one_weight": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        weights = dict(self.module.named_parameters())
        weights["bert.encoder.layer.0.intermediate.dense.weight"].register_hook(lambda gradient: 2 * gradient)
""",
}
# How each mistake is caught: by the ledger, by the distances, or before the first step.
IN_CI = ("padded", "summed", "other_weights", "other_learning_rate", "one_weight")
HONEST = {
    "fsdp_accumulation": "{strategy: fsdp, accumulation: 2}",
    "fsdp_bf16": "{strategy: fsdp, precision: bf16, mixed_precision: policy}",
    "zero_redundancy": "{strategy: zero_redundancy}",
    "ddp_options": "{strategy: ddp, static_graph: true, bucket_mb: 1, gradient_as_bucket_view: false}",
    "ddp_join": "{strategy: ddp, join: true, accumulation: 2}",
    "ddp_fp16_hook": "{strategy: ddp, hook: fp16}",
    "fabric": "{strategy: fabric, accumulation: 2}",
    "trainer": "{strategy: trainer, accumulation: 2, bucket_mb: 1, gradient_as_bucket_view: false}",
    "trainer_bf16": "{strategy: trainer, precision: bf16}",
    "accelerate_torchrun": "{strategy: accelerate, launcher: torchrun, accumulation: 2, precision: bf16}",
    "deepspeed_zero0": "{strategy: deepspeed, stage: 0, launcher: torchrun}",
    "deepspeed_zero1": "{strategy: deepspeed, stage: 1}",
    "deepspeed_zero2": "{strategy: deepspeed, stage: 2, accumulation: 2}",
    "deepspeed_checkpointing": "{strategy: deepspeed, activation_checkpointing: true}",
    "deepspeed_bf16": "{strategy: deepspeed, precision: bf16}",
    "recipe_packed": "{strategy: recipe, packed: true, accumulation: 2}",
    "recipe_compiled": "{strategy: recipe, compile: static}",
    "recipe_weights_bf16": "{strategy: recipe, precision: bf16, weights: bf16}",
    "recipe_adamw8bit": "{strategy: recipe, optimizer: adamw8bit}",
    "horovod": "{strategy: horovod, accumulation: 2}",
    "horovod_fp16": "{strategy: horovod, compression: fp16}",
}
FILES = ("config/config.yaml", "small.yaml", "proof.yaml")


@pytest.fixture(scope="module")
def prove(benchmark: Workplace):
    """Prove one row of HONEST or MISTAKES in the benchmark's folder. Returns the verdict."""
    for name, code in MISTAKES.items():
        benchmark.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py").write_text(code)
    rows = HONEST | {f"wrong_{name}": f"{{strategy: wrong_{name}}}" for name in MISTAKES}
    benchmark.path("proof.yaml").write_text("rows:\n" + "".join(f"  {name}: {row}\n" for name, row in rows.items()))

    def run(row: str) -> dict:
        files = [f"--config={file}" for file in FILES]
        finished = benchmark.script(
            "parity", *files, "--row", row, timeout=900
        )  # compiling takes long on a busy machine
        folder = benchmark.path(f"results/parity/{row}/n2/rep1")
        if not (folder / "verdict.json").exists():
            assert finished.returncode == 1
            return {"proof": "failed", "reason": json.loads((folder / "failed.json").read_text())["reason"]}
        verdict = json.loads((folder / "verdict.json").read_text())
        assert finished.returncode == (verdict["proof"] == "unequal"), finished.stderr
        return verdict

    return run


def test_every_row_of_the_table_is_proven(benchmark):
    verdicts = {}
    for file in benchmark.path("results/parity").glob("*/n*/rep1/verdict.json"):
        verdict = json.loads(file.read_text())
        verdicts[verdict["row"]] = verdict
    proofs = {row: verdict["proof"] for row, verdict in verdicts.items()}
    rows = (
        "reference_fp32",
        "reference_fp64",
        "reference_bf16",
        "single",
        "dataparallel",
        "ddp",
        "ddp_spawn",
        "deepspeed",
        "accelerate",
        "trainer",
        "fabric",
        "fsdp",
    )
    equal = [*rows, "exploding", *(["horovod"] if HOROVOD else [])]
    assert proofs == dict.fromkeys(equal, "equal") | {"ddp_amp": "within-tolerance"}
    for row, verdict in verdicts.items():
        if row.startswith("reference_"):
            continue
        exact = row not in ("deepspeed", "ddp_amp")
        assert bool(verdict["fp64"]) == exact, row
        if exact:
            assert max(verdict["fp64"].values()) < 1e-11, row
            assert verdict["first_gradients"]["differing"] == 0 < verdict["first_gradients"]["weights"], row
        else:
            assert verdict["no_fp64"]
        assert verdict["above_floor"] < (30 if verdict["kind"] == "fp32" else 3), row
        # Mistakes are far away: honest rows are thousands of times nearer, in bf16 at least twice.
        assert verdict["below_mistake"] > (1000 if verdict["kind"] == "fp32" else 2), row
    assert verdicts["ddp_amp"]["distances"]["losses"] > 1e-5
    floor = verdicts["reference_bf16"]["floor"]
    assert verdicts["ddp_amp"]["tolerance"] == {name: 3 * floor[name] for name in floor}
    page = benchmark.path("results/report/report.html").read_text()
    assert "within tolerance: 1 (ddp_amp)" in page


@pytest.mark.slow
@pytest.mark.parametrize("row", HONEST)
def test_more_rows_are_proven(prove, row):
    if row.startswith("horovod") and not HOROVOD:
        pytest.skip("Horovod is not installed: `make horovod` builds it")
    if row == "recipe_adamw8bit":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install -r requirements-dev.txt")
    verdict = prove(row)
    reduced = verdict["kind"] != "fp32"
    assert verdict["proof"] == ("within-tolerance" if reduced else "equal"), verdict
    assert reduced == (row == "accelerate_torchrun" or row.endswith(("_bf16", "_fp16", "_hook", "8bit")))
    assert bool(verdict["lossy"]) == (
        row in ("ddp_fp16_hook", "horovod_fp16", "fsdp_bf16", "recipe_weights_bf16", "recipe_adamw8bit")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[pytest.mark.ci] if name in IN_CI else []) for name in MISTAKES]
)
def test_every_mistake_is_caught(prove, mistake):
    verdict = prove(f"wrong_{mistake}")
    if mistake == "other_learning_rate":  # which is seen before the first step
        assert verdict["proof"] == "failed"
        assert "initial_lr: the row asks for 0.0005" in verdict["reason"]
        return
    assert verdict["proof"] == "unequal"
    by_ledger = mistake in ("same_share", "whole_batch", "padded")
    assert ("the ledger differs from the plan in step 1" in verdict["reason"]) == by_ledger
    if mistake == "summed":
        assert verdict["distances"]["norm"] == pytest.approx(1, abs=1e-3)
    if mistake in ("summed", "one_weight"):  # one step of plain SGD says in which weights the gradient is another
        first = verdict["first_gradients"]
        wrong = "bert.encoder.layer.0.intermediate.dense.weight" if mistake == "one_weight" else "classifier.bias"
        assert first["differing"] == (1 if mistake == "one_weight" else first["weights"])
        assert (first["nearest"], first["times"]) == (wrong, pytest.approx(2))
        assert f"{wrong}, whose gradient is 2 times as large" in verdict["reason"]
    if not by_ledger:
        # Far beyond the distances of honest rows, in float64 and in the row's own precision.
        assert max(verdict["fp64"].values()) > 1e-4
        assert verdict["above_floor"] > 30 * 10


FORGOTTEN = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        groups = [{name: group[name] for name in ("params", "weight_decay")} for group in self.optimizer.param_groups]
        kind, rate = type(self.optimizer), self.optimizer.defaults["lr"]
        self.optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=rate)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "key", "asked", "live"),
    [("sgd", "momentum", "0.9", "0"), ("adam", "betas", "[0.8,0.9]", "(0.9, 0.999)")],
)
def test_a_strategy_that_forgets_what_its_optimizer_was_told_is_caught(prove, benchmark, optimizer, key, asked, live):
    """It is refused before its first step, with the name of the setting."""
    benchmark.path("workflow/scripts/lockstep/strategies/wrong_forgotten.py").write_text(FORGOTTEN)
    benchmark.path("forgotten.yaml").write_text("rows: {wrong_forgotten: {strategy: wrong_forgotten}}")
    files = [f"--config={file}" for file in ("config/config.yaml", "small.yaml", "forgotten.yaml")]
    changed = ["--set", f"train.optimizer={optimizer}", "--set", f"train.{key}={asked}"]
    finished = benchmark.script("parity", *files, *changed, "--row", "wrong_forgotten")
    assert finished.returncode == 1
    assert f"optimizer group 0: {key}: " in finished.stderr
    assert f"but wrong_forgotten uses {live}" in finished.stderr


# Architectures with other names of dropout than BERT's, with shared layers, or without attention.
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SHAPES = {
    "roberta": SIZE,
    "electra": SIZE | {"embedding_size": 16},
    "albert": SIZE | {"embedding_size": 16, "classifier_dropout_prob": 0.1},
    "modernbert": SIZE | {"global_attn_every_n_layers": 2, "local_attention": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
}
SHAPED = """
hardware: {threads: 1}
rows:
  ddp_3: {strategy: ddp, processes: 3}
  fsdp_3: {strategy: fsdp, processes: 3}
  wrong_other_weights: {strategy: wrong_other_weights}
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_criterion_holds_for_other_models(prove, benchmark, tmp_path, shape):
    """Honest rows are equal on two and on three ranks, and the mildest mistake is clearly caught."""
    tokenizer = AutoTokenizer.from_pretrained(benchmark.path("results/data/tokenizer"))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    special |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    settings = AutoConfig.for_model(
        shape, vocab_size=len(tokenizer), max_position_embeddings=160, num_labels=6, **SHAPES[shape], **special
    )
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    benchmark.path("shaped.yaml").write_text(SHAPED)
    asked = ["--results", str(tmp_path / "results"), "--set", f"model.name={tmp_path / 'model'}"]
    asked += [f"--config={file}" for file in ("config/config.yaml", "small.yaml", "shaped.yaml")]
    benchmark.prepare(*asked)
    rows = ("reference_fp32", "reference_fp64", "ddp_3", "fsdp_3", "fsdp", "wrong_other_weights")
    finished = benchmark.script("parity", *asked, *(f"--row={row}" for row in rows), timeout=600)
    verdicts = {
        file.parts[-4]: json.loads(file.read_text())
        for file in (tmp_path / "results" / "parity").glob("*/n*/rep1/verdict.json")
    }
    proofs = {row: verdict["proof"] for row, verdict in verdicts.items()}
    assert proofs == dict.fromkeys(rows, "equal") | {"wrong_other_weights": "unequal"}, finished.stdout
    worst = max(verdicts[row]["above_floor"] for row in ("ddp_3", "fsdp_3", "fsdp"))
    assert verdicts["wrong_other_weights"]["above_floor"] > 30 * worst
    settings = json.loads((tmp_path / "results/parity/fsdp/n2/rep1/record.json").read_text())["settings"]
    assert settings["dropout"] == [0.0]


FAILING = {
    "raising": (
        "class Strategy(ddp.Strategy):\n    def step(self):\n        raise RuntimeError('no such step')\n",
        r"failed: raising: rank \d, after step 0 of 12: RuntimeError: no such step",
    ),
    "unreadable": (
        "class Strategy(ddp.Strategy):\n    def to_state_dict(native):\n        raise ValueError('no such weights')\n",
        r"failed: .*native: can't be read as a checkpoint of unreadable: no such weights",
    ),
}


@pytest.mark.parametrize("row", ["raising", pytest.param("unreadable", marks=pytest.mark.slow)])
def test_a_row_whose_trial_fails_is_failed_and_not_unequal(benchmark, row):
    """The reason is given to the script's caller, and in the table of verdicts."""
    code, expected = FAILING[row]
    strategy = benchmark.path(f"workflow/scripts/lockstep/strategies/{row}.py")
    strategy.write_text("from lockstep.strategies import ddp\n" + code)
    benchmark.path("failing.yaml").write_text(f"rows: {{{row}: {{strategy: {row}}}}}")
    asked = [f"--config={file}" for file in ("config/config.yaml", "small.yaml", "failing.yaml")]
    finished = benchmark.script("parity", *asked, "--row", row)
    assert finished.returncode == 1
    assert re.match(expected, finished.stderr.splitlines()[-1])
    shown = benchmark.script("parity", *asked, "--show", "--row", row)
    assert shown.returncode == 1
    assert "failed" in shown.stdout
    assert expected.split(": ")[-1] in " ".join(shown.stdout.split())


def test_without_its_reference_nothing_is_proven(benchmark):
    file = benchmark.path("results/parity/reference_fp64/n1/rep1/verdict.json")
    kept = file.read_text()
    try:
        file.unlink()
        finished = benchmark.script("parity", "--config=small.yaml", "--row", "ddp")
    finally:
        file.write_text(kept)
    assert finished.returncode == 2
    assert "reference_fp64/n1/rep1/verdict.json does not exist" in finished.stderr
    assert "Run parity.py with this configuration and --row reference" in finished.stderr
    assert "Traceback" not in finished.stderr
