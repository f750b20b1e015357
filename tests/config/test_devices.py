"""Devices are not processes: nn.DataParallel drives all GPUs from one process. Every strategy is checked.

No GPUs are needed: `visible_gpus` is replaced, real launchers start the ranks, and each rank is a program that
only records its share. tests/strategies/test_strategies.py trains with one process over two shares of a CPU.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep import nvml, paths, provenance
from lockstep.config import machine, reading, registry
from lockstep.config.configuration import Config
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json
from lockstep.model import metrics
from lockstep.proof import fairness
from lockstep.report import summary
from lockstep.run import node, record_files, refusals, runs
from lockstep.run.record import Gpu
from tests.conftest import PROJECT

SCRIPTS = PROJECT / "workflow" / "scripts"
DEFAULT = PROJECT / "config" / "config.yaml"
KEYS = ["train.global_batch=31", "train.max_steps=9", "train.epochs=1", "data.limit=700"]
KEYS += ["model.hidden_size=32", "model.layers=2"]  # a layer for each of the two ranks of `pp`
TESTED = {"accuracy": 0.5, "macro_f1": 0.5, "support": 2, "labels": ["a", "b"], "confusion_matrix": [[1, 0], [1, 0]]}
# Replaces lockstep/rank/main.py, which every launcher finally calls.
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
    part, of = (0, 1) if settings["options"].get("no_sampler") else (rank, size)
    plan, progress, files = Plan.load(Path(settings["plan_file"])), Progress(folder), RankFiles(folder, rank)
    progress.begin(rank)
    began = time.perf_counter()
    for step in range(plan.steps):
        for ids in plan.micro_batches(step, part, of, settings["train"]["accumulation"]):
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
    live |= {"lora": {"lora": 0}}
    clock = {"setup": {"imports": 0.01}, "first_step_seconds": 0.1, "train_seconds": now - began, "stall_seconds": 0}
    clock |= {"warm_up_seconds": 0.0, "cold_seconds": 0.0, "evaluation_seconds": 0.0}
    clock |= {"step_seconds_median": 0.01, "step_seconds_quartiles": [0.01, 0.01], "total_seconds": now - began + 0.1}
    data = read_json(Path(settings["data"]) / "data.json")
    files.write(
        {
            "clock": clock | {"window": [began, now]},
            "memory": {"peak_mb": 10.0, "reserved_mb": 10.0, "proportional_mb": None},
            "memory_by_gpu": [], "reserved_by_gpu": [], "local_rank": rank, "node": 0,
            "bytes_read": 0,
            "energy": None, "seed": rank, "settings": live, "losses": [1.0] * plan.steps, "gradient_norm": None,
            "rates": [], "terms": {},
            "hashes": {"weights": data["weights"], "plan": plan.hash}, "dev": [], "notes": [],
            "resumed": [], "saved": {"count": 0, "seconds": 0.0, "bytes": 0}, "snapshots": [],
        },
        np.full(plan.steps, 0.01),
    )
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lockstep" / "rank" / "main.py").write_text(RANK)
    return folder


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)


def parse(**rows) -> Config:
    """The configuration that the data are prepared with, with only these rows."""
    source = reading.read([DEFAULT], [*KEYS, "repeats=1", "retries=0"]).source
    return reading.parse(source | {"rows": rows})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Prepared data, and a plan of nine steps of 31 samples."""
    folder, keys = tmp_path_factory.mktemp("prepared"), [part for key in KEYS for part in ("--set", key)]
    for script in ("prepare", "plan"):
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--results", str(folder), *keys]
        subprocess.run(command, cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, check=True)
    return folder


@pytest.fixture
def results(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "results"))


# The devices and processes of each strategy on two GPUs.
EXPECTED = dict.fromkeys(registry.names(), (2, 2)) | {
    **dict.fromkeys(("single", "published_single"), (1, 1)),
    **dict.fromkeys(("dataparallel", "published_dataparallel", "published_trainer"), (2, 1)),
}
QUICK = ("single", "dataparallel", "ddp_spawn")  # without a launcher that imports PyTorch and more


@pytest.mark.parametrize("name", registry.names())
def test_every_strategy_says_how_many_processes_two_gpus_take(two_gpus, name):
    checked = parse(x={"strategy": name})
    row = checked.rows["x"]
    for each in (row, checked.trial(row), checked.profiled(row)):
        assert (each.hardware.devices, each.hardware.processes) == EXPECTED[name]
        assert each.folder(1).endswith(f"/x/n{EXPECTED[name][0]}/rep1")


TAUGHT = [name for name in EXPECTED if name != "cp"]  # which trains language models only, and is tp to what counts


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TAUGHT]
)
def test_every_place_that_counts_ranks_with_two_gpus(two_gpus, results, scripts, monkeypatch, tmp_path, name):
    monkeypatch.setattr(paths, "TRAIN", scripts / "train.py")
    monkeypatch.setattr(node, "SCRIPTS", scripts)
    # DeepSpeed's own launcher counts GPUs for itself: tests/test_pretended_gpus.py shows it some.
    launcher = {"launcher": "torchrun"} if name.endswith("deepspeed") else {}
    checked = parse(x={"strategy": name} | launcher)
    row, (devices, processes) = checked.rows["x"], EXPECTED[name]
    if row.unavailable:
        pytest.skip(row.unavailable)
    made = runs.run(checked, row, 1, results)

    folder = results / f"runs/x/n{devices}/rep1"
    assert made == record_files.read_run(folder)
    assert made.world_size == devices
    assert len(made.seeds) == len(made.memory.peak_mb_per_rank) == made.settings["world_size"] == processes
    with np.load(folder / "ledger.npz") as ledger:
        assert set(ledger["rank"]) == set(range(processes))
    assert "step 9/9" in (folder / "run.log").read_text()  # the progress of all ranks, and of no other
    told = [what for where, what in fairness.check(results).breaches if where == str(folder)]
    # Other tests disturb a run of a third of a second, and take the processor from it between its steps.
    told = [what for what in told if not what.startswith(("it was disturbed", "its steps took", "its steps stalled"))]
    assert told == []

    write_json(folder / "test" / "report.json", TESTED)
    (folder / "test" / "report.txt").write_text("")
    (line,) = summary.gather(checked, results).rows
    assert (line["status"], line["world_size"], line["device"]) == ("ok", devices, "cuda")


@pytest.mark.parametrize("name", registry.names())
def test_several_ranks_on_a_gpu_are_for_who_asks(two_gpus, name):
    row = parse(x={"strategy": name, "processes": 4}).rows["x"]
    with pytest.raises(BadInput, match="4, but there are 2 GPUs here"):
        _ = row.hardware
    row = parse(x={"strategy": name, "processes": 4, "oversubscribe": True}).rows["x"]
    devices, processes = EXPECTED[name] if EXPECTED[name] != (2, 2) else (4, 4)
    assert (row.hardware.devices, row.hardware.processes) == (devices, processes)
    assert row.hardware.gpu_count == min(devices, 2)
    assert row.hardware.backend == "gloo"  # NCCL refuses two ranks on one GPU
    if name in ("deepspeed", "published_deepspeed"):
        assert "set launcher: torchrun" in row.unavailable
        row = parse(x={"strategy": name, "processes": 4, "oversubscribe": True, "launcher": "torchrun"}).rows["x"]
    assert "launcher" not in row.unavailable


def test_nccl_for_ranks_that_share_a_gpu_is_refused_before_they_start(two_gpus):
    row = parse(x={"strategy": "ddp", "processes": 3, "oversubscribe": True, "backend": "nccl"}).rows["x"]
    with pytest.raises(BadInput, match="NCCL refuses two ranks on one GPU, but 3 would share 2"):
        _ = row.hardware


def test_speed_up_and_utilisation_are_per_device(two_gpus, results, scripts, monkeypatch):
    """Efficiency is speed-up per device, and the peak is that of all devices, with any number of processes."""
    monkeypatch.setattr(paths, "TRAIN", scripts / "train.py")
    monkeypatch.setattr(node, "SCRIPTS", scripts)
    monkeypatch.setattr(metrics, "device_peak", lambda name, kind: 1e12)
    checked = parse(single={"strategy": "single"}, dataparallel={"strategy": "dataparallel"})
    for row in checked.rows.values():
        folder = results / row.folder(1)
        made = runs.run(checked, row, 1, results)
        seconds = {"single": 2.0, "dataparallel": 1.25}[row.name]
        gpus = [
            Gpu(gpu=0, utilisation=91.4, sm_mhz=1410, memory_mb=900, throttled=[]),
            Gpu(gpu=1, utilisation=80, sm_mhz=1395.2, memory_mb=None, throttled=[]),
        ]
        made = replace(
            made,
            clock=replace(made.clock, train_seconds=seconds),
            memory_by_gpu=[10.0, 20.4][: row.hardware.devices],
            watch=replace(made.watch, disturbed=[], gpus=gpus[: row.hardware.devices]),
        )
        record_files.write_run(folder / "record.json", made)
        write_json(folder / "test" / "report.json", TESTED)
        (folder / "test" / "report.txt").write_text("")
    alone, both = summary.gather(checked, results).rows
    assert both["speedup"] == pytest.approx(1.6)
    assert both["efficiency"] == pytest.approx(0.8)
    assert both["mfu"] / alone["mfu"] == pytest.approx(0.8)
    about = {"matmul": "highest"}, {"gpus": ["Pretended GPU"]}, None
    assert metrics.peak_of(checked.rows["dataparallel"], *about)[0] == 2
    on_two_nodes = parse(ddp={"strategy": "ddp", "nodes": 2}).rows["ddp"]
    assert metrics.peak_of(on_two_nodes, *about)[0] == 4  # of all nodes
    told = ("memory_by_gpu_mb", "reserved_by_gpu_mb", "nvml_memory_by_gpu_mb", "utilisation_by_gpu", "sm_mhz_by_gpu")
    assert [alone[name] for name in told] == ["10", None, "900", "91", "1410"]
    assert [both[name] for name in told] == ["10 + 20", None, None, "91 / 80", "1410 / 1395"]


def test_the_peak_of_unlike_gpus_is_that_of_all_of_them(two_gpus, monkeypatch):
    known = {"A": 1e12, "B": 4e12}
    monkeypatch.setattr(metrics, "device_peak", lambda name, kind: known.get(name))
    mixed = {"strategy": "ddp", "mixed_gpus": True}
    rows = parse(here=mixed, apart=mixed | {"nodes": 2}, alike={"strategy": "ddp"}, one=mixed | {"processes": 1}).rows

    def peak(row: str, *gpus: str, nodes=()) -> float | None:
        number, each = metrics.peak_of(rows[row], {"matmul": "highest"}, {"gpus": list(gpus)}, None, nodes)
        return each and number * each

    assert peak("here", "A", "B") == peak("here", "B", "A") == 5e12
    assert peak("here", "A", "unknown") is None
    assert peak("here", "A") is None  # a launcher that shows a rank its own GPU alone
    assert peak("one", "A", "B") == 1e12
    assert peak("alike", "A") == 2e12
    assert peak("apart", "A", "A", nodes=[{"gpus": ["A", "A"]}, {"gpus": ["A", "B"]}]) == 7e12
    assert peak("apart", "A", "A", nodes=[{"host": "h1"}, {"host": "h2"}]) is None  # by an earlier version


def test_a_variable_for_finding_errors_is_noted_where_it_makes_a_row_slower(two_gpus, monkeypatch):
    rows = parse(gpu={"strategy": "ddp"}, cpu={"strategy": "ddp", "device": "cpu"}).rows

    def noted() -> list[list[str]]:
        every = [runs._before(rows[name], []) for name in ("gpu", "cpu")]
        return [[note for note in notes if "for finding errors" in note] for notes in every]

    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    for name, value in (("CUDA_LAUNCH_BLOCKING", "0"), ("TORCH_DISTRIBUTED_DEBUG", "off")):
        monkeypatch.setenv(name, value)
    assert noted() == [[], []]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert noted() == [["its times are longer than without CUDA_LAUNCH_BLOCKING=1, which is for finding errors"], []]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert [len(notes) for notes in noted()] == [1, 1]


def test_a_batch_must_have_a_sample_for_every_device(two_gpus):
    row = reading.parse({"rows": {"x": {"strategy": "dataparallel", "global_batch": 1}}}).rows["x"]
    with pytest.raises(BadInput, match="1 samples can't be shared by 2 devices"):
        refusals.refuse_to_start(row)


# Makes a process see another machine, before it runs the named script.
ELSEWHERE = """
import runpy, sys
from pathlib import Path
{changes}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
APPLE = """
import torch
torch.backends.mps.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *a, **k: torch.device("mps")
"""
A_MAC = """
import os, psutil
sys.platform = "darwin"
del os.sched_getaffinity
"""
NO_NVML = """
sys.modules["pynvml"] = None
from lockstep.config import machine
machine.built_for_gpus = machine.built_for_amd = lambda: True
machine.KFD = Path("/nowhere")
"""


def elsewhere(changes: str, results: Path, *keys: str) -> subprocess.CompletedProcess:
    """Run `launch.py --row x`, a row of `single`, on a machine with these `changes`."""
    config = results / "x.yaml"
    config.write_text("rows: {x: {strategy: single}}")
    settings = [part for key in (*KEYS, *keys) for part in ("--set", key)]
    command = [str(SCRIPTS / "launch.py"), "--config", str(DEFAULT), "--config", str(config), *settings]
    command += ["--results", str(results), "--row", "x"]
    program = [sys.executable, "-c", ELSEWHERE.format(changes=changes), *command]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    return subprocess.run(program, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        (APPLE, "hardware.device=mps", "hardware.device: 'mps' is not one of auto, cpu, cuda."),
        (APPLE, "hardware.device=mps", "Apple's GPUs (mps) are not supported."),
        (A_MAC, "hardware.device=auto", "error: Lockstep runs on Linux, and this is darwin."),
        (NO_NVML, "hardware.device=cuda", "device: cuda is asked for, but no GPU can be used here"),
    ],
)
def test_what_can_t_train_here_is_refused_in_words(results, changes, key, said):
    finished = elsewhere(changes, results, key)
    assert finished.returncode == 2, finished.stderr
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("changes", [APPLE, NO_NVML], ids=["apple", "no driver"])
def test_where_no_gpu_can_train_auto_takes_the_cpu(results, changes):
    finished = elsewhere(changes, results)
    assert finished.returncode == 0, finished.stderr
    assert read_json(next(results.glob("runs/x/n1/rep1/record.json")))["settings"]["device"] == "cpu"


def test_gpus_that_are_named_by_their_uuid_are_known_by_their_number(monkeypatch):
    uuids = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"]
    answers = {"nvmlDeviceGetCount": lambda: 3, "nvmlDeviceGetUUID": uuids.__getitem__}
    answers |= {"nvmlDeviceGetHandleByIndex": lambda number: number}
    monkeypatch.setattr(nvml, "library", lambda: SimpleNamespace(**answers))
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)
    for chosen, numbers in (
        ("GPU-cccc-3,GPU-aaaa", [2, 0]),
        ("1,0", [1, 0]),
        ("GPU-else,GPU-other", [0, 1]),
        ("MIG-a,1", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert machine.gpu_numbers() == numbers
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine.gpu_numbers() == [0, 1]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("7", "'7' is not a GPU of this machine, which has 0, 1, 2"),
        ("0,3", "'3' is not a GPU of this machine"),  # CUDA would silently use GPU 0 only
        ("0,-1,1", "'-1' is not a GPU of this machine"),
        ("0,", "'' is not a GPU of this machine"),
        ("GPU-else", "'GPU-else' is not a GPU of this machine"),
        ("GPU-", "'GPU-' is not a GPU of this machine"),  # ambiguous
        ("0,1,0", "'0' is named twice"),  # CUDA would silently use none
        ("GPU-aaaa,GPU-aaaa-1", "'GPU-aaaa-1' is named twice"),
    ],
)
def test_gpus_that_the_environment_names_in_vain_are_told(monkeypatch, chosen, said):
    named_by_environment(monkeypatch, chosen)
    with pytest.raises(BadInput, match=re.escape(said)):
        _ = parse(one={"strategy": "single"}).rows["one"].hardware


@pytest.mark.parametrize("chosen", ["2,0", " 1 , 2", "GPU-bb", "MIG-aaaa/1"])
def test_gpus_that_the_environment_may_name(monkeypatch, chosen):
    named_by_environment(monkeypatch, chosen)
    assert parse(one={"strategy": "single"}).rows["one"].hardware.device == "cuda"


def test_of_parts_of_gpus_a_process_has_one_and_deepspeed_s_launcher_can_t_choose_it(monkeypatch):
    named_by_environment(monkeypatch, "MIG-aaaa,MIG-bbbb")
    own, torchrun = {"strategy": "deepspeed"}, {"strategy": "deepspeed", "launcher": "torchrun"}
    rows = parse(own=own, torchrun=torchrun).rows
    assert [row.hardware.devices for row in rows.values()] == [1, 1]
    assert rows["own"].unavailable == "DeepSpeed's launcher can't choose a part of a GPU (MIG); set launcher: torchrun"
    assert rows["torchrun"].unavailable == ""


def test_a_gpu_that_is_divided_is_refused_unless_a_part_of_it_is_named(monkeypatch):
    """A process sees one part of it, so the second rank of two would find no device."""
    named_by_environment(monkeypatch, "0,1")
    answers = vars(nvml.library()) | {"nvmlDeviceGetMigMode": lambda gpu: [int(gpu == 1), 0]}
    monkeypatch.setattr(nvml, "library", lambda: SimpleNamespace(**answers))
    with pytest.raises(BadInput, match=r"hardware.gpus: GPU 1 is divided into parts \(MIG\)"):
        _ = parse(one={"strategy": "ddp"}).rows["one"].hardware
    for whole_or_part in ("0", "MIG-aaaa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", whole_or_part)
        assert parse(one={"strategy": "ddp"}).rows["one"].hardware.devices == 1


@pytest.mark.parametrize(("nccl", "processes", "refused"), [(True, 4, True), (True, 2, False), (False, 4, False)])
def test_a_horovod_with_nccl_can_t_share_a_gpu(monkeypatch, nccl, processes, refused):
    named_by_environment(monkeypatch, "0,1")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.28.1")
    monkeypatch.setattr("lockstep.provenance.horovod_has", lambda library: nccl and library == "nccl")
    row = parse(one={"strategy": "horovod", "processes": processes, "oversubscribe": True}).rows["one"]
    assert row.unavailable == ("Horovod is built with NCCL here, which refuses two ranks on one GPU" if refused else "")


def test_deepspeed_s_launcher_takes_several_nodes_of_one_gpu_each(monkeypatch):
    named_by_environment(monkeypatch, "0")
    row = parse(one={"strategy": "deepspeed", "nodes": 2}).rows["one"]
    assert (row.hardware.devices, row.unavailable) == (2, "")


@pytest.mark.parametrize(("device", "refused"), [("cuda", True), ("cpu", False)])
def test_cuda_graphs_and_accumulation_are_refused(monkeypatch, device, refused):
    named_by_environment(monkeypatch, "0" if device == "cuda" else "")
    row = parse(one={"strategy": "recipe", "compile": "static", "accumulation": 2}).rows["one"]
    with (
        pytest.raises(BadInput, match="accumulation: 2: the program is replayed as CUDA graphs")
        if refused
        else contextlib.nullcontext()
    ):
        row.refuse()


def test_without_a_compiler_a_compiled_row_is_unavailable(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    rows = parse(one={"strategy": "recipe", "compile": "dynamic", "device": "cpu"}, other={"strategy": "recipe"}).rows
    assert rows["one"].unavailable == "torch.compile needs a compiler; to install one (Debian): apt install g++"
    assert rows["other"].unavailable == ""


@pytest.mark.parametrize(
    ("name", "value", "prevents"),
    [
        ("TORCH_COMPILE_DISABLE", "1", True),
        ("TORCH_COMPILE_DISABLE", "0", False),
        ("TORCHDYNAMO_DISABLE", "1", True),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", True),  # PyTorch asks only whether it is empty
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "", False),
    ],
)
def test_a_row_that_the_environment_leaves_uncompiled_is_unavailable(monkeypatch, name, value, prevents):
    monkeypatch.setattr(provenance, "has_compiler", lambda device: True)
    monkeypatch.setenv(name, value)
    compiled = {"strategy": "recipe", "compile": "dynamic", "device": "cpu"}
    rows = parse(one=compiled, other={"strategy": "recipe", "device": "cpu"}).rows
    said = f"torch.compile leaves the model as it is, wholly or where it fails, with {name}={value} in the environment"
    assert rows["one"].unavailable == (f"{said}; to compile it: unset {name}" if prevents else "")
    assert rows["other"].unavailable == ""


def test_an_environment_without_gpus_leaves_the_cpu(monkeypatch):
    for chosen in ("", "-1", "NoDevFiles"):
        named_by_environment(monkeypatch, chosen)
        assert parse(one={"strategy": "single"}).rows["one"].hardware.device == "cpu"


def named_by_environment(monkeypatch, chosen: str) -> None:
    """A machine with three GPUs and this value of CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(machine, "built_for_gpus", lambda: True)
    answers = {
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetUUID": ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"].__getitem__,
    }
    answers |= {"nvmlDeviceGetHandleByIndex": lambda number: number}
    monkeypatch.setattr(nvml, "library", lambda: SimpleNamespace(**answers))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)


def test_gpus_of_amd_are_chosen_among_those_that_its_own_variable_leaves(monkeypatch):
    monkeypatch.setattr(machine, "built_for_amd", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,3")
    assert machine.gpu_numbers() == [1, 3]
    assert machine.selection([3])["HIP_VISIBLE_DEVICES"] == "3"


def test_gpus_of_amd_are_counted_where_the_kernel_tells_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "built_for_gpus", lambda: True)
    monkeypatch.setattr(machine, "built_for_amd", lambda: True)
    monkeypatch.setattr(machine, "KFD", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert machine.visible_gpus() == 0
    for number, units in enumerate((0, 0, 304, 304, 304)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(f"cpu_cores_count 9\nsimd_count {units}\nsimd_per_cu 4\n")
    assert machine.visible_gpus() == 3
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,2")
    assert machine.visible_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.visible_gpus() == 1
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert machine.visible_gpus() == 0
