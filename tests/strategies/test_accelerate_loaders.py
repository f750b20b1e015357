"""Accelerate's own loaders, gather_for_metrics and a scheduler that it steps: what comes of them is seen, and told."""

import json
import re
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration

from lockstep import paths
from lockstep.config import reading
from lockstep.config.sections import Train
from lockstep.data import plan as plans
from lockstep.errors import BadInput, OtherWork, RunFailed
from lockstep.model.schedule import lr_factor, other_rates
from lockstep.rank import dev_split
from lockstep.run import ledger
from lockstep.strategies import _accelerate_loaders
from tests.conftest import copy_project
from tests.rank.test_dev_split import split, training

SAMPLES, BATCH = 44, 10  # of which four are left over in each epoch


def made_plan(**changes) -> plans.Plan:
    asked = {"global_batch": BATCH, "epochs": 3, "seed": 1, "batching": "bucketed"}
    return plans.make(split(SAMPLES).lengths, **asked | changes)


@pytest.fixture(params=[False, True], ids=["shard", "dispatch"])
def accelerator(request):
    """One process alone; what Accelerate keeps of it in the process goes again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=request.param))
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("done", [0, 1, 4, 5, 11])
def test_a_loader_brings_the_plans_samples_in_their_order_from_any_step_on(accelerator, done):
    plan, samples = made_plan(), split(SAMPLES)
    loader = _accelerate_loaders.Training(accelerator, samples, plan, drop_last=True)
    random = torch.get_rng_state()
    for step in range(done, plan.steps):
        ids, tensors = loader.next(step)
        assert ids.tolist() == plan.step_ids(step).tolist()
        assert tensors["input_ids"].shape == (BATCH, plan.widths[step])
        assert tensors["input_ids"][:, 0].tolist() == ids.tolist()  # each text's tokens are its number
    assert torch.equal(torch.get_rng_state(), random)  # on which dropout goes on


def test_what_does_not_fill_a_batch_is_kept_where_it_is_not_dropped(accelerator):
    """On one rank nothing fills it up; that it is a step more than the plan's is seen, and so are its samples."""
    plan = made_plan()
    loader = _accelerate_loaders.Training(accelerator, split(SAMPLES), plan, drop_last=False)
    steps = [loader.next(step)[0] for step in range(plan.steps)]
    assert sorted(np.concatenate(steps[:5])) == list(range(SAMPLES))
    assert len(steps[4]) == SAMPLES % BATCH
    said = ledger.departures(noted(steps), plan)
    assert said.startswith("in 8 of 12 steps, from step 5 on, it trained other samples than the plan's")


def noted(steps: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The ledger of one rank that trained these samples."""
    lengths = list(map(len, steps))
    columns = {"rank": np.zeros(sum(lengths), dtype=np.int64), "step": np.repeat(np.arange(len(steps)), lengths)}
    return columns | {"id": np.concatenate(steps)}


def test_a_ledger_that_is_the_plan_departs_in_nothing_and_repeated_samples_are_counted():
    plan = made_plan(epochs=1)
    steps = [plan.step_ids(step) for step in range(plan.steps)]
    assert ledger.departures(noted([step[::-1] for step in steps]), plan) == ""
    steps[3] = np.concatenate([steps[3][:7], steps[0][:3]])
    assert ledger.departures(noted(steps), plan) == (
        "in 1 of 4 steps, from step 4 on, it trained other samples than the plan's: over all, 3 more often than"
        " planned, 3 less often, and 3 again before all others had been trained"
    )
    with pytest.raises(OtherWork, match="in step 4"):
        ledger.check_ledger(noted(steps), plan)


def test_rates_are_held_against_the_schedules():
    assert other_rates([0.1, 0.05], [0.1, 0.05]) == ""
    assert other_rates([0.1, 0.05], []) == ""  # none are noted of a strategy that keeps the schedule
    assert other_rates([0.1, 0.05, 0.02], [0.1, 0.02, 0.02]) == (
        "in 1 of 3 steps it trained at another learning rate than the schedule's: in step 2 at 0.02 for 0.05, in step 2"
        " at 0.02 for 0.05"
    )


def train_section(**changes) -> Train:
    return reading.parse({"train": {"learning_rate": 1.0, "warmup": 0} | changes}).train


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_schedule_by_epochs_that_is_stepped_too_often_decays_as_pytorchs_does(processes):
    """StepLR(30) of 60 epochs, stepped once for each process: on two of them it decays after 15 epochs, and twice."""
    per_epoch, epochs = 5, 60
    train = train_section(schedule="step", step_epochs=30, gamma=0.1, epochs=epochs)
    factor = lr_factor(train, per_epoch * epochs, np.repeat(np.arange(epochs), per_epoch))
    theirs = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 30, gamma=0.1)
    theirs.optimizer.step()
    for epoch in range(epochs):
        assert factor(processes * per_epoch * epoch) == pytest.approx(theirs.get_last_lr()[0])
        for _ in range(processes):
            theirs.step()


def test_what_a_framework_gathers_twice_is_refused():
    """Negative control: as by `gather` in place of gather_for_metrics."""
    samples = split(5)
    made = training([0.0])

    def gathered(ids):
        return lambda samples, size, results: (torch.tensor(ids), torch.tensor(ids, dtype=torch.float32)[:, None])

    made.strategy.gathered = gathered([3, 1, 0, 2, 4])
    assert dev_split.gather_results(made, samples).tolist() == [[0], [1], [2], [3], [4]]
    for wrong in ([3, 1, 0, 2, 4, 3], [0, 1, 2, 3]):
        made.strategy.gathered = gathered(wrong)
        with pytest.raises(RunFailed, match="each sample of the split exactly once"):
            dev_split.gather_results(made, samples)


CPU = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}


def row(**options):
    rows = {"x": {"strategy": "accelerate", "global_batch": 30} | options}
    return reading.parse(CPU | {"rows": rows, "train": {"global_batch": 30}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"own_loaders": True, "global_batch": 31},
            "31 samples can't be shared evenly by 2 devices: Accelerate's loaders give every rank the same",
        ),
        (
            {"own_loaders": True, "accumulation": 3},
            "own_loaders: True, accumulation: 3: a step is one batch of Accelerate's loader",
        ),
        ({"drop_last": False}, "drop_last: False, own_loaders: False: this is a setting of Accelerate's loaders"),
        ({"dispatch_batches": True}, "this is a setting of Accelerate's loaders; set own_loaders: true"),
        ({"step_scheduler_with_optimizer": False}, "set prepared_scheduler: true"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused_in_words(options, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        row(**options).rows["x"].refuse()


@pytest.mark.parametrize(
    ("options", "references", "may"),
    [
        ({}, ["fp32", "fp64"], False),
        ({"own_loaders": True}, ["fp32_b30", "fp64_b30"], False),
        ({"prepared_scheduler": True}, ["fp32_linear", "fp64_linear"], True),
        ({"prepared_scheduler": True, "schedule": "constant", "warmup": 0}, ["fp32", "fp64"], True),
        ({"prepared_scheduler": True, "own_loaders": True, "split_batches": True, "precision": "bf16"}, None, False),
        ({"prepared_scheduler": True, "step_scheduler_with_optimizer": False}, ["fp32_linear", "fp64_linear"], False),
        ({"own_loaders": True, "drop_last": False}, ["fp32_b30", "fp64_b30"], True),
    ],
)
def test_a_trial_is_held_against_references_with_its_batch_and_its_schedule(options, references, may):
    config = row(**options)
    asked = config.rows["x"]
    held_against = config.references(asked)
    names = [reference.name.removeprefix("reference_") for reference in held_against.values()]
    assert names == (references or ["bf16_b30_linear"])
    trial = config.trial(asked)
    for reference in held_against.values():
        assert reference.strategy == "single"
        assert reference.plan_name == trial.plan_name
        assert reference.train.schedule == trial.train.schedule
    assert bool(asked.may_depart) == bool(trial.may_depart) == may


def test_rows_that_train_another_model_otherwise_must_keep_to_the_plan():
    rows = {"x": {"strategy": "local_sgd"}, "y": {"strategy": "published_ddp_amp"}}
    for other in reading.parse(CPU | {"rows": rows}).rows.values():
        assert other.other_model
        assert not other.may_depart


CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 2, global_batch: 30, eval_every: 20, checkpoint: last, warmup: 2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 200, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  all_threads: null
  single: null
  ddp: null
  dataparallel: null
  ddp_spawn: null
  ddp_amp: null
  horovod: null
  deepspeed: null
  accelerate: null
  trainer: null
  fabric: null
  fsdp: null
  own: {strategy: accelerate, own_loaders: true}
  split: {strategy: accelerate, own_loaders: true, split_batches: true, prepared_scheduler: true}
  dispatched: {strategy: accelerate, own_loaders: true, dispatch_batches: true, prepared_scheduler: true,
               step_scheduler_with_optimizer: false}
  early: {strategy: accelerate, prepared_scheduler: true}
  tails: {strategy: accelerate, own_loaders: true, drop_last: false}
  carried: {strategy: accelerate, own_loaders: true, drop_last: false, prepared_scheduler: true, epochs: 12,
            eval_every: 0, checkpoint_every: 1000}
"""
FILES = ("--config=config/config.yaml", "--config=loaders.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    copy = copy_project(tmp_path_factory.mktemp("loaders"))
    copy.path("loaders.yaml").write_text(CONFIG)
    copy.prepare(*FILES)
    return copy


def record(place, name: str, kind: str = "runs") -> dict:
    return json.loads(place.path(f"results/{kind}/{name}/n2/rep1/record.json").read_text())


def train(place, name: str) -> dict:
    finished = place.script("launch", *FILES, "--row", name)
    assert finished.returncode == 0, finished.stderr
    return record(place, name)


@pytest.fixture(scope="module")
def verdicts(place):
    names = ("own", "split", "dispatched", "early", "tails")
    finished = place.script(
        "parity", *FILES, *(f"--row={name}" for name in ("reference", *names)), "--exit-zero", timeout=900
    )
    assert finished.returncode == 0, finished.stderr
    file = "results/parity/{}/n2/rep1/verdict.json"
    return {name: json.loads(place.path(file.format(name)).read_text()) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "split", "dispatched"])
def test_where_accelerate_hands_out_the_plan_the_row_trains_the_same_model(place, verdicts, name):
    assert verdicts[name]["proof"] == "equal", verdicts[name]
    made = train(place, name)
    assert made["departed"] == []
    assert [scores["support"] for scores in made["dev"]] == [68, 68]  # of 68, which no batch of 30 divides
    assert made["settings"]["options"]["split_batches"] == (name == "split")
    assert len(made["rates"]) == (0 if name == "own" else made["steps"])


@pytest.mark.slow
def test_a_rate_that_decays_early_is_another_model_and_told_with_the_rates_that_were_used(place, verdicts):
    verdict = verdicts["early"]
    assert verdict["proof"] == "unequal"
    assert verdict["by_nature"] == "Accelerate steps a prepared scheduler once for each process"
    assert "in 11 of 12 steps it trained at another learning rate than the schedule's: in step 2" in verdict["reason"]
    assert "update" in verdict["reason"]  # the weights say so too
    made = train(place, "early")
    asked = [0.0, 0.00075, 0.0015]
    assert made["rates"][:2] == [asked[0], asked[2]]
    assert made["rates"][-1] == 0.0
    assert "in 35 of 36 steps it trained at another learning rate" in made["notes"][-1]
    checked = place.script("check", "results")
    assert "in 35 of 36 steps it trained at another learning rate than the schedule's" in checked.stdout


@pytest.mark.slow
def test_samples_that_even_batches_repeats_are_seen_in_the_ledger(place, verdicts):
    """An epoch of 544 texts leaves four over, which 26 of its beginning fill up: a trial is too short to come there."""
    assert verdicts["tails"]["proof"] == "equal"
    made = train(place, "tails")
    (departed,) = made["departed"]
    assert "in 18 of 36 steps, from step 19 on, it trained other samples" in departed
    assert "and 26 again before all others had been trained" in departed
    shown = place.script("parity", *FILES, "--show", "--row=tails")
    assert "tails trains another model by design: Accelerate fills up the last batch" in shown.stdout + shown.stderr
    checked = place.script("check", "results")
    assert "its ledger is wrong: the ledger differs from the plan in step 19" in checked.stdout


@pytest.mark.slow
def test_a_run_by_accelerates_loaders_carries_on_where_it_was_stopped(place):
    whole = train(place, "carried")
    folder = place.path("results/runs/carried/n2/rep1")
    ledger_of_whole = dict(np.load(folder / paths.LEDGER))
    weights = json.loads((folder / "native/manifest.json").read_text())["weights"]
    for left in (folder / paths.SAVED).iterdir():
        left.rename(place.path(f"results/{left.name}"))
    (folder / paths.PROGRESS).unlink()
    process = subprocess.Popen(
        ["python", "workflow/scripts/launch.py", *FILES, "--row", "carried"],
        cwd=place.folder,
        env=place.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    table = np.zeros((1, 5))
    while table[:, 2].min() < 25 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
        if (folder / paths.PROGRESS).is_file():
            read = np.fromfile(folder / paths.PROGRESS, dtype=np.int64)
            table = read.reshape(-1, 5) if len(read) else table
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, process.stderr.read()
    again = train(place, "carried")
    assert again["resumed"]
    assert again["resumed"][0] < again["steps"]
    assert again["losses"] == whole["losses"]
    assert again["rates"] == whole["rates"]
    assert again["departed"] == whole["departed"]
    assert all(np.array_equal(values, ledger_of_whole[name]) for name, values in np.load(folder / paths.LEDGER).items())
    assert json.loads((folder / "native/manifest.json").read_text())["weights"] == weights
