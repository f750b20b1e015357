"""Ranks that Ray Train starts (`launcher: ray`); two hosts are in test_coordination.py."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from lockstep import paths
from lockstep.config import registry
from lockstep.files import read_json
from tests.conftest import Workplace, copy_project

CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, max_steps: 8, global_batch: 31, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 300, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  torchrun: {strategy: ddp}
  ray: {strategy: ddp, launcher: ray}
  sharded: {strategy: fsdp, launcher: ray}
  tensor: {strategy: tp, launcher: ray}
  trainer: {strategy: trainer, launcher: ray}
  fabric: {strategy: fabric, launcher: ray}
  exploding: {strategy: ddp, launcher: ray, learning_rate: 1.0e+30}
"""
LONG = "train={epochs: 4000, max_steps: 60000, global_batch: 31, eval_every: 0, checkpoint: last}"
FILES = ["--config=config/config.yaml", "--config=ray.yaml"]
needs_ray = pytest.mark.skipif(registry.version("ray") is None, reason="needs: ray")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    place = copy_project(tmp_path_factory.mktemp("project"))
    place.path("ray.yaml").write_text(CONFIG, encoding="utf-8")
    place.prepare(*FILES)
    return place


@pytest.fixture(scope="module")
def trained(place):
    """Trains and converts a row; returns its record and its weights."""

    def once(row: str) -> tuple[dict, dict]:
        done = place.script("launch", *FILES, "--row", row, timeout=600)
        assert done.returncode == 0, done.stderr
        (folder,) = place.path("results/runs").glob(f"{row}/n*/rep1")
        done = place.script("convert", str(folder.relative_to(place.folder)))
        assert done.returncode == 0, done.stderr
        assert not (folder / paths.RAY).exists(), "Ray's own files end with the run"
        return read_json(folder / paths.RECORD), load_file(folder / "model/model.safetensors")

    return once


def test_without_ray_the_row_is_left_out_and_says_how_to_install_it(monkeypatch, run_script):
    from lockstep.config import reading

    monkeypatch.setattr(registry, "version", lambda package: None if package == "ray" else "1")
    rows = reading.parse({"rows": {"x": {"strategy": "ddp", "launcher": "ray"}, "y": {"strategy": "ddp"}}}).rows
    assert rows["x"].unavailable.startswith("ray 2.60.0 is not installed; to install it: pip install ray==2.60.0")
    assert rows["y"].unavailable == ""


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param("ray", marks=pytest.mark.ci), "sharded", "tensor", "trainer", "fabric"],
)
def test_the_same_model_is_trained_as_by_torchrun(trained, row):
    record, weights = trained(row)
    alike, expected = trained("torchrun")
    assert record["world_size"] == alike["world_size"] == 2
    assert record["asked"]["options"]["launcher"] == "ray"
    assert "lockstep.rank.ray_cluster" in " ".join(record["command"])
    assert np.allclose(record["losses"], alike["losses"], rtol=0, atol=1e-5)
    for name, weight in expected.items():
        assert np.allclose(weights[name], weight, rtol=0, atol=1e-4), name


@needs_ray
@pytest.mark.slow
def test_what_a_rank_raises_is_told_as_with_other_launchers(place):
    done = place.script("launch", *FILES, "--row", "exploding", timeout=600)
    assert done.returncode == 1
    assert "RunFailed: the loss is nan in step" in done.stderr
    assert processes(place) == []


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["supervisor", "rank", "interrupt"])
def test_nothing_of_ray_outlives_a_run_that_is_ended(place, whom):
    folder = place.path("results/runs/ray/n2/rep1")
    (folder / "progress").unlink(missing_ok=True)
    arguments = ["launch", *FILES, "--set", LONG]
    assert place.script("plan", *FILES, "--set", LONG).returncode == 0
    command = [sys.executable, "workflow/scripts/launch.py", *arguments[1:], "--row", "ray"]
    supervisor = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        rank = begun(folder)
        token = folder / paths.RAY / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600, "whoever has the token may run code in the cluster"
        if whom == "rank":
            os.kill(rank, signal.SIGKILL)
        else:
            supervisor.send_signal(signal.SIGKILL if whom == "supervisor" else signal.SIGINT)
        _, said = supervisor.communicate(timeout=60)
    finally:
        supervisor.kill()
    if whom == "rank":
        assert supervisor.returncode == 1
        assert "rank 0 died after step" in said
    deadline = time.monotonic() + 20
    while left := processes(place):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def begun(folder) -> int:
    """Wait until both ranks train; returns the process of rank 0."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if (folder / "progress").is_file():
            table = np.fromfile(folder / "progress", dtype=np.int64)
            log = folder / paths.LOG
            words = log.read_text().split() if log.is_file() else []
            if "process" in words and "step" in words and table.any():
                return int(words[words.index("process") + 1].rstrip(","))
    raise AssertionError((folder / paths.LOG).read_text())


def processes(place: Workplace) -> list[list[str]]:
    """The command lines of all processes that name the place, or work in it."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words, cwd = process.info["cmdline"] or [], process.info["cwd"]
        if process.info["status"] != psutil.STATUS_ZOMBIE and (
            cwd == str(place.folder) or str(place.folder) in json.dumps(words)
        ):
            found.append(words)
    return found
