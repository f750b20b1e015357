"""Real runs, each in processes of its own, as the benchmark starts them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import LARGER, PROJECT, SCRIPTS, SMALL, command, line, prepared
from lockstep import paths
from lockstep.config import reading
from lockstep.files import read_json
from lockstep.run import record_files
from lockstep.run.record import Record

IMPORTS = [sys.executable, "-c", "import torch, transformers.models.bert.modeling_bert"]


def start(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    """From the launch of each row to the end of its first step, less its warm-up, over importing PyTorch and BERT."""
    keys = keys | SMALL | {"train.max_steps": 3, "data.limit": 1500, "hardware.oversubscribe": "true"}
    results, ratios = prepared(folder / "start", keys), {}
    rows = reading.parse({"hardware": {"device": "cpu", "processes": 2, "oversubscribe": True}}).rows
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(IMPORTS, check=True)
        imports = time.perf_counter() - began
        for name, row in rows.items():
            if not row.unavailable:
                clock = trained(results, name, row.hardware.devices, keys).clock
                started = clock.first_step_seconds - clock.warm_up_seconds
                ratios.setdefault(name, []).append(started / imports)
    what = "launch to first step, without warm-up, over importing PyTorch and BERT, time"
    return [
        line(f"{what}: {name}", times, "" if name == "deepspeed" else "at most 1.3") for name, times in ratios.items()
    ]


def memory(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    """The most memory that `single` takes over that of the bare loop, which holds what it needs and no more."""
    keys = keys | SMALL
    results = prepared(folder / "memory", keys)
    ratios = []
    for _ in range(rounds):
        bare = [sys.executable, "-m", "benchmarks.bare", str(results)]
        environment = os.environ | {"PYTHONPATH": f"{PROJECT}:{SCRIPTS}", "OMP_NUM_THREADS": "1"}
        theirs = float(subprocess.check_output(bare, env=environment, cwd=PROJECT).split()[-1])
        ratios.append(trained(results, "single", 1, keys | {"hardware.threads": 1}).memory.peak_mb / theirs)
    return [line("single over a bare loop on the same plan, peak memory (2 x 128)", ratios, "at most 1.05")]


def ddp(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    keys = keys | LARGER | {"hardware.processes": 2, "hardware.threads": 1}
    whole = prepared(folder / "whole", keys)
    plan = read_json(paths.plan_summary_file(whole, "bucketed-b64-e1-s42"))
    halved = keys | {"train.global_batch": 32, "train.max_steps": plan["steps"]}
    half, other = prepared(folder / "half", halved), prepared(folder / "other", halved)

    def seconds(results: Path, row: str, world_size: int) -> float:
        return record(results, row, world_size).clock.train_seconds

    speedups, ceilings = [], []
    for _ in range(rounds):
        wait(launch(whole, "single", keys))
        wait(launch(whole, "ddp", keys))
        wait(launch(half, "single", halved), launch(other, "single", halved))
        single = seconds(whole, "single", 1)
        speedups.append(single / seconds(whole, "ddp", 2))
        ceilings.append(single / max(seconds(half, "single", 1), seconds(other, "single", 1)))
    shares = [speedup / ceiling for speedup, ceiling in zip(speedups, ceilings, strict=True)]
    return [
        line("ddp with 2 processes over single, time (4 x 256)", speedups, "at least 1.8"),
        line("the same without communication: this machine's ceiling", ceilings, ""),
        line("ddp as a share of that ceiling", shares, ""),
    ]


def trained(results: Path, row: str, world_size: int, keys: dict) -> Record:
    """The record of a run made now."""
    wait(launch(results, row, keys))
    return record(results, row, world_size)


def launch(results: Path, row: str, keys: dict) -> subprocess.Popen:
    return subprocess.Popen(command("launch", results, keys, "--row", row), cwd=PROJECT, stdout=subprocess.DEVNULL)


def wait(*processes: subprocess.Popen) -> None:
    exit_codes = [process.wait() for process in processes]
    if any(exit_codes):
        raise SystemExit("a run failed; its log is above")


def record(results: Path, row: str, world_size: int) -> Record:
    return record_files.read_run(results / paths.RUNS / paths.run_name(row, world_size, 1))
