"""The proof in 16 bits with three ranks, whose losses are multiplied by 3. This rounds; a factor of 2 or 4 does not."""

import json

import pytest

from tests.conftest import copy_project
from tests.proof.test_parity import MISTAKES

pytestmark = pytest.mark.slow
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, max_steps: 3, eval_every: 3, precision: bf16}
hardware: {device: cpu, processes: 3, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 0}
rows:
"""
HONEST = ("ddp", "fsdp", "accelerate")
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with prepared data, every mistake as a strategy, and trained references."""
    copy = copy_project(tmp_path_factory.mktemp("three"))
    for name, code in MISTAKES.items():
        copy.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py").write_text(code, encoding="utf-8")
    rows = (*HONEST, *(f"wrong_{name}" for name in MISTAKES))
    text = SMALL + "".join(f"  {row}_bf16: {{strategy: {row}}}\n" for row in rows)
    copy.path("small.yaml").write_text(text, encoding="utf-8")
    for script, *arguments in (("prepare",), ("plan",), ("parity", "--row=reference")):
        finished = copy.script(script, *CONFIGS, *arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    return copy


def prove(place, row: str) -> dict:
    place.script("parity", *CONFIGS, "--row", row)
    return json.loads(place.path(f"results/parity/{row}/n3/rep1/verdict.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", [pytest.param("ddp", marks=pytest.mark.ci), *HONEST[1:]])
def test_an_honest_row_is_within_the_floor_that_is_measured(place, row):
    verdict = prove(place, f"{row}_bf16")
    assert (verdict["proof"], verdict["precision"], verdict["world_size"]) == ("within-tolerance", "bf16", 3), verdict
    assert verdict["distances"]["norm"] > 1e-4  # nothing but its factor of 3 rounds it
    assert verdict["above_floor"] < 2, verdict
    assert verdict["below_mistake"] > 2, verdict


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - {"other_learning_rate"}))  # it fails before a first step
def test_a_mistake_is_seen_in_16_bits_too(place, mistake):
    assert prove(place, f"wrong_{mistake}_bf16")["proof"] == "unequal"
