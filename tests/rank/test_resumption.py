"""A run that is killed, and started again, ends as one that nothing stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from lockstep import paths
from lockstep.config import launchers, reading, registry
from lockstep.config.machine import free_port
from lockstep.config.settings import Settings
from lockstep.errors import BadInput, RunFailed
from lockstep.files import verify, write_json
from lockstep.model.optimizer import make_optimizer
from lockstep.rank import resumption
from lockstep.run import saved
from lockstep.run.addresses import Rendezvous
from tests.conftest import HOROVOD, PROJECT

SCRIPTS = PROJECT / "workflow" / "scripts"
# Dropout is on, so that random states matter; the plan's steps are 34.
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0.1}
train: {epochs: 2, global_batch: 31, eval_every: 7, checkpoint: last, checkpoint_every: 5}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  bf16_weights: {strategy: recipe, precision: bf16, weights: bf16}
  sharded_state: {strategy: zero_redundancy}
  apart: {strategy: local_sgd, every: 4}
  outer: {strategy: diloco, every: 4}
  zero_2: {strategy: deepspeed, stage: 2}
  zero_0: {strategy: deepspeed, stage: 0}
  lora_fsdp: {strategy: fsdp, lora: 4, lora_dropout: 0.1}
  lora_zero_2: {strategy: deepspeed, stage: 2, lora: 4, lora_dropout: 0.1}
  lora_zero_3: {strategy: deepspeed, lora: 4, lora_dropout: 0.1}
  lora_trainer: {strategy: trainer, lora: 4, lora_dropout: 0.1}
"""
LORA = ("lora_fsdp", "lora_zero_2", "lora_zero_3", "lora_trainer")
STEPS = 34
SIX_STEPS = ("--set", "train.max_steps=6")
NEED_HOROVOD = pytest.mark.skipif(not HOROVOD, reason="needs: make horovod")


def command(results: Path, script: str, *arguments: str) -> list[str]:
    configs = ["--config", str(PROJECT / "config" / "config.yaml"), "--config", str(results.parent / "small.yaml")]
    return [sys.executable, str(SCRIPTS / f"{script}.py"), *configs, "--results", str(results), *arguments]


def run(results: Path, script: str, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(command(results, script, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resumption")
    (folder / "small.yaml").write_text(CONFIG)
    for script in ("prepare", "plan"):
        run(folder / "prepared", script)
    return folder


def results_of(prepared: Path, name: str) -> Path:
    results = prepared / name
    shutil.rmtree(results, ignore_errors=True)
    shutil.copytree(prepared / "prepared", results)
    return results


def folder_of(results: Path, row: str) -> Path:
    (folder,) = results.glob(f"{paths.RUNS}/{row}/n*/rep1")
    return folder


def ended(results: Path, row: str) -> tuple[dict, str, dict]:
    """A run's record, the hash of its weights, and its ledger."""
    folder = folder_of(results, row)
    with np.load(folder / paths.LEDGER) as arrays:
        ledger = {name: arrays[name] for name in arrays.files}
    record, native = (json.loads(file.read_text()) for file in (folder / paths.RECORD, folder / "native/manifest.json"))
    return record, native["weights"], ledger


def begin(results: Path, row: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(results, "launch", "--row", row, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, results: Path, row: str, step: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        for file in results.glob(f"{paths.RUNS}/{row}/n*/rep1/{paths.PROGRESS}"):
            table = np.fromfile(file, dtype=np.int64)
            ranks = table.reshape(-1, 5) if len(table) else np.zeros((1, 5))
            if ranks[:, 2].min() >= step and psutil.pid_exists(int(ranks[0, 0])):
                return
        time.sleep(0.001)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0]}")


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for the whole job at once."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        if child.is_running():
            child.kill()
    process.communicate()


def whole_and_killed(prepared: Path, row: str, *arguments: str) -> tuple[Path, Path]:
    """The results of a run that nothing stopped, and of one that was killed after step 13."""
    whole, parted = results_of(prepared, f"whole-{row}"), results_of(prepared, f"parted-{row}")
    run(whole, "launch", "--row", row, *arguments)
    process = begin(parted, row, *arguments)
    wait_for_step(process, parted, row, 13)
    kill(process)
    return whole, parted


def same(ours: tuple, theirs: tuple) -> None:
    assert ours[1] == theirs[1]
    assert ours[0]["losses"] == theirs[0]["losses"]
    assert ours[0]["dev"] == theirs[0]["dev"]
    assert all(np.array_equal(ours[2][name], theirs[2][name]) for name in ours[2])


ROWS = (
    "single",
    "ddp",
    "ddp_spawn",
    "ddp_amp",
    "accelerate",
    "trainer",
    "fabric",
    "fsdp",
    "deepspeed",
    "sharded_state",
    "apart",
    "outer",
)


def in_ci(rows: tuple[str, ...], chosen: tuple[str, ...]) -> list:
    """Parameters of a slow test, of which CI takes `chosen`."""
    needs = {"horovod": [NEED_HOROVOD]}
    return [
        pytest.param(row, marks=[*([pytest.mark.ci] if row in chosen else []), *needs.get(row, [])]) for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci((*ROWS, *LORA, "bf16_weights", "horovod"), ("ddp",)))
def test_a_killed_run_carries_on_to_the_same_weights(row, prepared):
    whole, parted = whole_and_killed(prepared, row)
    assert "carries on from" in run(parted, "launch", "--row", row)
    same(ended(whole, row), ended(parted, row))
    record = ended(parted, row)[0]
    assert record["resumed"] in ([10], [15])
    assert record["watch"]["disturbed"][0].startswith("it was interrupted, and carried on after step 1")
    assert record["saved"]["count"] == STEPS // 5 + 1
    # Of a run that has ended, the state after its last step is left.
    assert [state.name for state in paths.saved_states(folder_of(parted, row))] == [f"step-{STEPS:08d}"]


@pytest.mark.slow
def test_a_damaged_state_is_named_and_the_one_before_is_used(prepared):
    whole, parted = whole_and_killed(prepared, "single")
    folder = folder_of(parted, "single")
    last, before = paths.saved_states(folder)[:2]
    file = last / "strategy" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = run(parted, "launch", "--row", "single")
    assert f"{file}: is missing or has changed since it was written" in said
    assert f"carries on from {before}" in said
    same(ended(whole, "single"), ended(parted, "single"))


def test_every_flipped_byte_and_every_cut_is_noticed(prepared):
    results = results_of(prepared, "bytes")
    run(results, "plan", *SIX_STEPS)
    run(results, "launch", "--row", "single", *SIX_STEPS)
    folder = folder_of(results, "single")
    (state,) = paths.saved_states(folder)
    files = sorted(file for file in state.rglob("*") if file.is_file())
    random = np.random.default_rng(0)
    for file in files:
        content = file.read_bytes()
        # Not without its last byte only: of JSON that is the end of the line, which says nothing.
        changes = [content[:length] for length in (0, 1, len(content) // 2, len(content) - 2)]
        for place in random.integers(len(content), size=20):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            changes.append(bytes(flipped))
        for changed in changes:
            file.write_bytes(changed)
            with pytest.raises((RunFailed, BadInput), match=str(file)):
                verify(state, "")
        file.write_bytes(content)
    assert verify(state, "")["step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("row", ["ddp", "fsdp"])
def test_a_kill_while_it_saves_harms_no_state(row, prepared):
    whole, parted = results_of(prepared, "whole"), results_of(prepared, "parted")
    run(whole, "launch", "--row", row)
    process = begin(parted, row)
    wait_for_step(process, parted, row, 6)
    folder = folder_of(parted, row)
    end = time.monotonic() + 60
    while not list((folder / paths.SAVED).glob(".step-*.tmp/strategy/*")):
        assert process.poll() is None, "it was never met while it saved"
        assert time.monotonic() < end
    kill(process)
    assert list((folder / paths.SAVED).glob(".step-*.tmp"))
    said = run(parted, "launch", "--row", row)
    assert "carries on from" in said
    assert "damaged" not in said
    same(ended(whole, row), ended(parted, row))
    assert not list((folder / paths.SAVED).glob(".*"))


@pytest.mark.slow
def test_a_full_disk_while_it_saves_harms_no_state(prepared):
    """Files may have 400 kB: enough for all that a run writes, but not for its state."""
    whole, parted = whole_and_killed(prepared, "single")
    folder = folder_of(parted, "single")
    before = [state.name for state in paths.saved_states(folder)]
    small = ["prlimit", "--fsize=400000", *command(parted, "launch", "--row", "single")]
    said = subprocess.run(small, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert said.stderr.startswith("failed: single: rank 0, after step 15 of 34: "), said.stderr
    assert "step-00000015: can't be written: not all of it was written, as where the disk is full." in said.stderr
    assert [state.name for state in paths.saved_states(folder)] == before[:1]
    run(parted, "launch", "--row", "single")
    same(ended(whole, "single"), ended(parted, "single"))


# Launchers have handlers of their own for SIGTERM, which would end the ranks.
ALL_GET_IT = [(row, True) for row in ("single", "ddp_spawn", "deepspeed", "accelerate")]
DDP = pytest.param("ddp", True, marks=pytest.mark.ci)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "everywhere"), [DDP, ("ddp", False), *ALL_GET_IT])
def test_sigterm_saves_and_the_same_command_carries_on(row, everywhere, prepared):
    """Also where all processes of the run get it, some twice, as from Slurm."""
    whole, parted = results_of(prepared, "whole"), results_of(prepared, "parted")
    run(whole, "launch", "--row", row)
    process = begin(parted, row)
    wait_for_step(process, parted, row, 2)
    others = psutil.Process(process.pid).children(recursive=True) if everywhere else []
    process.send_signal(signal.SIGTERM)
    for other in others:
        other.send_signal(signal.SIGTERM)
    if everywhere:
        process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143, said
    state = paths.saved_states(folder_of(parted, row))[0]
    step = json.loads((state / "manifest.json").read_text())["step"]
    assert f"its state after step {step} is saved" in said
    run(parted, "launch", "--row", row)
    assert ended(parted, row)[0]["resumed"] == [step]
    same(ended(whole, row), ended(parted, row))


@pytest.mark.slow
def test_a_longer_run_goes_on_only_where_its_learning_rates_are_the_same(prepared):
    results, whole = results_of(prepared, "longer"), results_of(prepared, "longer-at-once")
    constant = ("--set", "train.schedule=constant", "--set", "train.warmup=0")
    three = ("--set", "train.epochs=3")
    for folder, more in ((results, constant), (whole, constant + three)):
        run(folder, "plan", *more)
        run(folder, "launch", "--row", "single", *more)
    assert ended(results, "single")[0]["resumed"] == []
    run(results, "plan", *constant, *three)
    run(results, "launch", "--row", "single", *constant, *three)
    (record, weights, ledger), at_once = ended(results, "single"), ended(whole, "single")
    assert record["resumed"] == [STEPS]
    assert (weights, record["losses"]) == (at_once[1], at_once[0]["losses"])
    assert np.array_equal(ledger["id"], at_once[2]["id"])
    # By the default schedule all rates depend on the number of steps.
    results = results_of(prepared, "longer")
    run(results, "launch", "--row", "single")
    run(results, "plan", *three)
    said = run(results, "launch", "--row", "single", *three)
    assert f"the learning rates of its {STEPS} steps would differ now" in said
    assert ended(results, "single")[0]["resumed"] == []


ANY_NUMBER = ("ddp", "accelerate", "trainer", "fabric", "fsdp", "sharded_state", "deepspeed", "zero_2", "zero_0")
WITHOUT_DROPOUT = ("--set", "model.dropout=0")


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci((*ANY_NUMBER, *LORA, "horovod"), ()))
def test_another_number_of_processes_goes_on_with_the_optimizer(row, prepared):
    """Two processes are killed, three go on: without dropout they come to the weights of an uninterrupted run."""
    without_dropout = (*WITHOUT_DROPOUT, *(("--set", f"rows.{row}.lora_dropout=0") if row in LORA else ()))
    whole, parted = whole_and_killed(prepared, row, *without_dropout)
    two = folder_of(parted, row)
    three = ("--row", row, *without_dropout, "--set", "hardware.processes=3", "--resume", str(two))
    assert "carries on from" in run(parted, "launch", *three)
    there = two.parents[1] / "n3" / "rep1"
    record = json.loads((there / paths.RECORD).read_text())
    assert record["resumed"] in ([10], [15])
    assert any("was prepared with another task" in note for note in record["notes"])  # by the dropout
    assert f"2 processes trained it up to step {record['resumed'][0]}" in record["notes"]
    assert record["losses"] == pytest.approx(ended(whole, row)[0]["losses"], abs=1e-5)
    with np.load(there / paths.LEDGER) as ledger:
        step, sample = ledger["step"], ledger["id"]
    planned = ended(whole, row)[2]
    order, theirs = np.lexsort((sample, step)), np.lexsort((planned["id"], planned["step"]))
    assert np.array_equal(sample[order], planned["id"][theirs])


def test_what_cannot_be_gone_on_from_is_refused_by_name(prepared):
    results = results_of(prepared, "refused")
    said = run(results, "launch", "--row", "single", "--resume", str(results), code=2)
    assert f"{results}: is not a folder of a run" in said
    once = ("--row", "single", *SIX_STEPS)
    run(results, "plan", *SIX_STEPS)
    run(results, "launch", *once, "--set", "train.checkpoint_every=0", "--repeat", "2")
    other = str(results / "runs/single/n1/rep2")
    said = run(results, "launch", *once, "--resume", other, code=2)
    assert "it has no state from which this run could continue: it has none; set train.checkpoint_every" in said


# What is forgotten: the row that it is tried on, what is done before its state is read, and after.
FORGETTING = {
    "the optimizer": ("single", "strategy.optimizer.load_state_dict = lambda state: None", ""),
    "the random states": ("single", "torch.set_rng_state = lambda state: None", ""),
    "the position in the plan": (
        "single",
        """
reached = replay.training.progress.reached
def from_the_start(step):
    replay.done = 0
    reached(0)
replay.training.progress.reached = from_the_start""",
        "",
    ),
    "that each rank has random states of its own": (
        "ddp",
        "set_rng_state = torch.set_rng_state; torch.set_rng_state = lambda state: set_rng_state(of_main_rank(state))",
        "torch.set_rng_state = set_rng_state",
    ),
    "that each rank has a shard of its own": (
        "fsdp",
        "",
        """
for weight in strategy.model.parameters():
    shard = weight.to_local()
    if shard.numel() * 2 == weight.numel():
        shard.data.copy_(of_main_rank(shard))""",
    ),
}
FORGET = """
import sys
from pathlib import Path
import torch
from lockstep.rank import main, resumption
restore = resumption.Resumption.restore
def of_main_rank(tensor):
    sent = tensor.detach().clone()
    torch.distributed.broadcast(sent, 0)
    return sent
def forgetting(self, folder):
    names = {"replay": self.replay, "strategy": self.training.strategy, "torch": torch, "of_main_rank": of_main_rank}
    exec(BEFORE, names)
    restore(self, folder)
    exec(AFTER, names)
resumption.Resumption.restore = forgetting
main.main(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", in_ci(tuple(FORGETTING), ("the optimizer",)))
def test_a_resumption_that_forgets_is_noticed(forgotten, prepared):
    """Negative controls: each is a failed run, or ends elsewhere."""
    row, before, after = FORGETTING[forgotten]
    whole, parted = whole_and_killed(prepared, row)
    program = prepared / "forget.py"
    program.write_text(f"BEFORE, AFTER = {before!r}, {after!r}\n{FORGET}")
    folder = folder_of(parted, row)
    settings = json.loads((folder / paths.SETTINGS).read_text())
    state = paths.saved_states(folder)[0]
    (folder / paths.SETTINGS).write_text(json.dumps(settings | {"saved": str(state)}))
    for file in (folder / paths.RANKS).glob("*"):
        file.unlink()
    np.zeros((settings["hardware"]["processes"], 5), dtype=np.int64).tofile(folder / paths.PROGRESS)
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    launcher, rendezvous = launchers.of(settings["options"]), Rendezvous(free_port("auto"))
    started = launcher.command(Settings.from_json(settings), program, folder, rendezvous)
    subprocess.run(started, check=False, env=environment, timeout=120)
    if not paths.rank_summary(folder, 0).is_file():
        assert "step" in json.loads(paths.rank_error(folder, 0).read_text())  # it got as far as to train
        return
    theirs = json.loads(paths.rank_summary(folder, 0).read_text())
    ledger = np.load(paths.rank_arrays(folder, 0))
    record, _, planned = ended(whole, row)
    assert theirs["losses"][:10] == record["losses"][:10]
    assert theirs["losses"] != record["losses"] or not np.array_equal(ledger["id"], planned["id"])


def test_ranks_of_a_replica_go_on_with_random_numbers_of_their_own():
    """With other ranks than before; else the stages of a pipeline would drop the same units from there on."""

    def drawn(replica, draws):
        strategy = SimpleNamespace(world=SimpleNamespace(replica=replica), draws=draws)
        resumption.draw_anew(SimpleNamespace(strategy=strategy, train=SimpleNamespace(seed=42)), 10)
        return torch.rand(4).tolist()

    assert drawn(0, 1) == drawn(0, 1)
    assert len({tuple(drawn(*each)) for each in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_the_loss_scale_is_carried_on_with(tmp_path):
    """In 34 steps of so small a model it stays what it is at the start, so a run would not show it."""
    configured = [PROJECT / "config" / "config.yaml"], ["hardware.device=cpu", "rows.half.strategy=single"]
    settings = replace(reading.read(*configured).rows["half"].settings(), precision="fp16")

    def prepared():
        strategy = registry.load("single")(settings)
        strategy.start()
        strategy.set_up(torch.nn.Linear(2, 2), lambda model: make_optimizer(model, settings.train))
        strategy.scaler.scale(torch.ones(1))
        return strategy

    before, after = prepared(), prepared()
    before.scaler.update(1024.0)
    before.save_state(tmp_path)
    assert after.scaler.get_scale() == 65536
    after.load_state(tmp_path)
    assert after.scaler.get_scale() == 1024


def test_a_state_of_other_settings_is_not_gone_on_from(tmp_path):
    made = {"asked": {"train": {"clip": 1.0}}, "data": {}, "plan": "a", "rates": "b", "step": 5}
    assert saved.difference(made, made) == ""
    other = made | {"asked": {"train": {"clip": 0.5}}}
    assert "train.clip was 1.0, is 0.5" in saved.difference(made, other)
    assert "data or initial weights" in saved.difference(made, made | {"data": {"data": "x"}})
    assert "the plan's first 5 steps" in saved.difference(made, made | {"plan": "c"})
    assert "learning rates of its 5 steps" in saved.difference(made, made | {"rates": "c"})


def test_a_state_is_gone_on_from_where_the_network_has_another_name(tmp_path):
    """The interface decides a row's speed, but the times of a run that was interrupted are not ranked."""
    write_json(tmp_path / paths.ABOUT_DATA, {"hash": "d", "weights": "w"})
    order = np.arange(4)
    plan = SimpleNamespace(steps=2, epochs=[0, 0], ids=order, starts=np.array([0, 2, 4]), widths=order[:2])

    def state(**asked) -> dict:
        hardware = {"device": "cpu", "nodes": 2, "oversubscribe": True} | asked
        row = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "ddp"}}}).rows["x"]
        return saved.describe(replace(row.settings(), data=str(tmp_path)), plan, 1)

    assert saved.difference(state(interface="eth0"), state(interface="ib0")) == ""
    assert "hardware.threads" in saved.difference(state(threads=1), state(threads=2))


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, "bf16_weights", pytest.param("horovod", marks=NEED_HOROVOD)])
def test_killed_again_and_again(row, prepared):
    """`single` at each of the steps 1 to 10, the others at five steps at random, or as soon after as it is met."""
    whole, parted = results_of(prepared, f"whole-{row}"), results_of(prepared, f"parted-{row}")
    run(whole, "launch", "--row", row)
    each_step = ("--set", "train.checkpoint_every=1")
    random = np.random.default_rng(list(row.encode()))
    for step in range(1, 11) if row == "single" else np.sort(random.integers(1, STEPS - 2, size=5)):
        process = begin(parted, row, *each_step)
        wait_for_step(process, parted, row, int(step))
        kill(process)
    said = run(parted, "launch", "--row", row, *each_step)
    same(ended(whole, row), ended(parted, row))
    record = ended(parted, row)[0]
    seconds = record["saved"]["seconds"] / record["saved"]["count"]
    print(f"{row}: carried on after steps {record['resumed']}; {seconds:.3f} s a state")
    assert "carries on from" in said
    assert record["saved"]["count"] >= STEPS - len(record["resumed"])
