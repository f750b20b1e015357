"""Rows with another launcher or a framework's configuration file are proven to train the same model, or refused."""

import json
import shutil

import pytest

from lockstep import provenance
from lockstep.model import models
from tests.conftest import HOROVOD, copy_project

SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, global_batch: 31, max_steps: 3, eval_every: 3, warmup: 2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  launch: {strategy: ddp, launcher: launch}
  fsdp_launch: {strategy: fsdp, launcher: launch}
  accelerate_launch: {strategy: accelerate, launcher: launch}
  checkpointing: {strategy: trainer, arguments: {gradient_checkpointing: true}}
  own_file: {strategy: accelerate, config_file: own.yaml}
  own_json: {strategy: accelerate, config_file: own.json, precision: bf16}
  own_ds: {strategy: deepspeed, launcher: torchrun, stage: 2, config_file: ds.json}
  horovod_mpi: {strategy: horovod, controller: mpi}
"""
# DeepSpeed then creates the optimizer itself; torch_adam avoids compiling its own.
DEEPSPEED = {
    "train_batch_size": 31,  # the row's, in a trial too
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 20_000},
}
# A file of `accelerate config` for two GPUs, with a setting that only costs time.
OWN = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_GPU
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")
MPI = bool(HOROVOD and shutil.which("mpirun") and provenance.horovod_has("mpi"))
needs_mpi = pytest.mark.skipif(not MPI, reason="Horovod is not installed with MPI here: the images have it")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with prepared data, and files for accelerate launch."""
    copy = copy_project(tmp_path_factory.mktemp("started"))
    copy.path("small.yaml").write_text(SMALL, encoding="utf-8")
    copy.path("own.yaml").write_text(OWN + "mixed_precision: 'no'\n", encoding="utf-8")
    own = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
    copy.path("own.json").write_text(json.dumps(own | {"mixed_precision": "bf16"}), encoding="utf-8")
    copy.path("ds.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    copy.prepare(*CONFIGS)
    return copy


@pytest.fixture(scope="module")
def references(place):
    finished = place.script("parity", *CONFIGS, "--row=reference")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("references")
@pytest.mark.parametrize(
    ("row", "command"),
    [
        ("launch", "-m torch.distributed.launch"),
        ("fsdp_launch", "-m torch.distributed.launch"),
        ("accelerate_launch", "-m torch.distributed.launch"),
        ("checkpointing", "-m torch.distributed.run"),
        ("own_file", "/own_file/n2/rep1/accelerate.yaml --num_processes 2"),
        ("own_json", "/own_json/n2/rep1/accelerate.json --num_processes 2"),
        ("own_ds", "-m torch.distributed.run"),
        pytest.param("horovod_mpi", "--mpi", marks=needs_mpi),
    ],
)
def test_a_row_that_is_started_otherwise_is_proven(place, row, command):
    finished = place.script("parity", *CONFIGS, "--row", row)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    folder = place.path(f"results/parity/{row}/n2/rep1")
    verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["proof"] == ("within-tolerance" if row == "own_json" else "equal"), verdict
    made = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    assert command in " ".join(made["command"])
    assert made["settings"]["world_size"] == 2
    if row == "horovod_mpi":
        assert made["settings"]["options"]["controller"] == made["settings"]["backend"] == "mpi"
    if row == "checkpointing":
        assert made["settings"]["options"]["arguments"] == {"gradient_checkpointing": True}
    if row == "own_ds":
        assert made["settings"]["options"]["reduce_bucket_size"] == 20_000
        assert json.loads((folder / "deepspeed.json").read_text())["optimizer"]["params"]["lr"] == 5e-4
    if row == "own_file":
        assert "debug: true" in (folder / "accelerate.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("row", ["deepspeed", "fsdp"])
def test_the_checkpoint_of_a_framework_is_read_as_anybodys(place, row):
    """Its files are enough, without the run's folder, and they have the live weights."""
    finished = place.script("launch", *CONFIGS, "--row", row)
    assert finished.returncode == 0, finished.stderr
    native = place.path(f"results/runs/{row}/n2/rep1/native")
    made = place.path(f"results/made-of-{row}")
    asked = ("--model", "results/data/weights", "--weights", str(native), "--output", str(made))
    finished = place.script("convert", *asked)
    assert finished.returncode == 0, finished.stderr
    live = json.loads((native / "manifest.json").read_text(encoding="utf-8"))["weights"]
    assert models.hash_weights(models.load(made).state_dict()) == live


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        # The file does not set it, which means fp32.
        ({"mixed_precision": None}, "mixed_precision: the row needs bf16, but Accelerate has no, set by"),
        (
            {"dynamo_config": {"dynamo_backend": "EAGER"}},
            "dynamo_backend: the row needs NO, but Accelerate has EAGER, set by",
        ),
    ],
)
def test_what_accelerate_makes_of_a_file_is_held_against_the_row(place, said, reason):
    file = place.path("own.json")
    before = file.read_text(encoding="utf-8")
    changed = {key: value for key, value in (json.loads(before) | said).items() if value is not None}
    try:
        file.write_text(json.dumps(changed), encoding="utf-8")
        finished = place.script("launch", *CONFIGS, "--row", "own_json")
    finally:
        file.write_text(before, encoding="utf-8")
    assert finished.returncode == 1, finished.stderr
    assert reason in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "left"),
    [
        ("own_file", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("deepspeed", {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}),
        ("fabric", {"LT_PRECISION": "bf16-mixed", "TORCHELASTIC_USE_AGENT_STORE": "True"}),
    ],
)
def test_a_row_trains_under_what_another_launcher_left(place, row, left):
    finished = place.script("launch", *CONFIGS, "--row", row, **left)
    assert finished.returncode == 0, finished.stderr
