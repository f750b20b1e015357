"""`lockstep accept` finds out in a few minutes what works on a machine, and says what is wrong."""

import json
import os
import signal
import subprocess
import time

import pytest

from lockstep import paths
from lockstep.proof import acceptance
from lockstep.run import fork
from tests import pretended
from tests.conftest import copy_project

pytestmark = pytest.mark.slow
in_ci = pytest.mark.ci
PROOFS = """
data: {limit: 600}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, eval_every: 0, checkpoint: last}
hardware: {oversubscribe: true, threads: 1}
repeats: 1
profile: {steps: 0}
rows:
  single: {strategy: single}
  ddp_bf16: {strategy: ddp, precision: bf16}
  trainer: {strategy: trainer}
  deepspeed: {strategy: deepspeed, launcher: torchrun, stage: 2}
  ddp_spawn: {strategy: ddp_spawn}
  doubled: {strategy: wrong_doubled}
  never: {strategy: ddp, precision: fp16}
"""
TIMES = """
data: {limit: 600}
model: {hidden_size: 32, layers: 1, heads: 2}
train: {max_steps: 8, epochs: 1, global_batch: 32, eval_every: 0, checkpoint: last}
hardware: {threads: 1}
repeats: 1
retries: 0
profile: {steps: 0}
rows: {single: {strategy: single}, ddp: {strategy: ddp}, single_bf16: {strategy: single, precision: bf16}}
"""
DOUBLED = """
from lockstep.strategies import ddp

class Strategy(ddp.Strategy):
    def backward(self, loss, last):
        super().backward(2 * loss, last)
"""
OTHERS = ("all_threads", "dataparallel", "ddp", "ddp_amp", "horovod", "accelerate", "fabric", "fsdp")


@pytest.fixture
def place(tmp_path):
    place = copy_project(tmp_path)
    dropped = "".join(f"  {name}: null\n" for name in OTHERS)
    place.path("config/accept.yaml").write_text(PROOFS + dropped)
    place.path("config/accept_times.yaml").write_text(TIMES)
    place.path("workflow/scripts/lockstep/strategies/wrong_doubled.py").write_text(DOUBLED)
    return place


def accept(place, minutes: float, **variables):
    finished = place.script("accept", f"--minutes={minutes}", timeout=600, **variables)
    return finished, json.loads(place.path("results/accept/accept.json").read_text())


@in_ci
def test_a_machine_is_accepted_but_for_what_is_wrong(place):
    finished, found = accept(place, 5)
    assert finished.returncode == 1, finished.stderr
    verdicts = {name: verdict["proof"] for name, verdict in found["proofs"].items()}
    assert verdicts.pop("doubled") == "unequal"
    assert verdicts == {
        **dict.fromkeys(("single", "trainer", "deepspeed", "ddp_spawn"), "equal"),
        **dict.fromkeys(("ddp_bf16", "never"), "within-tolerance"),
    }
    assert "wrong: doubled" in finished.stdout
    timed = {line["name"]: line["step_ms"] for line in found["times"]}
    assert list(timed) == [
        *("bare loop, as single", "single", "ddp"),
        *("bare loop, as single_bf16", "single_bf16"),
    ]
    assert 0.2 < timed["bare loop, as single"] / timed["single"] < 5
    assert (found["not_reached"], found["finished"]) == ([], True)
    assert all("disturbed" in line for line in found["times"])
    assert found["machine"]["packages"]["torch"]
    log = place.path("results/accept/proofs/parity/deepspeed/n2/rep1") / paths.LOG
    assert log.read_text().startswith("in forks of process ")
    log = place.path("results/accept/proofs/parity/ddp_spawn/n2/rep1") / paths.LOG
    assert log.read_text().startswith("$ ")
    left = sum(file.stat().st_size for file in place.path("results/accept").rglob("*") if file.is_file())
    assert left < 2e6, "the folder is small enough to pass on"


def test_what_was_not_reached_is_named_and_nothing_is_left_running(place):
    finished, found = accept(place, 0.3)
    proofs = {name: verdict["proof"] for name, verdict in found["proofs"].items()}
    right = bool(proofs) and proofs.get("doubled") != "unequal"  # which may not have been reached
    assert finished.returncode == int(not right), finished.stderr
    assert any(name.startswith("proof of") for name in found["not_reached"])
    assert "time of single_bf16" in found["not_reached"]
    assert "not reached:" in finished.stdout
    assert not running_in(place)


def test_nothing_proven_is_no_success(place):
    finished, found = accept(place, 0.01)
    assert found["proofs"] == {}
    assert finished.returncode == 1
    assert "nothing was proven" in finished.stdout
    assert "give more --minutes" in finished.stdout


def test_a_folder_of_somebody_elses_is_left_alone(place, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("theirs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.txt").write_text("mine")
    finished = place.script("accept", f"--results={tmp_path}", "--minutes=0.01")
    assert finished.returncode == 2
    assert "holds logs and no accept.json" in finished.stderr
    assert (tmp_path / "logs" / "mine.txt").read_text() == "mine"


def test_ctrl_c_ends_everything_and_keeps_what_was_found(place):
    process = subprocess.Popen(
        ["python", "workflow/scripts/accept.py", "--minutes=5"],
        cwd=place.folder,
        env=place.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith(("single:", "ddp_bf16:")):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    deadline = time.monotonic() + 10
    while running_in(place) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running_in(place)
    found = json.loads(place.path("results/accept/accept.json").read_text())
    assert found["proofs"]
    assert found["finished"] is False
    assert "time of single" in found["not_reached"]


def running_in(place) -> list[str]:
    """The processes whose working folder is the copy."""
    inside = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/cwd").startswith(str(place.folder)):
                inside.append(pid)
        except OSError:
            continue
    return inside


def test_on_a_gpu_the_gpu_is_proven(place):
    """Forks must open NVML again, and may not fall back to the CPU."""
    variables = pretended.machine(place, 1, pretended.libraries())
    place.path("config/gpu.yaml").write_text("model: {hidden_size: 32, layers: 1, heads: 2}\n")
    finished, found = accept(place, 5, **variables)
    assert finished.returncode == 1, finished.stderr
    assert found["machine"]["gpus"] == ["Pretended GPU 0"]
    assert {found["proofs"][name]["proof"] for name in ("single", "trainer", "ddp_spawn")} == {"equal"}
    log = place.path("results/accept/proofs/parity/single/n1/rep1") / paths.LOG
    assert ", cuda, process" in log.read_text()


def test_a_fork_tells_how_it_ended():
    assert fork.Fork(lambda: None, dict(os.environ)).wait() == 0
    with open(os.devnull, "w") as nowhere:
        assert fork.Fork(lambda: 1 / 0, dict(os.environ), nowhere).wait() == 1
    killed = fork.Fork(lambda: time.sleep(60), dict(os.environ))
    assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL


def test_rows_that_a_configuration_adds_are_proven_too(tmp_path):
    """And those that it drops are not."""
    file = tmp_path / "mine.yaml"
    file.write_text("rows: {single: null, mine: {strategy: tp, processes: 2}}\nhardware: {oversubscribe: true}\n")
    _, usual = acceptance._read([acceptance.PROOFS], 0)
    _, rows = acceptance._read([acceptance.PROOFS], 0, (file,))
    assert [*rows] == [*(name for name in usual if name != "single"), "mine"]
