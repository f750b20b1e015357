"""The flawed rows on real processes: the proof calls each what it is, and why; each trains as it says."""

import json
import subprocess
import sys

import numpy as np
import pytest

from lockstep import paths
from lockstep.proof import fairness
from tests.conftest import HOROVOD, PROJECT

pytestmark = pytest.mark.slow
SCRIPTS = PROJECT / "workflow" / "scripts"
CONFIG = """
data: {url: null, sha256: null, limit: 1000}
model: {name: scratch, revision: null, hidden_size: 32, layers: 1}
train: {learning_rate: 0.002}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true}
repeats: 1
vary_seed: false
retries: 0
rows:
  kept: {strategy: published_ddp, keep_gradients: true}
  amp_kept: {strategy: published_ddp_amp, clip_scaled: false}
  amp_clipped: {strategy: published_ddp_amp, keep_gradients: false}
  made_anew: {strategy: published_fabric}
"""
BATCH = "it trains 64 samples a step, where the others train 32"
CLEARED, CLIPPED = "gradients are never cleared", "gradients are clipped while they are multiplied by the loss scale"
# Of each kind one or two, for CI; and the one that is built on most of another strategy.
IN_CI = ("published_single", "published_trainer", "made_anew")


def rows(expected: dict[str, str]) -> list:
    return [pytest.param(row, marks=[pytest.mark.ci] if row in IN_CI else []) for row in expected]


# What only wastes time, or miscounts a test, leaves the model what it is.
HARMLESS = {
    "published_single": "equal",
    "published_dataparallel": "equal",
    "ddp_z": "equal",
    "ddp_spawn_z": "equal",
    "accelerate_z": "equal",
    "deepspeed_clean": "equal",
    "trainer_b": "within-tolerance",
    "deepspeed_b": "within-tolerance",
    "amp_kept": "within-tolerance",  # which the loss scale hides
}
HARMFUL = {
    "published_ddp": BATCH,
    "kept": CLEARED,
    "amp_clipped": CLIPPED,
    "published_ddp_amp": f"{CLEARED}; {CLIPPED}; {BATCH}",
    "published_trainer": BATCH,
    "published_deepspeed": "every rank trains the whole of each batch",
    "made_anew": "the model is made anew, with other weights than those with which all rows begin",
    "published_horovod": BATCH,
}


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory):
    """A function that runs one of the scripts where the data is prepared; `results` is that folder."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "small.yaml").write_text(CONFIG, encoding="utf-8")
    configs = [PROJECT / "config" / "config.yaml", PROJECT / "config" / "published.yaml", folder / "small.yaml"]

    def run(script: str, *arguments: str) -> str:
        command = [sys.executable, str(SCRIPTS / f"{script}.py")]
        if script != "evaluate":
            command += [word for file in configs for word in ("--config", str(file))]
            command += ["--results", str(run.results)]
        finished = subprocess.run([*command, *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    run.results = folder / "results"
    run("prepare")
    run("plan")
    run("parity", "--row", "reference")
    return run


def verdict(lockstep, row: str) -> dict:
    lockstep("parity", "--row", row)
    (file,) = lockstep.results.glob(f"parity/{row}/n*/rep1/verdict.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("row", rows(HARMLESS))
def test_a_flaw_that_only_wastes_time_leaves_the_model_what_it_is(lockstep, row):
    told = verdict(lockstep, row)
    assert (told["proof"], told["reason"]) == (HARMLESS[row], "")


@pytest.mark.parametrize("row", rows(HARMFUL))
def test_a_flaw_that_trains_another_model_is_found_and_named(lockstep, row):
    if row == "published_horovod" and not HOROVOD:
        pytest.skip("needs: make horovod")
    told = verdict(lockstep, row)
    assert (told["proof"], told["by_nature"]) == ("unequal", HARMFUL[row])
    reason = told["reason"].removeprefix(f"{HARMFUL[row]}: ")
    by_ledger = "the ledger differs from the plan in step 1: 0 of 31 samples were not trained, 31 were trained that"
    assert (by_ledger in reason) == (row == "published_deepspeed")
    assert row == "published_deepspeed" or " is above " in reason


def test_without_a_sampler_every_rank_trains_every_batch_and_the_test_counts_each_sample_twice(lockstep):
    lockstep("launch", "--row", "published_deepspeed")
    run = lockstep.results / "runs" / "published_deepspeed" / "n2" / "rep1"
    lockstep("evaluate", str(run))
    with np.load(run / paths.LEDGER) as ledger:
        first, second = (ledger["id"][ledger["rank"] == rank] for rank in (0, 1))
    assert np.array_equal(first, second)
    tested = json.loads((run / paths.TEST_REPORT).read_text())
    data = json.loads((lockstep.results / "data" / "data.json").read_text())
    assert tested["support"] == 2 * data["splits"]["test"]["texts"]
    assert np.sum(tested["confusion_matrix"]) == tested["support"]
    told = [what for where, what in fairness.check(lockstep.results).breaches if where == str(run)]
    assert [what for what in told if "disturbed" not in what and "differ from their commit" not in what] == []


def test_texts_that_are_tokenised_late_are_the_plan_s_and_losses_are_printed(lockstep):
    said = {}
    for row in ("published_single", "single_z", "single"):
        lockstep("launch", "--row", row)
        run = lockstep.results / "runs" / row / "n1" / "rep1"
        said[row] = (json.loads((run / paths.RECORD).read_text()), (run / paths.LOG).read_text())
    late, quiet, _ = (record for record, _ in said.values())
    assert late["losses"] == quiet["losses"]
    assert late["division"] == "published"
    printed = [line for line in said["published_single"][1].splitlines() if line.startswith("loss ")]
    assert [float(line.removeprefix("loss ")) for line in printed] == pytest.approx(late["losses"], abs=1e-6)
    assert "\nloss " not in said["single_z"][1]
