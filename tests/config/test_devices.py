"""Devices are not processes: nn.DataParallel drives all GPUs from one. Held for every strategy, wherever ranks count.

No two GPUs are needed: `visible_gpus` says so, real launchers start the ranks, and a program stands for each rank that
trains its share on paper. tests/strategies/test_strategies.py trains with one process over two shares of a CPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import hardware, reading, registry
from lockstep.config.configuration import Config
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json
from lockstep.proof import fairness
from lockstep.report import summary
from lockstep.run import runs
from tests.conftest import PROJECT

SCRIPTS = PROJECT / "workflow" / "scripts"
DEFAULT = PROJECT / "config" / "config.yaml"
KEYS = ["train.global_batch=31", "train.max_steps=9", "train.epochs=1", "data.limit=700"]
KEYS += ["model.hidden_size=32", "model.layers=1"]
TESTED = {"accuracy": 0.5, "macro_f1": 0.5, "support": 2, "labels": ["a", "b"], "confusion_matrix": [[1, 0], [1, 0]]}
# Takes the place of lockstep/rank/training.py, which every launcher calls in the end.
RANK = """
import os, sys, time
from pathlib import Path
import numpy as np
from lockstep.files import read_json, write_json
from lockstep.data.plan import Plan
from lockstep.run.progress import Progress, RankFiles


def main(folder):
    names = [("RANK", "WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")]
    rank, size = next(((int(os.environ[a]), int(os.environ[b])) for a, b in names if a in os.environ), (0, 1))
    settings = read_json(folder / "settings.json")
    plan, progress, files = Plan.load(Path(settings["plan_file"])), Progress(folder), RankFiles(folder, rank)
    progress.begin(rank)
    began = time.perf_counter()
    for step in range(plan.steps):
        for ids in plan.micro_batches(step, rank, size, settings["train"]["accumulation"]):
            files.consume(step, ids)
        time.sleep(0.01)
        progress.step()
    now = time.perf_counter()
    if rank == 0:
        machine = {"cpu": "Z80", "cores": 2, "packages": {}, "gpus": ["GPU"] * 2, "image": None, "mpi": None}
        variables = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
        write_json(folder / "env.json", machine | {"variables": variables})
    optimizer = {"initial_lr": settings["train"]["learning_rate"], "betas": [0.9, 0.999], "eps": 1e-8}
    live = {"world_size": size, "threads": settings["hardware"]["threads"], "precision": settings["precision"]}
    live |= {"groups": [optimizer | {"weight_decay": 0.0}], "optimizer": "AdamW", "dropout": [], "matmul": "highest"}
    clock = {"setup": {"imports": 0.01}, "first_step_seconds": 0.1, "train_seconds": now - began, "stall_seconds": 0}
    clock |= {"step_seconds_median": 0.01, "step_seconds_quartiles": [0.01, 0.01], "total_seconds": now - began + 0.1}
    data = read_json(Path(settings["data"]) / "data.json")
    files.write(
        {
            "clock": clock | {"window": [began, now]},
            "memory": {"peak_mb": 10.0, "reserved_mb": 10.0, "proportional_mb": None},
            "memory_by_gpu": [], "local_rank": rank,
            "energy": None, "seed": rank, "settings": live, "losses": [1.0] * plan.steps, "gradient_norm": None,
            "hashes": {"weights": data["weights"], "plan": plan.hash}, "dev": [], "notes": [],
        },
        np.full(plan.steps, 0.01),
    )
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lockstep" / "rank" / "training.py").write_text(RANK)
    return folder


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 2)


def parse(**rows) -> Config:
    """The configuration that the data are prepared with, with these rows alone."""
    source = reading.read([DEFAULT], [*KEYS, "repeats=1", "retries=0"]).source
    return reading.parse(source | {"rows": rows})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Data, and a plan of nine steps of 31."""
    folder, keys = tmp_path_factory.mktemp("prepared"), [part for key in KEYS for part in ("--set", key)]
    for script in ("prepare", "plan"):
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--results", str(folder), *keys]
        subprocess.run(command, cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, check=True)
    return folder


@pytest.fixture
def results(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "results"))


EXPECTED = dict.fromkeys(registry.names(), (2, 2)) | {
    "single": (1, 1),
    "dataparallel": (2, 1),
}  # devices, processes
QUICK = ("single", "dataparallel", "ddp_spawn")  # without a launcher that imports PyTorch and more


@pytest.mark.parametrize("name", registry.names())
def test_every_strategy_says_how_many_processes_two_gpus_take(two_gpus, name):
    checked = parse(x={"strategy": name})
    row = checked.rows["x"]
    for each in (row, checked.trial(row), checked.profiled(row)):
        assert (each.hardware.devices, each.hardware.processes) == EXPECTED[name]
        assert each.folder(1).endswith(f"/x/n{EXPECTED[name][0]}/rep1")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
def test_every_place_that_counts_ranks_with_two_gpus(two_gpus, results, scripts, monkeypatch, tmp_path, name):
    monkeypatch.setattr(runs, "SCRIPTS", scripts)
    checked = parse(x={"strategy": name})
    row, (devices, processes) = checked.rows["x"], EXPECTED[name]
    if row.unavailable:
        pytest.skip(row.unavailable)
    made = runs.run(checked, row, 1, results)

    folder = results / f"runs/x/n{devices}/rep1"
    assert made == read_json(folder / "record.json")
    assert made["world_size"] == devices
    assert len(made["seeds"]) == len(made["memory"]["peak_mb_per_rank"]) == made["settings"]["world_size"] == processes
    with np.load(folder / "ledger.npz") as ledger:
        assert set(ledger["rank"]) == set(range(processes))
    assert "step 9/9" in (folder / "run.log").read_text()  # the progress of all ranks, and of no other
    told = [what for where, what in fairness.check(results).breaches if where == str(folder)]
    told = [what for what in told if "it was disturbed" not in what]  # by other tests
    assert told == []

    write_json(folder / "test" / "report.json", TESTED)
    (folder / "test" / "report.txt").write_text("")
    (line,) = summary.gather(checked, results).rows
    assert (line["status"], line["world_size"], line["device"]) == ("ok", devices, "cuda")


def test_speed_up_and_utilisation_are_per_device(two_gpus, results, scripts, monkeypatch):
    """Efficiency is speed-up per device, and the peak that of all devices, whatever the number of processes."""
    monkeypatch.setattr(runs, "SCRIPTS", scripts)
    monkeypatch.setattr(summary.metrics, "device_peak", lambda name, kind: 1e12)
    checked = parse(single={"strategy": "single"}, dataparallel={"strategy": "dataparallel"})
    for row in checked.rows.values():
        folder = results / row.folder(1)
        made = runs.run(checked, row, 1, results)
        seconds = {"single": 2.0, "dataparallel": 1.25}[row.name]
        write_json(folder / "record.json", made | {"clock": made["clock"] | {"train_seconds": seconds}})
        write_json(folder / "test" / "report.json", TESTED)
        (folder / "test" / "report.txt").write_text("")
    alone, both = summary.gather(checked, results).rows
    assert both["speedup"] == pytest.approx(1.6)
    assert both["efficiency"] == pytest.approx(0.8)
    assert both["mfu"] / alone["mfu"] == pytest.approx(0.8)


def test_a_batch_must_have_a_sample_for_every_device(two_gpus):
    row = reading.parse({"rows": {"x": {"strategy": "dataparallel", "global_batch": 1}}}).rows["x"]
    with pytest.raises(BadInput, match="1 samples can't be shared by 2 devices"):
        runs.refuse_to_start(row)
