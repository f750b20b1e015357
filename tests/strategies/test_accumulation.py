"""Accumulation: whatever the number of micro-batches, ranks average their gradients once in a step."""

import gzip
import json
import subprocess
import sys

import pytest

from lockstep import paths
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow
SCRIPTS = PROJECT / "workflow" / "scripts"
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, global_batch: 32, eval_every: 5}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true}
profile: {steps: 4, trace: true}
retries: 0
"""
AVERAGES = ("gloo:all_reduce", "gloo:reduce_scatter")  # what gradients are averaged by


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    """A function that counts how often rank 0 averages something in four steps of a row."""
    folder = tmp_path_factory.mktemp("accumulation")
    (folder / "small.yaml").write_text(CONFIG)

    def run(script: str, *arguments: str) -> None:
        words = ["--config", str(folder / "small.yaml"), "--results", str(folder / "results"), *arguments]
        subprocess.run([sys.executable, str(SCRIPTS / f"{script}.py"), *words], check=True, capture_output=True)

    def averages(strategy: str, accumulation: int) -> int:
        row = f"rows={{x: {{strategy: {strategy}, accumulation: {accumulation}}}}}"
        run("launch", "--row", "x", "--profile", "--set", row)
        (trace,) = (folder / "results").glob(f"{paths.PROFILED}/x/n2/rep1/{paths.TRACE}")
        with gzip.open(trace, "rt") as stream:
            events = json.load(stream)["traceEvents"]
        return sum(event["name"].startswith(AVERAGES) for event in events if event.get("ph") == "X")

    run("prepare")
    run("plan")
    return averages


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.ci) for name in ("ddp",)] + ["accelerate", "fabric", "fsdp", "trainer"],
)
def test_gradients_are_averaged_once_in_a_step(count, strategy):
    once = count(strategy, 1)
    assert once >= 4
    assert count(strategy, 4) == once
