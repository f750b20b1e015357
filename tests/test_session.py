"""Scripts of one's own that train by lockstep.session: proven as any row, and told where they leave something out."""

import json
import re
import subprocess
import sys

import pytest

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import BadInput
from tests.conftest import PROJECT, copy_project
from tests.rank.test_resumption import in_ci

CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")
# Shares of 31 samples are unequal; two micro-batches make one of them empty of the other's gradients; clipping bites.
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0.1}
train: {epochs: 1, global_batch: 31, max_steps: 6, eval_every: 3, checkpoint: last, accumulation: 2, clip: 0.1}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 3}
repeats: 1
retries: 0
rows:
"""
BEGIN = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from lockstep import session
"""
# Right ones: a loop in another style each.
RIGHT = {
    "by_hand": """
def main(bucket):
    dist.init_process_group("gloo")
    for run in session.join(torch.device("cpu")):
        model = run.model
        optimizer = run.optimizer(model)
        for step in run.steps(model, optimizer):
            for batch in step.batches():
                run.loss(batch, model(**batch.inputs)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            step.update()
    dist.destroy_process_group()

if __name__ == "__main__":
    assert sys.argv[1:] == ["--bucket", "25"], sys.argv
    main(sys.argv[2])
""",
    "sharded": """
for run in session.join():
    model = run.model.to(run.device)
    fully_shard(model)
    optimizer = run.optimizer(model)
    for step in run.steps(model, optimizer):
        for batch in step.batches():
            model.set_requires_gradient_sync(batch.last)
            with run.autocast():
                outputs = model(**batch.inputs)
            run.loss(batch, outputs).backward()
        step.update()
""",
}
LOOP = """
for run in session.join():
    model = DistributedDataParallel(run.model.to(run.device))
    optimizer = run.optimizer(model)
    for step in run.steps(model, optimizer):
        for batch in step.batches():
            run.loss(batch, model(**batch.inputs)).backward()
        step.update()
"""
# Of LOOP: what is put in whose place, and what the proof says of it.
OTHER_MODELS = {
    "summed": ("run.loss(batch, model(**batch.inputs))", "(2 * run.loss(batch, model(**batch.inputs)))"),
    "not_averaged": ("DistributedDataParallel(run.model.to(run.device))", "run.model.to(run.device)"),
    "never_cleared": ("step.update()", "step.gradients_ready(); optimizer.step()"),
}
LEFT_OUT = {
    "no_loss": (
        "run.loss(batch, model(**batch.inputs)).backward()",
        "model(**batch.inputs).logits.sum().backward()",
        r"step 1: Run.loss was not called for a batch",
    ),
    "not_ready": ("step.update()", "optimizer.step()", r"step 1: neither update nor gradients_ready was called"),
    "half_a_step": (
        "run.loss(batch, model(**batch.inputs)).backward()",
        "run.loss(batch, model(**batch.inputs)).backward(); break",
        r"step 1: its batches were not all gone through",
    ),
    "stops": ("step.update()", "step.update()\n        break", r"it ended after 0 of 1 trainings"),
    "exits": ("step.update()", "sys.exit(3)", r"it ended itself by sys.exit\(3\)"),
    "joins_twice": ("step.update()", "session.join()", r"session.join: it was called before"),
    "raises": ("step.update()", "raise ValueError('the moon')", r"the moon"),
}


def changed(old: str, new: str) -> str:
    assert old in LOOP
    return LOOP.replace(old, new)


SCRIPTS = {
    **RIGHT,
    "loop": LOOP,
    **{name: changed(*change) for name, change in OTHER_MODELS.items()},
    **{name: changed(old, new) for name, (old, new, _) in LEFT_OUT.items()},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with all these scripts, a row of each, and prepared data."""
    copy = copy_project(tmp_path_factory.mktemp("session"))
    text = SMALL + "  as_it_comes: {strategy: script}\n"
    for name, code in SCRIPTS.items():
        copy.path(f"{name}.py").write_text(BEGIN + code, encoding="utf-8")
        arguments = ", arguments: [--bucket, '25']" if name == "by_hand" else ""
        text += f"  {name}: {{strategy: script, script: {name}.py{arguments}}}\n"
    copy.path("small.yaml").write_text(text, encoding="utf-8")
    copy.prepare(*CONFIGS)
    return copy


@pytest.fixture(scope="module")
def referenced(place):
    finished = place.script("parity", *CONFIGS, "--row=reference", timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return place


def prove(place, row: str) -> tuple[int, dict]:
    finished = place.script("parity", *CONFIGS, f"--row={row}", timeout=600)
    (file,) = place.path("results").glob(f"parity/{row}/n*/rep1/{paths.VERDICT}")
    return finished.returncode, json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci(("as_it_comes", "loop", *RIGHT), ("as_it_comes",)))
def test_a_right_script_trains_the_same_model(referenced, row):
    code, verdict = prove(referenced, row)
    assert (code, verdict["proof"]) == (0, "equal"), verdict
    assert max(verdict["fp64"].values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci(tuple(OTHER_MODELS), ("not_averaged",)))
def test_a_script_that_trains_another_model_is_found(referenced, row):
    code, verdict = prove(referenced, row)
    assert (code, verdict["proof"]) == (1, "unequal"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci(("as_it_comes", "sharded"), ("as_it_comes",)))
def test_a_script_is_timed_converted_and_tested_as_any_row(place, row):
    finished = place.script("launch", *CONFIGS, "--row", row)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (file,) = place.path("results").glob(f"runs/{row}/n2/rep1/{paths.RECORD}")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["clock"]["train_seconds"] > 0
    assert len(record["losses"]) == record["steps"] == 6
    assert record["asked"]["options"]["script_sha256"]
    for script in ("convert", "test"):
        finished = place.script(script, str(file.parent))
        assert finished.returncode == 0, finished.stdout + finished.stderr
    assert json.loads((file.parent / paths.TEST_REPORT).read_text(encoding="utf-8"))["support"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("row", in_ci(tuple(LEFT_OUT), ("not_ready",)))
def test_what_a_script_leaves_out_is_said(place, row):
    finished = place.script("launch", *CONFIGS, "--row", row)
    assert finished.returncode != 0
    (file,) = place.path("results").glob(f"runs/{row}/n2/rep1/{paths.FAILED}")
    reason = json.loads(file.read_text(encoding="utf-8"))["reason"]
    assert re.search(LEFT_OUT[row][2], reason), reason


def test_a_script_that_is_not_there_is_refused():
    row = reading.parse({"rows": {"mine": {"strategy": "script", "script": "nowhere.py"}}}).rows["mine"]
    with pytest.raises(BadInput, match=r"rows\.mine\.script: nowhere\.py does not exist\. Name an existing file"):
        row.refuse()


def test_another_content_is_another_row(tmp_path):
    file = tmp_path / "mine.py"
    hashes = []
    for content in ("1", "2"):
        file.write_text(content)
        row = reading.parse({"rows": {"mine": {"strategy": "script", "script": str(file)}}}).rows["mine"]
        hashes.append(row.deciding()["options"]["script_sha256"])
    assert len(set(hashes)) == 2


def test_a_script_that_lockstep_did_not_start_is_told(tmp_path):
    command = [sys.executable, str(PROJECT / "config" / "my_script.py")]
    variables = {"PYTHONPATH": str(PROJECT / "workflow" / "scripts"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "this script was not started by Lockstep. Name it in a row" in done.stderr.splitlines()[-1]
