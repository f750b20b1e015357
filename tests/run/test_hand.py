"""Ranks that a person starts by hand: the tests read the lines that a run prints, and paste them into shells."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lockstep import paths
from lockstep.config import reading
from lockstep.config.machine import free_port
from lockstep.errors import BadInput
from lockstep.run import hand
from lockstep.run.addresses import Rendezvous
from tests.conftest import copy_project

BARE = {"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore"}  # of a terminal in which nothing is activated
# The supervisor of a run, as far as it waits for ranks; it says when the run would begin, and when it has ended.
WAITS = """
import sys
from pathlib import Path
from lockstep.config import reading
from lockstep.errors import RunFailed
from lockstep.run import hand
from lockstep.run.addresses import Rendezvous
folder, port, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
asked = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True, "timeout": timeout}
row = reading.parse({"rows": {"x": {"strategy": "ddp", "launcher": "hand"}}, "hardware": asked}).rows["x"]
try:
    with hand.called(row, folder, Rendezvous(port), {}, sys.stdout) as there:
        print("begins", len(there), flush=True)
except RunFailed as error:
    sys.exit(str(error))
"""


class Waiting:
    """A run that waits for its ranks in `folder`."""

    def __init__(self, folder: Path, timeout: float = 60):
        folder.mkdir(parents=True)
        self.folder, self.port = folder, free_port("auto")
        command = [sys.executable, "-c", WAITS, str(folder), str(self.port), str(timeout)]
        environment = os.environ | {"PYTHONPATH": str(paths.SCRIPTS)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.says("start its ranks by hand")
        self.lines = [self.process.stdout.readline().strip() for _ in range(2)]

    def says(self, words: str) -> str:
        for line in self.process.stdout:
            if words in line:
                return line
        raise AssertionError(f"it never said {words}: {self.process.stderr.read()}")


def paste(line: str, **environment: str) -> subprocess.Popen:
    """A line in a terminal of its own, whose folder is another."""
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd="/",
        env=BARE | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def waiting(tmp_path):
    run = Waiting(tmp_path / "it's a folder" / "run")
    yield run
    run.process.kill()
    run.process.wait()


def test_a_run_waits_until_each_rank_was_started_and_says_which_are_missing(waiting):
    first = paste(waiting.lines[1])
    assert waiting.says("rank 1 came") == "x: rank 1 came; rank 0 still missing\n"
    assert first.stdout.readline() == "rank 1 of 2 is there, and waits for rank 0\n"
    first.send_signal(signal.SIGINT)  # Ctrl-C in its terminal
    assert first.wait(20) == 130
    assert waiting.says("left again") == "x: rank 1 left again; rank 0 and rank 1 still missing\n"
    ranks = [paste(line) for line in waiting.lines]
    assert waiting.says("begins") == "begins 2\n"
    assert waiting.process.wait(20) == 0
    for rank in ranks:  # the run ended before it let them begin
        said, _ = rank.communicate(timeout=20)
        assert rank.returncode == 1
        assert "has ended, as the run has" in said


@pytest.mark.parametrize(
    ("changed", "to", "words"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE=3", "WORLD_SIZE: it is 3, and this run's is 2"),
        ("RANK=0", "RANK=2", "RANK: it is 2, and 2 ranks are numbered from 0 to 1"),
        (" RANK=0", "", "RANK: it is not set"),
        ("RANK=0", "RANK=one", "RANK: it is one, and must be a number"),
        ("127.0.0.1", "10.0.0.9", "MASTER_ADDR: it is 10.0.0.9, and this run's is 127.0.0.1"),
        (r"MASTER_PORT=\d+", "MASTER_PORT=1", "MASTER_PORT: it is 1, and this run's is"),
        ("/run'", "/other'", "no run waits for ranks here"),
    ],
)
def test_a_line_that_is_not_as_printed_is_refused_in_words(waiting, changed, to, words):
    refused = paste(re.sub(changed, to, waiting.lines[0]))
    said, _ = refused.communicate(timeout=20)
    assert (refused.returncode, said.startswith("error: ")) == (2, True), said
    assert words in said
    assert "Traceback" not in said


def test_a_rank_is_started_once(waiting):
    first = paste(waiting.lines[0])
    waiting.says("rank 0 came")
    again = paste(waiting.lines[0])
    said, _ = again.communicate(timeout=20)
    assert (again.returncode, said) == (
        2,
        "error: RANK: rank 0 is started already, in another terminal. Still missing: rank 1.\n",
    )
    assert first.poll() is None
    waiting.process.kill()  # by SIGKILL: those that wait for it go too
    assert first.wait(20) == 1
    late = paste(waiting.lines[1])
    said, _ = late.communicate(timeout=20)
    assert late.returncode == 2
    assert "no run waits for ranks here; it has ended" in said


def test_a_rank_that_never_comes_ends_the_run(tmp_path):
    run = Waiting(tmp_path / "run", timeout=2)
    there = paste(run.lines[0])
    assert run.process.wait(30) == 1
    error = run.process.stderr.read()
    assert "rank 1 of 2 was not started by hand within 2 s (hardware.timeout)" in error
    assert there.wait(20) == 1


def test_the_port_is_kept_for_the_ranks(waiting):
    other = Rendezvous(waiting.port)
    with pytest.raises(BadInput, match=f"hardware.port: {waiting.port} can't be used: Address already in use"):
        hand._kept_free(other)


def test_a_row_by_hand_is_of_one_machine_and_its_proof_waits_for_nobody(tmp_path):
    asked = {"device": "cpu", "nodes": 2, "processes": 1, "oversubscribe": True}
    config = reading.parse({"rows": {"x": {"strategy": "fsdp", "launcher": "hand"}}, "hardware": asked})
    with pytest.raises(BadInput, match=r"rows\.x\.launcher: hand: ranks are started by hand on one machine"):
        config.rows["x"].refuse()
    for made in (config.trial(config.rows["x"]), config.profiled(config.rows["x"])):
        command = made.command(tmp_path, Rendezvous(29500))
        assert "torch.distributed.run" in command


CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 8000, global_batch: 31, max_steps: 9, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 60, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  all_threads: null
  hand: {strategy: ddp, launcher: hand}
  long: {strategy: ddp, launcher: hand, max_steps: 30000}
  zero: {strategy: deepspeed, launcher: hand, stage: 2}
  accelerated: {strategy: accelerate, launcher: hand}
  fabric: {strategy: fabric, launcher: hand}
  trainer: {strategy: trainer, launcher: hand}
  fsdp: {strategy: fsdp, launcher: hand}
"""
FILES = ("--config=config/config.yaml", "--config=hand.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    copy = copy_project(tmp_path_factory.mktemp("hand") / "a project")
    copy.path("hand.yaml").write_text(CONFIG)
    copy.prepare(*FILES)
    return copy


@pytest.fixture
def begin(place):
    """Starts a run of a row, by launch.py; what still runs of it after the test is ended."""
    begun = []

    def start(row: str) -> "Run":
        begun.append(Run(place, row))
        return begun[-1]

    yield start
    for run in begun:
        run.process.kill()
        run.process.wait()


class Run:
    """launch.py, and the lines that it printed."""

    def __init__(self, place, row: str):
        command = ["python", "workflow/scripts/launch.py", *FILES, "--row", row]
        environment = place.environment()
        self.folder = place.path(f"results/runs/{row}/n2/rep1")
        (self.folder / paths.PROGRESS).unlink(missing_ok=True)  # of the test before
        self.process = subprocess.Popen(
            command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines, self.said = [], []
        while len(self.lines) < 2:
            line = self.process.stderr.readline()
            assert line, self.said
            self.said.append(line)
            self.lines += [line.strip()] if line.startswith("MASTER_ADDR=") else []

    def wait_for_step(self, step: int) -> None:
        file, deadline = self.folder / paths.PROGRESS, time.monotonic() + 240
        while time.monotonic() < deadline:
            table = np.fromfile(file, dtype=np.int64).reshape(-1, 5) if file.is_file() else np.zeros((1, 5))
            if len(table) and table[:, 2].min() >= step:
                self.pids = table[:, 0].tolist()
                return
            time.sleep(0.05)
        raise AssertionError("no rank came so far")

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=300)
        return self.process.returncode, said

    def nothing_is_left(self) -> None:
        deadline = time.monotonic() + 10
        while any(map(psutil.pid_exists, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(psutil.pid_exists, self.pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param("hand", marks=pytest.mark.ci), "zero", "accelerated", "fabric", "trainer", "fsdp"],
)
def test_ranks_that_a_person_starts_train_the_plan(begin, row):
    """In terminals where another launcher has left its variables; runs fail whose ledger is not the plan."""
    run = begin(row)
    time.sleep(3)
    pasted = time.monotonic()
    ranks = [paste(line, LOCAL_RANK="7", SLURM_NTASKS="9", OMP_NUM_THREADS="5") for line in run.lines]
    code, said = run.ended()
    assert code == 0, said
    for number, rank in enumerate(ranks):
        shown, _ = rank.communicate(timeout=20)
        assert rank.returncode == 0, shown
        assert f"rank {number} of 2: local rank {number}" in shown
        assert f"rank {number} of 2 is done" in shown
    made = json.loads((run.folder / paths.RECORD).read_text())
    assert made["steps"] == 9
    assert made["clock"]["first_step_seconds"] < made["wall_seconds"] < time.monotonic() - pasted
    assert json.loads((run.folder / paths.ENVIRONMENT).read_text())["variables"]["OMP_NUM_THREADS"] == "1"
    log = (run.folder / paths.LOG).read_text()
    assert run.lines[1] in log
    assert "rank 0 of 2: local rank 0" in log
    samples = [json.loads(line) for line in (run.folder / paths.WATCH).read_text().splitlines()]
    assert max(sample["run_cores"] for sample in samples) > 0.1  # the ranks count as the run's own


def close_terminal(run: Run) -> None:
    """Rank 1 in a real terminal, which is closed after a few steps."""
    other = paste(run.lines[0])
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever this test was started by
        os.execvpe("bash", ["bash", "-c", run.lines[1]], BARE)
    run.wait_for_step(5)
    os.close(terminal)
    run.outcome = run.ended()
    other.wait(20)
    os.waitpid(pid, 0)


def end_supervisor(run: Run, number: int) -> None:
    ranks = [paste(line) for line in run.lines]
    run.wait_for_step(5)
    run.process.send_signal(number)
    run.outcome = run.ended()
    for rank in ranks:
        said, _ = rank.communicate(timeout=20)
        assert rank.returncode == 1
        assert "has ended, as the run has" in said


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_run_which_says_so(begin):
    run = begin("long")
    close_terminal(run)
    code, said = run.outcome
    assert code == 1
    assert "closing the terminal of rank 1 ended the run" in said
    run.nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_which_says_so(begin):
    run = begin("long")
    ranks = [paste(line) for line in run.lines]
    run.wait_for_step(5)
    os.kill(run.pids[1], signal.SIGKILL)
    code, said = run.ended()
    assert code == 1
    assert "rank 1 was killed (SIGKILL), by hand or because memory ran out" in said
    for rank in ranks:
        shown, _ = rank.communicate(timeout=20)
        assert rank.returncode == 1
        assert "as the run has: rank 1 was killed (SIGKILL)" in shown
    run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_started_by_hand_end_with_the_run(begin, number):
    run = begin("long")
    end_supervisor(run, number)
    assert run.outcome[0] != 0
    run.nothing_is_left()
    with contextlib.suppress(FileNotFoundError):
        assert json.loads((run.folder / paths.FAILED).read_text())["reason"]
