"""Snapshots: the model at the end of every few epochs, whatever trains it, and however often it is interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep import paths
from lockstep.data import plan
from lockstep.files import verify
from lockstep.proof import conversion
from lockstep.report import page
from tests import made
from tests.rank.test_resumption import (
    ROWS,
    SCRIPTS,
    begin,
    ended,
    folder_of,
    in_ci,
    kill,
    prepared,
    results_of,
    run,
    wait_for_step,
)

# The learning rates of one epoch's training are those of the first of two.
ALIKE = ("--set", "train.schedule=constant", "--set", "train.warmup=0", "--set", "train.eval_every=0")
EVERY_EPOCH = ("--set", "train.snapshot_every=1")
__all__ = ["prepared"]  # a fixture


def weights_of(snapshot: Path) -> str:
    return json.loads((snapshot / paths.CHECKPOINT / "manifest.json").read_text())["weights"]


def convert(folder: Path, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(SCRIPTS / "convert.py"), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(prepared: Path, name: str, row: str, *arguments: str) -> str:
    """Results of a run by `ALIKE`; the hash of its last weights."""
    results = results_of(prepared, name)
    run(results, "plan", *ALIKE, *arguments)
    run(results, "launch", "--row", row, *ALIKE, *arguments)
    return ended(results, row)[1]


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci((*ROWS, "bf16_weights", "horovod"), ("ddp", "outer")))
def test_a_snapshot_is_what_training_ends_with_and_taking_it_changes_nothing(row, prepared):
    """Also where a run that takes them is killed after the first, and carries on."""
    first = train(prepared, f"first-{row}", row, "--set", "train.epochs=1")
    last = train(prepared, f"last-{row}", row)
    assert first != last
    results = results_of(prepared, f"snapshots-{row}")
    process = begin(results, row, *ALIKE, *EVERY_EPOCH)
    wait_for_step(process, results, row, 26)
    kill(process)
    assert "carries on from" in run(results, "launch", "--row", row, *ALIKE, *EVERY_EPOCH)
    record, weights, _ = ended(results, row)
    assert weights == last
    assert [(about["epoch"], about["step"]) for about in record["snapshots"]] == [(1, 17), (2, 34)]
    there = paths.snapshots(folder_of(results, row))
    assert [weights_of(folder) for folder in there.values()] == [first, last]
    assert list(there) == [1, 2]
    assert not list((folder_of(results, row) / paths.SNAPSHOTS).glob(".*")), "none is half-written"
    for folder in there.values():
        verify(folder / paths.CHECKPOINT, "")
        assert conversion.convert(folder, folder / paths.MODEL) == weights_of(folder)


@pytest.mark.slow
def test_a_snapshot_is_converted_tested_and_asked(prepared):
    results = results_of(prepared, "commands")
    once = ("--set", "train.epochs=2", "--set", "train.eval_every=17", *EVERY_EPOCH)
    run(results, "launch", "--row", "single", *once)
    folder = folder_of(results, "single")
    record = ended(results, "single")[0]
    scores = {about["epoch"]: about["dev"] for about in record["snapshots"]}
    assert scores[1]["macro_f1"] == record["dev"][0]["macro_f1"]
    assert "equal to the live weights" in convert(folder, "--snapshot", "1")
    tested = run(results, "test", str(folder), "--snapshot", "2")
    report = json.loads((paths.snapshot(folder, 2) / paths.TEST_REPORT).read_text())
    assert f"{report['accuracy']:.4f}" in tested
    convert(folder)
    run(results, "test", str(folder))
    assert json.loads((folder / paths.TEST_REPORT).read_text()) == report, "the last epoch's are the weights it kept"
    told = [
        run(results, "predict", *once, "--text", "今天", *more)
        for more in ((), ("--snapshot", "1"), ("--snapshot", "2"))
    ]
    assert told[0] == told[2]
    assert "single" in told[1]
    said = run(results, "test", str(folder), "--snapshot", "3", code=2)
    assert "--snapshot 3" in said
    assert "it kept 1, 2" in said
    # A damaged one is refused.
    checkpoint = paths.snapshot(folder, 1) / paths.CHECKPOINT / "checkpoint.pt"
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.write_bytes(data)
    assert "has changed since it was written" in convert(folder, "--snapshot", "1", code=1)
    # The next run that takes none leaves none of these.
    run(results, "launch", "--row", "single", "--set", "train.eval_every=17")
    assert not (folder / paths.SNAPSHOTS).exists()


@pytest.mark.slow
def test_another_runs_state_brings_its_snapshots_along(prepared):
    """Those that were taken before it, and no others."""
    results = results_of(prepared, "elsewhere")
    process = begin(results, "ddp", *ALIKE, *EVERY_EPOCH)
    wait_for_step(process, results, "ddp", 26)
    kill(process)
    first = folder_of(results, "ddp")
    taken = weights_of(paths.snapshot(first, 1))
    resumed = ("--row", "ddp", "--repeat", "2", "--resume", str(first))
    run(results, "launch", *resumed, *ALIKE, *EVERY_EPOCH)
    (second,) = results.glob(f"{paths.RUNS}/ddp/n*/rep2")
    assert list(paths.snapshots(second)) == [1, 2]
    assert weights_of(paths.snapshot(second, 1)) == taken
    assert list(paths.snapshots(first)) == [1]


@pytest.mark.parametrize(
    ("max_steps", "ends"), [(None, {1: 4, 2: 8, 3: 12}), (8, {1: 4, 2: 8}), (9, {1: 4, 2: 8}), (3, {})]
)
def test_an_epoch_that_is_cut_short_has_no_end(max_steps, ends):
    made = plan.make(np.ones(23, np.int64), global_batch=5, epochs=3, seed=1, batching="plain", max_steps=max_steps)
    assert made.epoch_ends(23) == ends


def test_the_page_lists_snapshots_with_what_they_came_to():
    taken = [
        {"epoch": 1, "step": 17, "dev": None, "seconds": 0.1},
        {"epoch": 2, "step": 34, "dev": {"support": 68, "macro_f1": 0.25}, "seconds": 0.1},
    ]
    said = page._snapshots(made.run(log="results/runs/ddp/n2/rep1/run.log", snapshots=taken))
    assert "epochs 1 (step 17); 2 (step 34, dev macro_f1 0.2500)" in said.en
    assert "results/runs/ddp/n2/rep1 --snapshot EPOCH" in said.en
    assert "results/runs/ddp/n2/rep1 --snapshot" in said.zh
