"""What people watch while a run trains: the log's lines, TensorBoard, MLflow, a file of output for each rank."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from lockstep import paths
from lockstep.config import reading, tracking
from lockstep.config.registry import Need
from lockstep.data.plan import Plan
from lockstep.errors import BadInput
from lockstep.run import trackers, training_log
from tests.conftest import PROJECT

SCRIPTS = PROJECT / "workflow" / "scripts"
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1}
train: {epochs: 2, global_batch: 31, eval_every: 7, log_every: 10, log_to: [tensorboard, mlflow]}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
retries: 0
"""
STEPS = 34
LINE = rf"epoch (\S+)/2, step (\d+)/{STEPS}: loss (\S+), learning rate (\S+), (\d+) samples/s, 00:00:\d\d left"


def settings_of(**train):
    settings = reading.read([PROJECT / "config" / "config.yaml"]).rows["single"].settings()
    return replace(settings, train=replace(settings.train, **train))


def need_trackers() -> None:
    """Skips where they are not installed, as in the images, which leave them to those who want them."""
    for need in tracking.NEEDS.values():
        if need.installed is None:
            pytest.skip(f"needs: {need.command}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of `ddp` that told both trackers; the folder of the run, and what was said."""
    need_trackers()
    folder = tmp_path_factory.mktemp("live")
    (folder / "small.yaml").write_text(CONFIG)
    environment = {
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlflow'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "PATH": "/usr/bin:/bin",
    }
    asked = ["--config", PROJECT / "config" / "config.yaml", "--config", folder / "small.yaml"]
    asked += ["--results", folder / "results"]
    for script, *more in (("prepare",), ("plan",), ("launch", "--row", "ddp")):
        command = [sys.executable, SCRIPTS / f"{script}.py", *asked, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "results" / "runs" / "ddp" / "n2" / "rep1", done.stdout


def test_the_log_says_how_far_it_is_and_how_fast(run):
    folder, said = run
    told = re.findall(LINE, (folder / paths.LOG).read_text())
    assert [(epoch, int(step)) for epoch, step, *_ in told] == [("0.59", 10), ("1.18", 20), ("1.76", 30)]
    assert all(0.5 < float(loss) < 4 and int(speed) > 0 for _, _, loss, _, speed in told)
    rates = [float(rate) for _, _, _, rate, _ in told]
    assert rates == sorted(rates, reverse=True)
    assert said.count("ddp: epoch") == 3


def test_each_rank_says_who_it_is_and_has_a_file_of_its_own(run):
    folder, _ = run
    log = (folder / paths.LOG).read_text()
    who = sorted(re.findall(r"rank (\d) of 2: local rank (\d) on \S+, cpu, process (\d+), gloo backend", log))
    assert [numbers[:2] for numbers in who] == [("0", "0"), ("1", "1")]
    assert who[0][2] != who[1][2]
    assert paths.rank_log(folder, 1).is_file()


def test_tensorboard_and_mlflow_have_the_same(run):
    folder, _ = run
    steps = {name: set() for name in ("loss", "learning_rate", "samples_per_second", "epoch", "dev/macro_f1")}
    for step, name, _ in events(folder):
        if name in steps:
            steps[name].add(step)
    assert steps == {name: {10, 20, 30} for name in steps} | {"dev/macro_f1": {7, 14, 21, 28, 34}}
    (metrics,) = folder.parents[4].glob("mlflow/*/*/metrics")
    lines = map(str.split, (metrics / "loss").read_text().splitlines())
    noted = {int(step): float(value) for _, value, step in lines}
    assert noted == pytest.approx({step: value for step, name, value in events(folder) if name == "loss"}, rel=1e-5)
    assert (metrics / "dev" / "macro_f1").is_file()
    assert (metrics.parent / "tags" / "lockstep.row").read_text() == "ddp"


def events(folder) -> list[tuple[int, str, float]]:
    """Step, name and value of all that TensorBoard would show."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (folder / paths.TENSORBOARD).iterdir()
    content, there, read = file.read_bytes(), 0, []
    while there < len(content):  # length, its checksum, an event, its checksum
        length = int(np.frombuffer(content[there : there + 8], dtype="<u8")[0])
        event = Event.FromString(content[there + 12 : there + 12 + length])
        read += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        there += length + 16
    return read


def test_a_tracker_that_can_not_be_reached_costs_no_more_than_a_warning(tmp_path, monkeypatch):
    need_trackers()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    folder, said = tmp_path / "a" / "n1" / "rep1", []
    both = trackers.Trackers(folder, settings_of(log_to=["mlflow", "tensorboard"]), said.append)
    both.add(1, {"loss": 1.0})
    both.close()
    (warning,) = said
    assert warning.startswith("warning: mlflow records nothing of this run: ")
    assert [(step, name) for step, name, _ in events(folder)] == [(1, "loss")]


def test_what_is_not_there_is_refused_before_the_run(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(BadInput, match=r"rows.x.log_to: mlflow needs a server. Set MLFLOW_TRACKING_URI"):
        tracking.refuse(["mlflow"], "rows.x.log_to")
    need = Need("no-such-package", "1.0", "pip install no-such-package==1.0", only={})
    monkeypatch.setattr(tracking, "NEEDS", {"tensorboard": need})
    with pytest.raises(BadInput, match=r"which is not installed. Run: pip install no-such-package==1.0"):
        tracking.refuse(["tensorboard"], "rows.x.log_to")


def test_figures_are_of_the_steps_since_the_last_line(tmp_path):
    """Batches of 2 samples, 4 steps an epoch; it went on after step 2, and a step takes a second."""
    plan = Plan(
        ids=np.zeros(16, dtype=np.int64),
        starts=np.arange(0, 17, 2),
        widths=np.ones(8, dtype=np.int64),
        epochs=np.repeat([0, 1], 4),
        dropped=np.zeros((0, 2), dtype=np.int64),
    )
    said = []
    settings = settings_of(log_every=2, schedule="constant", warmup=0, learning_rate=0.5)
    log = training_log.Log(tmp_path, settings, plan, said.append)
    notes = training_log.Notes(tmp_path)
    notes.write(2, 10.0, 0)
    notes.write(4, 12.0, 1.5)
    log.update()
    notes.write(6, 14.0, 1.25, 0.25)  # as where a framework steps the schedule
    log.finish([])
    assert said == [
        "epoch 1.00/2, step 4/8: loss 1.5000, learning rate 0.5, 2 samples/s, 00:00:04 left",
        "epoch 1.50/2, step 6/8: loss 1.2500, learning rate 0.25, 2 samples/s, 00:00:02 left",
    ]


def test_the_terms_of_a_loss_stand_behind_it(tmp_path):
    plan = Plan(
        ids=np.zeros(4, dtype=np.int64),
        starts=np.arange(5),
        widths=np.ones(4, dtype=np.int64),
        epochs=np.zeros(4, dtype=np.int64),
        dropped=np.zeros((0, 2), dtype=np.int64),
    )
    told, said = [], []
    settings = replace(settings_of(log_every=2), task="image-segmentation")
    log = training_log.Log(tmp_path, settings, plan, said.append)
    log.trackers.add = lambda step, figures: told.append((step, figures))
    notes = training_log.Notes(tmp_path, terms=3)
    notes.write(0, 1.0, 0)
    notes.write(2, 2.0, np.array([1.5, 1, 0.25, 0.5]))
    log.finish([])
    assert ": loss 1.5000 (cross_entropy 1.0000, hard_examples 0.2500, boundary 0.5000), learning rate" in said[0]
    ((step, figures),) = told
    assert (step, figures["loss"], figures["loss/hard_examples"]) == (2, 1.5, 0.25)


def test_figures_that_nobody_writes_are_refused():
    row = reading.parse({"train": {"log_to": ["tensorboard"]}, "rows": {"x": {"strategy": "single"}}}).rows["x"]
    with pytest.raises(BadInput, match=r"rows.x.log_to: nothing is logged while log_every is 0"):
        row.refuse()
