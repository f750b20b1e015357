"""Worker processes of a rank: the same batches, the same bits, and nobody is left behind."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lockstep import paths
from lockstep.config import reading
from lockstep.data.plan import Plan
from lockstep.errors import BadInput
from lockstep.rank import memory
from tests.conftest import PROJECT
from tests.rank.test_resumption import (
    begin,
    ended,
    in_ci,
    kill,
    prepared,
    results_of,
    run,
    same,
    wait_for_step,
)

__all__ = ["prepared"]  # a fixture
TWO = ("--set", "hardware.workers=2")
ROWS = ("single", "ddp", "dataparallel", "ddp_spawn", "accelerate", "trainer", "fabric", "fsdp", "deepspeed", "apart")


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The workers of all ranks below `process`, by the name that PyTorch gives them."""
    return [child for child in process.children(recursive=True) if child.name() == "pt_data_worker"]


def begun(results: Path):
    """A run with two workers a rank, in the midst of a long training; and its workers."""
    run(results, "plan", "--set", "train.epochs=40")
    process = begin(results, "ddp", *TWO, "--set", "train.epochs=40")
    wait_for_step(process, results, "ddp", 3)
    return process, workers_of(psutil.Process(process.pid))


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci((*ROWS, "horovod", "packed", "published"), ("ddp", "horovod")))
def test_the_same_is_trained_with_workers(row, prepared):
    few = ("--set", "train.max_steps=8", "--set", "train.checkpoint_every=0")
    of_their_own = {"packed": "{strategy: recipe, packed: true}", "published": "{strategy: published_ddp}"}
    few += ("--set", f"rows.{row}={of_their_own[row]}") if row in of_their_own else ()
    results = results_of(prepared, f"workers-{row}")
    run(results, "plan", *few)
    run(results, "launch", "--row", row, *few)
    alone = ended(results, row)
    run(results, "launch", "--row", row, *few, *TWO)
    record, weights, ledger = ended(results, row)
    same(alone, (record, weights, ledger))
    plan = Plan.load(paths.plan_file(results, record["asked"]["plan"]))
    assert np.array_equal(np.sort(ledger["id"]), np.sort(plan.ids))
    assert (record["settings"]["workers"], record["asked"]["hardware"]["workers"]) == (2, 2)
    assert record["clock"]["setup"]["workers"] > 0
    assert "workers" not in alone[0]["settings"]
    for kind in ("peak_mb", "proportional_mb"):
        assert record["memory"][kind] > alone[0]["memory"][kind], "that of the workers counts"


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_that_is_killed_ends_the_run_and_is_named(prepared):
    results = results_of(prepared, "killed-worker")
    process, workers = begun(results)
    assert len(workers) == 4
    workers[0].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"worker process {workers[0].pid}, which makes this rank's batches, ended by SIGKILL" in said
    assert not psutil.wait_procs(workers, timeout=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["rank killed", "supervisor killed", "SIGTERM"])
def test_no_worker_outlives_its_run(ends, prepared):
    results = results_of(prepared, "outlive")
    process, workers = begun(results)
    assert len(workers) == 4
    if ends == "rank killed":
        workers[0].parent().kill()
    else:
        os.kill(process.pid, signal.SIGKILL if ends == "supervisor killed" else signal.SIGTERM)
    assert not psutil.wait_procs(workers, timeout=15)[1]
    process.communicate(timeout=60)


@pytest.mark.slow
def test_a_run_with_workers_carries_on_to_the_same_weights(prepared):
    whole, parted = results_of(prepared, "whole-workers"), results_of(prepared, "parted-workers")
    run(whole, "launch", "--row", "ddp")
    process = begin(parted, "ddp", *TWO)
    wait_for_step(process, parted, "ddp", 13)
    kill(process)
    assert "carries on from" in run(parted, "launch", "--row", "ddp", *TWO)
    same(ended(whole, "ddp"), ended(parted, "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["digits", "language"])
def test_images_and_texts_end_to_end_have_workers_too(config, tmp_path):
    (tmp_path / "small.yaml").write_text(
        (PROJECT / "config" / f"{config}.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    few = ("--set", "train.max_steps=6", "--set", "train.eval_every=0", "--set", "train.checkpoint=last")
    few += ("--set", "hardware.device=cpu", "--set", "hardware.oversubscribe=true", "--set", "hardware.processes=2")
    results = tmp_path / "results"
    for script in ("prepare", "plan"):
        run(results, script, *few)
    weights = []
    for more in ((), TWO):
        run(results, "launch", "--row", "ddp", *few, *more)
        weights.append(ended(results, "ddp")[1])
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_proof_is_of_the_row_with_its_workers(prepared):
    results = results_of(prepared, "proof")
    assert "equal" in run(results, "parity", "--row", "reference", "--row", "ddp", *TWO)
    (settings,) = results.glob(f"{paths.PARITY}/ddp/n*/rep1/settings.json")
    assert json.loads(settings.read_text())["hardware"]["workers"] == 2


def test_memory_counts_workers():
    alone = memory.read(memory.torch.device("cpu"))
    child = psutil.Popen(["sleep", "60"])
    time.sleep(0.2)
    both = memory.read(memory.torch.device("cpu"), [child.pid])
    child.kill()
    child.wait()
    assert 0 < both["peak_mb"] - alone["peak_mb"] < 50
    assert memory.read(memory.torch.device("cpu"), [child.pid])["peak_mb"] < both["peak_mb"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["hardware.pin_memory=true"], "hardware.pin_memory: it is for copies from the host to a GPU"),
        (["rows.x={strategy: ddp, pin_memory: true}"], "rows.x.pin_memory: it is for copies"),
        (
            ["hardware.device=cuda", "hardware.node_gpus=2", "rows.x={strategy: recipe, resident: true, workers: 1}"],
            "rows.x: resident: True, workers: 1: batches are put together on the GPU",
        ),
        (["hardware.workers=-1"], "hardware.workers"),
        (["hardware.pin_memory=often"], "'often' is not one of auto"),
    ],
)
def test_what_makes_no_sense_is_refused(keys, words):
    with pytest.raises(BadInput, match=words):
        config = reading.read([PROJECT / "config" / "config.yaml"], ["hardware.device=cpu", *keys])
        for row in config.rows.values():
            row.refuse()


def test_a_row_has_workers_of_its_own():
    rows = reading.read(
        [PROJECT / "config" / "config.yaml"],
        ["hardware.device=cpu", "rows.x={strategy: ddp, workers: 3, pin_memory: false}"],
    ).rows
    assert [rows[name].hardware.workers for name in ("ddp", "x")] == [0, 3]
    assert [rows[name].division for name in ("ddp", "x")] == ["closed", "closed"]
    assert not rows["x"].hardware.pin_memory
