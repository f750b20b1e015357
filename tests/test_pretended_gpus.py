"""What Lockstep does on GPUs, tried on pretended ones (workflow/pretended): launch to report, and mistakes.

All of it is slow, as C++ is compiled and whole runs are made. CI trains a row of each kind and makes each kind of
mistake; the other rows, the proofs and the whole pipeline are for `make test-slow`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from lockstep.config import machine, reading
from lockstep.forecast import memory
from lockstep.forecast.model import Model
from tests import pretended
from tests.conftest import HOROVOD, copy_project

pytestmark = pytest.mark.slow
in_ci = pytest.mark.ci

ROWS = ("single", "dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed", "accelerate", "trainer")
ROWS += ("fabric", "fsdp")
ALONE = ("single", "dataparallel")  # one process
IN_CI = ("dataparallel", "ddp_amp")  # of each way to start, and in fp16
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, global_batch: 31, max_steps: 9, eval_every: 4, warmup: 2, log_every: 3, checkpoint_every: 6}
hardware: {timeout: 400, oversubscribe: true}
predict: {count: 2}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  all_threads: null
"""
# What only GPUs have, or what differs there; each is held against single by the proof, but for those that are lossy.
OPTIONS = """
rows:
  resident: {strategy: recipe, resident: true}
  tf32: {strategy: recipe, tf32: true}
  weights: {strategy: recipe, precision: bf16, weights: bf16}
  varlen: {strategy: recipe, packed: true, precision: bf16}
  graphs: {strategy: recipe, compile: static}
  fp16: {strategy: ddp, precision: fp16}
  sync_batchnorm: {strategy: ddp, sync_batchnorm: true}
  offload: {strategy: deepspeed, offload_optimizer: true}
  deepspeed_fp16: {strategy: deepspeed, precision: fp16}
  deepspeed_fp16_stage_0: {strategy: deepspeed, precision: fp16, stage: 0}
  deepspeed_fp16_stage_2: {strategy: deepspeed, precision: fp16, stage: 2}
  deepspeed_native_fp16: {strategy: deepspeed, precision: fp16, native_precision: true}
  fsdp_bf16: {strategy: fsdp, precision: bf16}
  bf16_hook: {strategy: ddp, hook: bf16}
  accelerate_fp16: {strategy: accelerate, precision: fp16}
  fabric_fp16: {strategy: fabric, precision: fp16}
  trainer_fp16: {strategy: trainer, precision: fp16}
"""
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")
# Each is a strategy file with one mistake that a CPU forgives, and what is said of it.
MISTAKES = {
    "takes_the_first_gpu": (
        """
import torch
from lockstep.strategies import _group, ddp
_group.take_device = lambda hardware, local_rank: torch.device("cuda", 0)
class Strategy(ddp.Strategy):
    pass
""",
        "Duplicate GPU detected",
    ),
    "forgets_set_device": (
        """
import torch
from lockstep.strategies import _group, ddp
_group.take_device = lambda hardware, local_rank: torch.device("cuda", local_rank)
class Strategy(ddp.Strategy):
    pass
""",
        "the current device is cuda:0",
    ),
    "sums_on_the_first_gpu": (
        """
import torch
import torch.distributed as dist
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def step(self):
        dist.all_reduce(torch.ones(1, device="cuda:0"))
        super().step()
""",
        "Duplicate GPU detected",
    ),
    "gathers_on_the_first_gpu": (  # what has no device goes by the current one
        """
import torch
import torch.distributed as dist
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def step(self):
        with torch.cuda.device(0):
            dist.all_gather_object([None] * self.world.size, 1)
        super().step()
""",
        "Duplicate GPU detected",
    ),
    "waits_on_the_first_gpu": (
        """
import torch.distributed as dist
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def step(self):
        dist.barrier(device_ids=[0])
        super().step()
""",
        "Duplicate GPU detected",
    ),
    "batch_on_the_cpu": (
        """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def to_device(self, arrays):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
""",
        "Expected all tensors to be on the same device",
    ),
    "labels_on_the_first_gpu": (
        """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def batch(self, tokens, ids, width):
        tensors = super().batch(tokens, ids, width)
        return tensors | {"labels": tensors["labels"].to("cuda:0")}
""",
        "Expected all tensors to be on the same device",
    ),
    "counts_devices_as_processes": (
        """
from lockstep.strategies import dataparallel
class Strategy(dataparallel.Strategy):
    def __init__(self, settings):
        super().__init__(settings)
        self.processes = self.hardware.devices
ONE_PROCESS_ON = ("cpu", "cuda")
""",
        "world_size: the row asks for 2, but counts_devices_as_processes uses 1",
    ),
}
MISTAKES_NOT_IN_CI = ("gathers_on_the_first_gpu", "waits_on_the_first_gpu")  # which are much like one that is
# Each is refused with these words, as real GPUs refuse it; and what is honest and much like it is not.
REFUSED = {
    "time_of_untimed_events": (
        """
start, end, untimed = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
start.record(), end.record(), untimed.record()
assert start.elapsed_time(end) >= 0
start.elapsed_time(untimed)
""",
        "ValueError: Both events must be created with argument 'enable_timing=True'.",
    ),
    "time_of_an_event_that_never_was": (
        """
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
start.elapsed_time(end)
""",
        "ValueError: Both events must be recorded before calculating elapsed time.",
    ),
    "pinned_memory_of_a_gpu": (
        """
torch.ones(1).pin_memory().cuda().pin_memory()
""",
        "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    "more_memory_than_there_is": (
        """
for _ in range(3):
    torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")  # each goes before the next one is there
kept = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda:1")
try:
    kept.new_empty(20 * 2**30)
except torch.OutOfMemoryError:
    assert torch.cuda.memory_allocated() == 5 * 2**30
kept.new_empty(5 * 2**30)
""",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
        " of which 3.00 GiB is free.",
    ),
    "use_after_a_fork": (
        """
def use():
    torch.empty(1, device="cuda")
fork = torch.multiprocessing.get_context("fork")
first = fork.Process(target=use)  # nobody has used a GPU yet
first.start(), first.join()
assert first.exitcode == 0
use()
second = fork.Process(target=use)
second.start(), second.join()
assert second.exitcode == 1
""",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use"
        " the 'spawn' start method",
    ),
    "a_gpu_that_it_does_not_see": (
        """
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
torch.empty(1, device="cuda:0")
torch.empty(1, device="cuda:1")
""",
        "CUDA error: invalid device ordinal",
    ),
}
# Each rank reads its state back onto the GPU that rank 0 had saved it from.
ONTO_THE_FIRST_GPU = """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def load_state(self, folder):
        state = torch.load(self.state_file(folder), map_location="cuda:0", weights_only=True)
        self.trained_module().load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
"""


@pytest.fixture(scope="session")
def libraries():
    if machine.built_for_gpus():
        pytest.skip("PyTorch is built for real GPUs here, but only its CPU build takes pretended ones")
    return pretended.libraries()


class Machine:
    """A copy of the project on a machine that pretends to have so many GPUs."""

    def __init__(self, tmp_path_factory, libraries, gpus: int):
        self.place = copy_project(tmp_path_factory.mktemp(f"gpus{gpus}"))
        self.place.path("small.yaml").write_text(SMALL, encoding="utf-8")
        self.place.path("options.yaml").write_text(OPTIONS, encoding="utf-8")
        self.variables = pretended.machine(self.place, gpus, libraries)
        for script in ("prepare", "plan"):
            assert self.script(script).returncode == 0

    def script(self, name: str, *arguments: str, **more: str):
        return self.place.script(name, *CONFIGS, *arguments, **self.variables | more)

    def add(self, row: str, code: str) -> None:
        """A row of a strategy of its own, whose file has this code, in a configuration of its own."""
        file = self.place.path(f"workflow/scripts/lockstep/strategies/{row}.py")
        file.write_text(f'"""{row}: a mistake."""\n{code}', encoding="utf-8")
        self.place.path(f"{row}.yaml").write_text(f"rows:\n  {row}: {{strategy: {row}}}\n", encoding="utf-8")

    def launch(self, row: str, code: str = "", *arguments: str):
        """Train one row; if `code` is given, of a strategy file that has it."""
        if row == "horovod" and not HOROVOD:
            pytest.skip("Horovod is not installed: `make horovod` builds it")
        if code:
            self.add(row, code)
            arguments = (*arguments, f"--config={row}.yaml")
        return self.script("launch", *arguments, "--row", row)

    def read(self, pattern: str) -> dict:
        (file,) = self.place.path("results").glob(pattern)
        return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two(tmp_path_factory, libraries):
    return Machine(tmp_path_factory, libraries, 2)


@pytest.mark.parametrize("row", [pytest.param(row, marks=[in_ci] if row in IN_CI else []) for row in ROWS])
def test_each_rank_has_a_gpu_of_its_own(two, row):
    finished = two.launch(row)
    assert finished.returncode == 0, finished.stderr
    made = two.read(f"runs/{row}/n*/rep1/record.json")
    for used_by_gpu in (
        made["memory_by_gpu"],
        made["reserved_by_gpu"],
    ):  # a row sees no GPU but those that it trains on
        assert len(used_by_gpu) == made["world_size"]
        assert all(used > 0 for used in used_by_gpu)
    watched = [(gpu["gpu"], gpu["utilisation"], gpu["sm_mhz"]) for gpu in made["watch"]["gpus"]]
    assert watched == [(0, pytest.approx(50), 1000), (1, pytest.approx(51), 1000)][: made["world_size"]]
    assert not [note for note in made["notes"] if "not its own" in note]
    assert [int(step) for step in re.findall(r"step (\d)/9: loss", finished.stdout)] == [3, 6, 9]
    assert made["saved"]["count"] == 2
    ranks = [two.read(f"runs/{row}/n*/rep1/ranks/{rank}.json") for rank in range(made["settings"]["world_size"])]
    if row in ALONE:
        assert (len(ranks), made["settings"]["device"]) == (1, "cuda")
    else:
        assert [[used > 0 for used in rank["memory_by_gpu"]] for rank in ranks] == [[True, False], [False, True]]
        assert made["settings"]["backend"] == ("gloo" if row == "horovod" else "nccl")
    if row == "horovod":  # which was built without NCCL, as there was no GPU
        assert "Horovod is built without NCCL here" in made["notes"][0]
    if row == "ddp_amp":  # which is fp16 where there are GPUs
        assert (made["precision"], made["settings"]["loss_scaling"]) == ("fp16", True)
        assert made["settings"]["computes_in"] == "float16"
    if row == "ddp":  # what NVML tells of both, and that such a GPU does not tell its energy
        details = two.read("runs/ddp/n2/rep1/env.json")["gpu_details"]
        assert [(gpu["driver"], gpu["ecc"], gpu["topology"]) for gpu in details] == [
            ("0.0 (pretended)", None, [0, 0])
        ] * 2
        assert (made["watch"]["gpu_mhz"], made["watch"]["gpu_celsius"]) == ([1000, 1000], [40, 40])
        assert made["energy"]["gpu_joules"] is None
    if row == "single":
        again = two.launch("single", "", "--repeat=2", "--set=hardware.device=cpu")
        assert again.returncode == 0, again.stderr
        on_cpu = two.read("runs/single/n1/rep2/record.json")
        assert on_cpu["settings"]["device"] == "cpu"
        assert on_cpu["losses"] == pytest.approx(made["losses"], abs=1e-5)


FORETOLD = ("ddp", "ddp_amp", "deepspeed", "fsdp", "trainer", "bf16_hook", "deepspeed_fp16_stage_2", "weights")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[in_ci] if row in IN_CI else []) for row in FORETOLD])
def test_the_memory_that_a_rank_took_is_what_fits_counts_without_its_gpu(two, row):
    """By the formula of attention and without cuBLAS, as the pretended GPUs compute."""
    padded = ["train.attention=math", "train.batching=padded"]
    changed = ["--config=options.yaml", *(f"--set={key}" for key in padded)]
    assert two.script("plan", *changed).returncode == 0
    finished = two.launch(row, "", *changed, "--repeat=4")
    assert finished.returncode == 0, finished.stderr
    took = two.read(f"runs/{row}/n*/rep4/ranks/0.json")["memory"]["peak_mb"]
    plan = two.place.path(two.read(f"runs/{row}/n*/rep4/settings.json")["plan_file"])
    length = int(np.load(plan)["widths"].max())
    files = [two.place.path(name) for name in ("config/config.yaml", "small.yaml", "options.yaml")]
    here = ["hardware.device=cuda", "hardware.node_gpus=2", "hardware.node_cores=4"]
    asked = reading.read(files, [*here, *padded]).rows[row]
    shape = json.loads(two.place.path("results/data/weights/config.json").read_text(encoding="utf-8"))
    # Of 31 samples the first of two ranks has 16, and the only one all.
    (counted,) = memory.peaks(asked, Model(shape, length, dropout=0), [16 if asked.replicas > 1 else 31], workspace=0)
    assert counted.allocated / 2**20 == pytest.approx(took, rel=0.02)


# What the published rows did on two GPUs, in fp16, which a CPU shows in bf16 only, or on one device.
PUBLISHED = """
rows:
  published_trainer: {strategy: published_trainer, batching: padded}
  published_ddp_amp: {strategy: published_ddp_amp, batching: padded}
  published_deepspeed: {strategy: published_deepspeed, batching: padded}
  published_dataparallel: {strategy: published_dataparallel, batching: padded}
"""


@pytest.mark.parametrize(
    ("row", "processes"),
    [
        ("published_trainer", 1),
        ("published_dataparallel", 1),
        ("published_ddp_amp", 2),
        ("published_deepspeed", 2),
    ],
)
def test_the_published_rows_train_on_two_gpus_as_they_did(two, row, processes):
    two.place.path("published.yaml").write_text(PUBLISHED, encoding="utf-8")
    planned = two.script("plan", "--config=published.yaml")
    assert planned.returncode == 0, planned.stderr
    finished = two.launch(row, "", "--config=published.yaml")
    assert finished.returncode == 0, finished.stderr
    made = two.read(f"runs/{row}/n2/rep1/record.json")
    assert (made["world_size"], made["settings"]["world_size"]) == (2, processes)
    assert all(used > 0 for used in made["memory_by_gpu"])
    assert made["precision"] == ("fp32" if row == "published_dataparallel" else "fp16")


def made_longer(two, row: str, code: str = "") -> dict:
    """The record of a run of 12 steps that went on from the state after 9, which another had saved."""
    for steps in (9, 12):
        asked = (
            "--repeat=3",
            "--set=train.schedule=constant",
            "--set=train.warmup=0",
            f"--set=train.max_steps={steps}",
        )
        assert two.script("plan", *asked[1:]).returncode == 0
        finished = two.launch(row, code, *asked)
        assert finished.returncode == 0, finished.stderr
    made = two.read(f"runs/{row}/n2/rep3/record.json")
    assert made["resumed"] == [9]
    return made


@pytest.mark.parametrize("row", ["ddp", "ddp_amp", "fsdp", "deepspeed", "horovod"])
def test_a_rank_that_goes_on_from_a_state_keeps_to_its_own_gpu(two, row):
    """States are read to the CPU first: what was saved on GPU 0 does not come back there on every rank."""
    assert not [note for note in made_longer(two, row)["notes"] if "not its own" in note]
    ranks = [two.read(f"runs/{row}/n2/rep3/ranks/{rank}.json") for rank in (0, 1)]
    assert [[used > 0 for used in rank["memory_by_gpu"]] for rank in ranks] == [[True, False], [False, True]]


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in MISTAKES_NOT_IN_CI else [in_ci]) for name in MISTAKES]
)
def test_a_mistake_that_a_cpu_forgives_is_named(two, mistake):
    code, said = MISTAKES[mistake]
    finished = two.launch(mistake, code)
    assert finished.returncode == 1
    assert said in finished.stderr


@in_ci
@pytest.mark.parametrize("asked", REFUSED)
def test_pretended_gpus_refuse_what_real_ones_do(two, asked):
    code, said = REFUSED[asked]
    finished = two.place.run("python", "-c", f"import os, torch\n{code}", **two.variables)
    assert (finished.returncode == 0) == (asked == "use_after_a_fork")  # where it is the child that fails
    assert said in finished.stderr


def test_a_run_that_wants_more_memory_than_its_gpu_has_says_so_and_leaves_nothing_behind(two):
    code = """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def step(self):
        torch.empty(20 * 2**30, dtype=torch.uint8, device=self.world.device)
        super().step()
"""
    finished = two.launch("wants_too_much", code)
    assert finished.returncode == 1
    said = re.findall(r"^.*CUDA out of memory\. Tried to allocate 20\.00 GiB.*$", finished.stderr, re.MULTILINE)
    assert len(said) == 1, finished.stderr
    script = str(two.place.path("workflow/scripts"))
    alive = [process.info for process in psutil.process_iter(["cmdline"])]
    assert not [each for each in alive if any(word.startswith(script) for word in each["cmdline"] or ())]
    folder = two.place.path("results/runs/wants_too_much/n2/rep1")
    assert not (folder / "record.json").exists()
    assert not list(folder.rglob("*.safetensors"))


@in_ci
def test_a_rank_that_reads_its_state_onto_another_one_s_gpu_is_named(two):
    """It trains what it should, and takes memory that it should not: the record and the report say so."""
    made = made_longer(two, "onto_the_first_gpu", ONTO_THE_FIRST_GPU)
    (note,) = (note for note in made["notes"] if "not its own" in note)
    assert note.startswith("rank 1 had ")
    assert "MiB on GPU 0, which is not its own" in note


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "card.py",
            [
                *(f"rank {rank} sees 2 GPUs" for rank in (0, 1)),
                *(f"rank {rank}, nothing chosen: cuda:0" for rank in (0, 1)),
                *(f"rank {rank}, by name: cuda:{rank}" for rank in (0, 1)),
                *(f"rank {rank}, set_device: cuda:{rank}" for rank in (0, 1)),
            ],
        ),
        pytest.param(  # DistributedDataParallel over gloo, which looks into the group
            "devices.py",
            [f"rank {rank}: on cuda:0 and cuda:1, the same gradients on both: True" for rank in (0, 1)],
            marks=in_ci,
        ),
    ],
)
def test_the_guide_says_what_its_programs_do_on_gpus(two, program, said):
    started = two.place.run(
        *("torchrun", "--standalone", "--nproc-per-node", "2", f"docs/guide/snippets/{program}"),
        **two.variables,
    )
    assert started.returncode == 0, started.stderr
    # torchrun's ranks write a line and its end apart, so that lines of two ranks may run together.
    told = re.split(r"(?=rank \d)", started.stdout.replace("\n", ""))
    assert sorted(filter(None, told)) == sorted(said)


def test_the_guide_says_in_which_type_dataparallel_computes(two):
    started = two.place.run("python", "docs/guide/snippets/autocast.py", **two.variables)
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines() == [
        "around DataParallel: float16 and float16",  # it was asked for bfloat16
        "around a thread of one's own: float32",
        "within the model's forward: bfloat16 and bfloat16",
    ]


def test_dataparallel_gathers_where_it_is_told(two):
    """The loss is computed there, and the model is the same; the proof says so, on as many GPUs."""
    row = "--set=rows.gathered={strategy: dataparallel, output_device: 1}"
    finished = two.launch("gathered", "", row)
    assert finished.returncode == 0, finished.stderr
    assert two.launch("dataparallel").returncode == 0
    made, usual = (two.read(f"runs/{name}/n2/rep1/record.json") for name in ("gathered", "dataparallel"))
    assert [each["settings"]["options"]["output_device"] for each in (made, usual)] == [1, 0]
    assert made["losses"] == usual["losses"]
    proven = two.script("parity", row, "--row=reference", "--row=gathered")
    assert proven.returncode == 0, proven.stdout + proven.stderr
    assert two.read("parity/gathered/n*/rep1/verdict.json")["proof"] == "equal"
    beyond = two.launch("gathered", "", row.replace("1}", "2}"))
    assert beyond.returncode == 2
    assert "output_device: 2: the row has 2 devices, numbered from 0" in beyond.stderr


@pytest.fixture
def other():
    """A process that no run has to do with, until the test ends."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def test_a_gpu_on_which_somebody_else_computes_is_named(two, other, tmp_path):
    listed, mps = tmp_path / "processes.json", tmp_path / "mps"
    listed.write_text(json.dumps([[1, other, 512]]), encoding="utf-8")
    mps.mkdir()
    (mps / "control").touch()
    told = f"process {other} ({psutil.Process(other).name()}) on GPU 1 with 512 MiB"
    beside = {"LOCKSTEP_PRETENDED_PROCESSES": str(listed), "CUDA_MPS_PIPE_DIRECTORY": str(mps)}
    for row, disturbed in (("ddp", True), ("single", False)):  # single trains on GPU 0
        finished = two.script("launch", "--row", row, "--repeat=4", **beside)
        assert finished.returncode == 0, finished.stderr
        made = two.read(f"runs/{row}/n*/rep4/record.json")
        others = [reason for reason in made["watch"]["disturbed"] if "on its GPUs" in reason]
        assert others == ([f"other processes were on its GPUs: {told}"] if disturbed else [])
        before = f"other processes were on its GPUs before it started: {told}"
        assert (before in made["notes"]) == (f"warning: {row}: {before}" in finished.stderr) == disturbed
        assert [note for note in made["notes"] if f"Multi-Process Service is on ({mps})" in note]
        assert two.read(f"runs/{row}/n*/rep4/env.json")["mps"] == str(mps)


@pytest.mark.parametrize("row", ["ddp", "dataparallel"])
def test_gpus_of_amd_train_as_cuda_and_tell_less(two, tmp_path, row):
    for number, units in enumerate((0, 304, 304)):  # a CPU is a node too
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
    finished = two.script("launch", "--row", row, "--repeat=6", LOCKSTEP_PRETENDED_AMD=str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    made = two.read(f"runs/{row}/n2/rep6/record.json")
    assert made["asked"]["hardware"]["device"] == "cuda"
    assert [note for note in made["notes"] if note.startswith("its GPUs are AMD's")]
    assert (made["watch"]["gpus"], made["energy"]["gpu_joules"]) == ([], None)
    machine = two.read(f"runs/{row}/n2/rep6/env.json")
    assert (machine["cuda"], machine["hip"], machine["gpu_details"], len(machine["gpus"])) == (None, "7.0", [], 2)
    chosen = {"LOCKSTEP_PRETENDED_AMD": str(tmp_path), "HIP_VISIBLE_DEVICES": "1"}
    keys = ("--set=hardware.processes=2", "--set=hardware.oversubscribe=false")
    refused = two.script("launch", "--row", row, *keys, **chosen)
    assert refused.returncode == 2
    assert "processes: 2, but there is 1 GPU here" in refused.stderr


# Once the launcher and both ranks are there: they are on the GPUs, and so is this process.
COMES_LATER = """
import json, os, sys, time
from pathlib import Path
import psutil
script, file = sys.argv[1], Path(sys.argv[2])
ranks = []
while len(ranks) < 3:
    time.sleep(0.05)
    there = [p.pid for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or ())]
    ranks = [pid for pid in there if pid != os.getpid()]
new = file.with_suffix(".new")
new.write_text(json.dumps([[gpu, pid, 100] for pid in (*ranks, os.getpid()) for gpu in (0, 1)]))
new.rename(file)
time.sleep(600)
"""


@in_ci
def test_somebody_else_who_comes_while_a_run_trains_disturbs_it_and_its_own_ranks_do_not(two, tmp_path):
    listed, script = tmp_path / "processes.json", two.place.path("workflow/scripts/train.py")
    later = [sys.executable, "-c", COMES_LATER, str(script), str(listed)]
    with subprocess.Popen(later) as other:
        finished = two.script("launch", "--row=ddp", "--repeat=5", LOCKSTEP_PRETENDED_PROCESSES=str(listed))
        other.kill()
    assert finished.returncode == 0, finished.stderr
    assert "other processes were on" not in finished.stderr
    made = two.read("runs/ddp/n2/rep5/record.json")
    (reason,) = (reason for reason in made["watch"]["disturbed"] if "on its GPUs" in reason)
    assert {int(pid) for pid in re.findall(r"process (\d+)", reason)} == {other.pid}
    assert len({pid for _, pid, _ in json.loads(listed.read_text(encoding="utf-8"))}) >= 4


@in_ci
def test_a_step_that_loss_scaling_skips_is_counted(two):
    """A scale that overflows in fp16 costs a step: it changes no weight, and is in the ledger as all are."""
    finished = two.launch("skips", SKIPS)
    assert finished.returncode == 0, finished.stderr
    made = two.read("runs/skips/n2/rep1/record.json")
    assert made["steps"] == len(made["losses"]) == 9
    assert 3 < skipped_in(made) < 9
    with np.load(two.place.path("results/runs/skips/n2/rep1/ledger.npz")) as ledger:
        assert len(ledger["step"]) == 9 * 31


# Its first loss scale overflows, and is halved in each step until it does not.
SKIPS = """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def wrap(self):
        super().wrap()
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**23)
        self.skipped = 0
    def step(self):
        before = next(self.model.parameters()).detach().clone()
        super().step()
        self.skipped += bool(torch.equal(before, next(self.model.parameters())))
        self.notes[:] = [f"{self.skipped} steps skipped"]
OPTIONS = {"precision": {"enum": ["fp16"], "default": "fp16"}}
"""


def skipped_in(record: dict) -> int:
    return int(record["notes"][0].split()[0])


@pytest.mark.parametrize(
    ("row", "asked", "visible"), [("deepspeed", None, "2,3"), pytest.param("ddp", [3, 2], None, marks=in_ci)]
)
def test_the_gpus_that_are_asked_for_are_those_that_train(two, row, asked, visible):
    """DeepSpeed's launcher, told how many, takes the machine's first, whatever CUDA_VISIBLE_DEVICES says."""
    more = {"LOCKSTEP_PRETENDED_GPUS": "4"} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    keys = [f"--set=hardware.gpus={asked}"] if asked else []
    arguments = (*CONFIGS, *keys, "--row", row, "--repeat", "3")
    finished = two.place.script("launch", *arguments, **two.variables | more)
    assert finished.returncode == 0, finished.stderr
    machine = two.read(f"runs/{row}/n2/rep3/env.json")
    assert machine["gpus"] == ["Pretended GPU 2", "Pretended GPU 3"]
    watched = two.read(f"runs/{row}/n2/rep3/record.json")["watch"]["gpus"]
    assert [gpu["gpu"] for gpu in watched] == [2, 3]


@pytest.mark.parametrize(
    ("row", "chosen", "names", "numbers"),
    [("ddp", "1,2", ["Fast GPU", "Fast GPU"], [1, 2]), pytest.param("single", "0", ["Slow GPU"], [0], marks=in_ci)],
)
def test_gpus_of_unlike_kinds_keep_the_numbers_of_nvidia_smi(two, row, chosen, names, numbers):
    """CUDA by itself counts the fastest first: it would train on others than those that are named and watched."""
    unlike = {"LOCKSTEP_PRETENDED_GPUS": "3", "LOCKSTEP_PRETENDED_KINDS": "Slow GPU,Fast GPU,Fast GPU"}
    finished = two.script("launch", "--row", row, "--repeat=7", CUDA_VISIBLE_DEVICES=chosen, **unlike)
    assert finished.returncode == 0, finished.stderr
    assert two.read(f"runs/{row}/n*/rep7/env.json")["gpus"] == names
    watched = two.read(f"runs/{row}/n*/rep7/record.json")["watch"]["gpus"]
    assert [gpu["gpu"] for gpu in watched] == numbers


IMAGES = """
model: {name: basicnet_bn}
train: {epochs: 2, max_steps: 9, eval_every: 0, checkpoint: last}
hardware: {timeout: 400, oversubscribe: true}
rows:
  tells: {strategy: tells, sync_batchnorm: true}
  horovod_sync: {strategy: horovod, sync_batchnorm: true}
"""
TELLS = """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def wrap(self):
        super().wrap()
        self.notes.append(" ".join(type(module).__name__ for module in self.module.modules()))
"""


def test_batch_normalisation_over_gpus_is_proven(two):
    """By PyTorch's SyncBatchNorm, for Horovod by Lockstep's own; without either ranks normalise their shares apart."""
    two.place.path("workflow/scripts/lockstep/strategies/tells.py").write_text(TELLS, encoding="utf-8")
    two.place.path("images.yaml").write_text(IMAGES, encoding="utf-8")
    configs = [f"--config={file}" for file in ("config/config.yaml", "config/digits.yaml", "images.yaml")]
    rows = ["tells", "ddp", *(["horovod_sync"] if HOROVOD else [])]
    asked = [f"--row={row}" for row in ("reference", *rows)]
    for script, more in (("prepare", []), ("plan", []), ("parity", asked)):
        finished = two.place.script(script, *configs, "--results=images", *more, timeout=600, **two.variables)
        assert finished.returncode == 0, finished.stdout + finished.stderr

    def read(row: str, name: str) -> dict:
        file = two.place.path(f"images/parity/{row}/n2/rep1/{name}.json")
        return json.loads(file.read_text(encoding="utf-8"))

    proofs = {row: read(row, "verdict")["proof"] for row in rows}
    assert proofs == dict.fromkeys(rows, "equal") | {"ddp": "unequal"}
    assert "SyncBatchNorm" in " ".join(read("tells", "record")["notes"])


COUNTED = """
import os
import sys
from pathlib import Path
import pytest
import torch
from lockstep.config import reading
from lockstep.config.machine import free_port
from lockstep.rank import session
from lockstep.run.training_log import Notes
from tests.rank.test_window import Counting, about_to_train
Path("counted/ranks").mkdir(parents=True, exist_ok=True)
Notes(Path("counted"), rows=20)
row = reading.read([Path("config/config.yaml"), Path("small.yaml"), Path("counted.yaml")]).rows[sys.argv[1]]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("auto"))}
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
patch = pytest.MonkeyPatch()
with about_to_train(row, Path("results/data"), Path("counted")) as training:
    step = training.strategy.step
    mistakes = {
        "reads": lambda weights: weights.sum().cpu(),
        "sends": lambda weights: torch.ones(3).to(weights.device),
        "masks": lambda weights: weights[weights > 0],
        "tells": lambda weights: bool(weights.isnan().any()),
    }
    def careless():
        step()
        mistakes[sys.argv[2]](next(training.strategy.module.parameters()))
    if len(sys.argv) > 2:
        training.strategy.step = careless
    with Counting(training.clock, patch) as counting:
        session.Run(training).train()
    assert training.strategy.world.device.type == "cuda"
joined = training.strategy.world.backend is not None  # a group, whose collectives are no waiting
waits = [name for name in counting.noted if not (joined and name.startswith("c10d::"))]
print("counted", counting.steps, *(f"{name} x{waits.count(name)}" for name in sorted({*waits})), flush=True)
"""


# One rank of each, since a mode that counts sees one process. Not counted: deepspeed, whose own loss scale reads each
# step's overflow on the host.
COUNTED_ROWS = {
    "half": {"strategy": "single", "precision": "fp16"},
    "resident": {"strategy": "recipe", "resident": True},
    "packed": {"strategy": "recipe", "packed": True, "precision": "bf16"},
    "weights": {"strategy": "recipe", "precision": "bf16", "weights": "bf16"},
    "weighted": {"strategy": "single", "class_weights": "balanced"},
    "accelerate_half": {"strategy": "accelerate", "precision": "fp16"},
    "fabric_half": {"strategy": "fabric", "precision": "fp16"},
}
BY_DDP = "aten::copy_ to the host x2"  # once, as ranks agree in which order to send gradients
WRAPPED = ("ddp", "fabric", "fabric_half")  # by DDP, with one rank too
WAITS = {
    "reads": "aten::_to_copy to the host x9",
    "sends": "aten::_to_copy to the GPU x9",
    "masks": "aten::index x9",
    "tells": "aten::_local_scalar_dense x9",
}


def waits_counted(two, row: str, *mistake: str) -> str:
    """What waited for a GPU in the window of a row, and how often."""
    rows = {name: settings | {"processes": 1} for name, settings in COUNTED_ROWS.items()}
    rows |= {name: {"strategy": name, "processes": 1} for name in ("ddp", "accelerate", "trainer", "fabric", "fsdp")}
    two.place.path("counted.yaml").write_text(yaml.safe_dump({"rows": rows}), encoding="utf-8")
    path = os.pathsep.join([two.variables["PYTHONPATH"], str(two.place.folder)])
    finished = two.place.run("python", "-c", COUNTED, row, *mistake, **two.variables | {"PYTHONPATH": path})
    assert finished.returncode == 0, finished.stderr
    (counted,) = [line for line in finished.stdout.splitlines() if line.startswith("counted")]
    assert counted.startswith("counted 9")
    return counted.removeprefix("counted 9").strip()


@pytest.mark.parametrize(
    "row",
    ["single", *COUNTED_ROWS, "ddp", "accelerate", "trainer", pytest.param("fabric", marks=in_ci), "fsdp"],
)
def test_nothing_in_the_window_waits_for_a_gpu(two, row):
    """Nor does the clip, nor the loss scale in fp16."""
    assert waits_counted(two, row) == (BY_DDP if row in WRAPPED else "")


@pytest.mark.parametrize("mistake", WAITS)
def test_what_waits_for_a_gpu_is_seen(two, mistake):
    assert waits_counted(two, "single", mistake) == WAITS[mistake]


@in_ci
def test_make_bench_takes_the_benchmark_for_gpus(two):
    make = ("make", "--assume-old=setup", "bench", f"BIN={Path(sys.executable).parent}", "CORES=1")
    plain = two.place.run(*make, "ARGS=-n", **two.variables)
    assert plain.returncode == 0, plain.stderr
    assert "so config/gpu.yaml is used" in plain.stdout + plain.stderr
    assert "plan bucketed-b256-e12-s42" in plain.stdout + plain.stderr
    named = two.place.run(*make, "ARGS=-n --configfile small.yaml", **two.variables)
    assert named.returncode == 0, named.stderr
    assert "gpu.yaml" not in named.stdout
    without = two.place.run(*make, "ARGS=-n --configfile small.yaml")  # no GPU
    assert "gpu.yaml" not in without.stdout


def test_a_model_that_no_gpu_holds_beside_its_shards_is_profiled_without_a_comparison(two):
    larger = ("--results=larger", "--set=model.hidden_size=256", "--set=model.layers=4", "--set=profile.steps=3")
    memory_of_a_gpu = {}
    for script, *of in (("prepare",), ("plan",), ("launch", "--row=fsdp"), ("launch", "--row=fsdp", "--profile")):
        finished = two.script(script, *larger, *of, **memory_of_a_gpu)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        if script == "launch" and not memory_of_a_gpu:  # as much as it trains in
            made = json.loads(next(two.place.path("larger/runs").glob("fsdp/n2/rep1/record.json")).read_text())
            memory_of_a_gpu = {"LOCKSTEP_PRETENDED_MEMORY": str(int(1.1 * max(made["reserved_by_gpu"]) * 2**20))}
    profile = json.loads(next(two.place.path("larger").glob("*/fsdp/n2/rep1/profile.json")).read_text())
    assert profile["step_seconds"] > 0
    assert profile["alone_step_seconds"] is profile["exposed_by_difference"] is None


@pytest.fixture(scope="module")
def references(two):
    """What the proof holds rows against, in every precision that OPTIONS has."""
    finished = two.script("parity", "--config=options.yaml", "--row=reference")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("row", yaml.safe_load(OPTIONS)["rows"])
def test_what_only_gpus_have_is_proven_there(two, row):
    shown = two.script("parity", "--config=options.yaml", "--row", row)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert two.read(f"parity/{row}/n2/rep1/verdict.json")["proof"] in ("equal", "within-tolerance")


@pytest.mark.usefixtures("references")
def test_a_row_whose_first_steps_overflow_is_proven(two):
    """As on GPUs many do in fp16, and how many steps they skip depends on the number of ranks."""
    two.add("skips", SKIPS)
    shown = two.script("parity", "--config=options.yaml", "--config=skips.yaml", "--row=skips")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert two.read("parity/skips/n2/rep1/verdict.json")["proof"] == "within-tolerance"


DECODER = ("--set=task=language-modelling", "--set=train.best=perplexity")


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ("{strategy: tp, sequence: true, vocabulary: true}", ()),
        ("{strategy: tp, sequence: true, vocabulary: true}", DECODER),
        ("{strategy: cp}", DECODER),
        ("{strategy: pp, global_batch: 30, accumulation: 3}", ()),
    ],
)
def test_ranks_that_hold_a_replica_together_are_proven_there(two, row, task):
    asked = (*task, "--set=model.layers=2", f"--set=rows.together={row}", "--set=rows.ddp_amp=null")
    asked += (f"--results=together-{len(task)}-{len(row)}",)
    for script, *of in (("prepare",), ("plan",), ("parity", "--row=reference"), ("parity", "--row=together")):
        finished = two.script(script, *asked, *of)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    (verdict,) = two.place.path(asked[-1].removeprefix("--results=")).glob("parity/together/n2/rep1/verdict.json")
    assert json.loads(verdict.read_text())["proof"] == "equal"


# Two ranks on one GPU, which NCCL refuses.
SHARED = """
hardware: {processes: 2}
rows:
  deepspeed: {strategy: deepspeed, launcher: torchrun}
"""


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory, libraries):
    machine = Machine(tmp_path_factory, libraries, 1)
    machine.place.path("shared.yaml").write_text(SHARED, encoding="utf-8")
    return machine


@pytest.fixture(scope="module")
def alone(one_gpu):
    """The record of `single`."""
    finished = one_gpu.launch("single", "", "--repeat=2")
    assert finished.returncode == 0, finished.stderr
    return one_gpu.read("runs/single/n1/rep2/record.json")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[in_ci] if row == "accelerate" else []) for row in ROWS[1:]])
def test_each_row_trains_on_a_machine_s_only_gpu(one_gpu, alone, row):
    """As `single` does. Some frameworks wrap nothing there, on a GPU, though they do on a CPU."""
    finished = one_gpu.launch(row, "", "--repeat=2")
    assert finished.returncode == 0, finished.stderr
    made = one_gpu.read(f"runs/{row}/n1/rep2/record.json")
    assert (made["world_size"], made["settings"]["device"]) == (1, "cuda:0" if row not in ALONE else "cuda")
    assert made["memory_by_gpu"][0] > 0
    assert made["losses"] == pytest.approx(alone["losses"], abs=1e-5 if made["precision"] == "fp32" else 0.05)


@pytest.mark.parametrize("row", ["ddp_spawn", "fabric"])
def test_ranks_share_a_gpu_through_gloo(one_gpu, row):
    finished = one_gpu.launch(row, "", "--config=shared.yaml")
    assert finished.returncode == 0, finished.stderr
    made = one_gpu.read(f"runs/{row}/n2/rep1/record.json")
    assert (made["world_size"], made["settings"]["world_size"]) == (2, 2)
    assert made["settings"]["backend"] == "gloo"
    assert not [note for note in made["notes"] if "not its own" in note]
    ranks = [one_gpu.read(f"runs/{row}/n2/rep1/ranks/{rank}.json") for rank in range(2)]
    assert [rank["settings"]["device"] for rank in ranks] == ["cuda:0", "cuda:0"]
    assert made["memory_by_gpu"] == [pytest.approx(sum(rank["memory_by_gpu"][0] for rank in ranks), abs=0.1)]


@pytest.fixture(scope="module")
def shared_references(one_gpu):
    finished = one_gpu.script("parity", "--config=shared.yaml", "--row=reference")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.usefixtures("shared_references")
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ALONE])
def test_ranks_that_share_a_gpu_are_proven(one_gpu, row):
    shown = one_gpu.script("parity", "--config=shared.yaml", "--row", row)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert one_gpu.read(f"parity/{row}/n2/rep1/settings.json")["hardware"]["gpu_count"] == 1


@pytest.mark.parametrize("row", ["ddp", "dataparallel"])
def test_three_gpus(tmp_path_factory, libraries, row):
    three = Machine(tmp_path_factory, libraries, 3)
    finished = three.launch(row)
    assert finished.returncode == 0, finished.stderr
    made = three.read(f"runs/{row}/n3/rep1/record.json")
    assert all(used > 0 for used in made["memory_by_gpu"])
    assert len(made["memory_by_gpu"]) == made["world_size"] == 3


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_every_row_and_option_goes_from_the_launch_to_the_report(tmp_path_factory, libraries, gpus):
    machine = Machine(tmp_path_factory, libraries, gpus)
    machine.add("skips", SKIPS)
    configured = ("--configfile", "small.yaml", "options.yaml", "skips.yaml", "--config", "profile={steps: 3}")
    finished = machine.place.run("snakemake", "--cores", "all", *configured, timeout=3600, **machine.variables)
    assert finished.returncode == 0, finished.stderr[-3000:]
    summary = machine.read("report/summary.json")
    rows = {row["row"]: row for row in summary["rows"]}
    for name in (*ROWS, *yaml.safe_load(OPTIONS)["rows"]):
        if name == "horovod" and not HOROVOD:
            continue
        row = rows[name]
        assert (row["status"], row["device"]) == ("ok", "cuda"), row
        exact = row["precision"] == "fp32" and name not in ("bf16_hook", "tf32")  # lossy
        assert row["proof"] == ("equal" if exact else "within-tolerance"), row
        assert row["world_size"] == (1 if name == "single" else gpus)
        assert row["utilisation_by_gpu"] == " / ".join(str(50 + gpu) for gpu in range(row["world_size"]))
    # Its trial begins with another loss scale, and skips no step.
    assert (rows["skips"]["status"], rows["skips"]["proof"]) == ("ok", "within-tolerance")
    assert 0 < skipped_in(machine.read("runs/skips/n*/rep1/record.json")) < 9
    assert not [line for line in summary["headline"] if "Partial" in line or "not all runs come from" in line]
    headline = " ".join(summary["headline"])
    assert f"{gpus} x Pretended GPU" in headline
    assert ("Horovod was built without NCCL" in headline) == HOROVOD
