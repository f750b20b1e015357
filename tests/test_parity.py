"""The proof, and that it can fail: every mistake below is a strategy file of its own, which it must catch."""

import json

import pytest

from lockstep import parity

from .conftest import HOROVOD, Workplace

# Each is ddp, or single, with one mistake of the kind that published comparisons have made.
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
from lockstep import plan, training
from lockstep.strategies import ddp
plan.Plan.micro_batches = lambda self, step, rank, size, parts: [plan.share(self.step_ids(step), 0, size)]
class Strategy(ddp.Strategy):
    pass
""",
    "whole_batch": """
from lockstep import plan
from lockstep.strategies import ddp
plan.Plan.micro_batches = lambda self, step, rank, size, parts: [self.step_ids(step)]
class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        super().backward(loss / self.world.size, last)
""",
    "padded": """
import numpy as np
from lockstep import plan
from lockstep.strategies import ddp
def padded(self, step, rank, size, parts):
    ids = self.step_ids(step)
    return [np.concatenate([ids, ids[: -len(ids) % size]])[rank::size]]
plan.Plan.micro_batches = padded
class Strategy(ddp.Strategy):
    pass
""",
    "unequal_means": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        share = (16, 15)[self.world.rank]
        super().backward(loss * 31 / (2 * share), last)
""",
    "stepped_optimizer": """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
    "other_weights": """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def prepare(self, model, make_optimizer):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        super().prepare(model, make_optimizer)
""",
    "other_learning_rate": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        if self.world.rank == 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.1
""",
}
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
    """Proves one row of HONEST or MISTAKES in the benchmark's folder; returns the verdict."""
    for name, code in MISTAKES.items():
        benchmark.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py").write_text(code)
    rows = (
        HONEST
        | {"recipe_lora": "{strategy: recipe, lora: 8}"}
        | {f"wrong_{name}": f"{{strategy: wrong_{name}}}" for name in MISTAKES}
    )
    benchmark.path("proof.yaml").write_text("rows:\n" + "".join(f"  {name}: {row}\n" for name, row in rows.items()))

    def run(row: str) -> dict:
        finished = benchmark.script("parity", *(f"--config={file}" for file in FILES), "--row", row)
        assert finished.returncode == 0, finished.stderr
        (verdict,) = benchmark.path("results/parity").glob(f"{row}/n2/rep1/verdict.json")
        return json.loads(verdict.read_text())

    return run


def test_every_row_of_the_table_is_proven(benchmark):
    verdicts = {}
    for file in benchmark.path("results/parity").glob("*/n*/rep1/verdict.json"):
        verdict = json.loads(file.read_text())
        verdicts[verdict["row"]] = verdict
    proofs = {row: verdict["proof"] for row, verdict in verdicts.items()}
    rows = (
        "reference",
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
    for row in set(equal) - {"reference"}:
        assert max(verdicts[row]["found"][name] for name in ("losses", "norm", "weights")) < 1e-5, row
    assert verdicts["ddp_amp"]["found"]["losses"] > 1e-5
    assert verdicts["ddp_amp"]["tolerance"]["losses"] == parity.TOLERANCES["bf16"].losses
    page = benchmark.path("results/report/report.html").read_text()
    assert "1 within tolerance (ddp_amp)" in page


@pytest.mark.slow
@pytest.mark.parametrize("row", HONEST)
def test_more_rows_are_proven(prove, row):
    if row.startswith("horovod") and not HOROVOD:
        pytest.skip("Horovod is not installed: `make horovod` builds it")
    if row == "recipe_adamw8bit":
        pytest.importorskip("bitsandbytes")
    verdict = prove(row)
    reduced = verdict["kind"] != "fp32"
    assert verdict["proof"] == ("within-tolerance" if reduced else "equal"), verdict
    assert reduced == (row == "accelerate_torchrun" or row.endswith(("_bf16", "_fp16", "_hook", "8bit")))
    assert bool(verdict["lossy"]) == (
        row in ("ddp_fp16_hook", "horovod_fp16", "recipe_weights_bf16", "recipe_adamw8bit")
    )


@pytest.mark.slow
def test_lora_is_another_model_and_says_so(prove):
    pytest.importorskip("peft")
    verdict = prove("recipe_lora")
    assert verdict["proof"] == "unequal"
    assert "ledger" not in verdict["reason"]  # it trains what it should
    assert verdict["lossy"].startswith("it trains another model")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_caught(prove, mistake):
    verdict = prove(f"wrong_{mistake}")
    assert verdict["proof"] == "unequal"
    by_ledger = mistake in ("same_share", "whole_batch", "padded")
    assert ("the ledger differs from the plan in step 1" in verdict["reason"]) == by_ledger
    if mistake == "summed":
        assert verdict["found"]["norm"] == pytest.approx(1, abs=1e-3)
