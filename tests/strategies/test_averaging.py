"""Strategies whose ranks go apart between averages: local_sgd and diloco, on two real processes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from lockstep import paths
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow
SCRIPTS = PROJECT / "workflow" / "scripts"
# With plain SGD a mean of weights is a step along the mean of gradients, so averages in every step are ddp.
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, max_steps: 12, global_batch: 32, eval_every: 5, optimizer: sgd, learning_rate: 0.2, clip: 0}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true}
profile: {steps: 0}
retries: 0
rows:
  always: {strategy: local_sgd, every: 1}
  seldom: {strategy: local_sgd, every: 4}
  not_yet: {strategy: local_sgd, every: 4, local_after: 12}
  in_one_node: {strategy: local_sgd, every: 4, within: node}
  plain_outer: {strategy: diloco, every: 4, outer_rate: 1, outer_momentum: 0}
  outer: {strategy: diloco, every: 4}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that trains a row, and returns its losses, dev losses, and the hash of its weights."""
    folder = tmp_path_factory.mktemp("averaging")
    (folder / "small.yaml").write_text(CONFIG)
    results, done = folder / "results", {}

    def run(script: str, *arguments: str) -> None:
        words = ["--config", str(folder / "small.yaml"), "--results", str(results), *arguments]
        subprocess.run([sys.executable, str(SCRIPTS / f"{script}.py"), *words], check=True, capture_output=True)

    def train(row: str) -> dict:
        if row not in done:
            run("launch", "--row", row)
            place = results / paths.RUNS / row / "n2" / "rep1"
            record = json.loads((place / paths.RECORD).read_text())
            dev = [scores["loss"] for scores in record["dev"]]
            assert record["division"] == ("closed" if row == "ddp" else "open")
            done[row] = {"losses": record["losses"], "dev": dev}
        return done[row]

    run("prepare")
    run("plan")
    return train


def far(ours: dict, theirs: dict, what: str) -> float:
    return float(np.abs(np.array(ours[what]) - np.array(theirs[what])).max())


@pytest.mark.parametrize("row", [pytest.param("always", marks=pytest.mark.ci), "not_yet", "in_one_node"])
def test_where_all_meet_in_every_step_it_is_ddp(trained, row):
    assert far(trained(row), trained("ddp"), "dev") < 1e-6


def test_where_they_meet_seldom_it_is_not(trained):
    """Else the test before could not fail."""
    assert far(trained("seldom"), trained("ddp"), "dev") > 1e-5
    assert far(trained("seldom"), trained("ddp"), "losses") > 1e-5
    assert trained("seldom")["losses"][0] == pytest.approx(trained("ddp")["losses"][0], abs=1e-6)


def test_an_outer_step_of_rate_one_is_the_average(trained):
    assert far(trained("plain_outer"), trained("seldom"), "dev") < 1e-6
    assert far(trained("outer"), trained("seldom"), "dev") > 1e-5
