"""Runs that meet: a folder is one run's at a time, a killed Snakemake or supervisor leaves nothing, and both say so."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.run import lifetime
from tests.conftest import HOROVOD, PROJECT, Workplace, copy_project

SCRIPTS = PROJECT / "workflow" / "scripts"
# Steps enough to be met in.
LONG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 8000, max_steps: 30000, global_batch: 31, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
"""
LONG_CONFIG = ["--config=config/config.yaml", "--config=long.yaml"]
HOLD = "import sys, time; from pathlib import Path; from lockstep.run import lifetime"


def python(program: str, folder: Path, **options) -> subprocess.Popen:
    """A process of its own, in which `folder` is a Path."""
    command = [sys.executable, "-c", f"{HOLD}\nfolder = Path({str(folder)!r})\n{program}"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def holder(folder: Path, seconds: float) -> subprocess.Popen:
    """A process that holds `folder` for so long; returned once it does."""
    process = python(f"with lifetime.hold(folder):\n    print('held', flush=True)\n    time.sleep({seconds})", folder)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_folder_is_refused_by_who_holds_it_since_when(tmp_path, monkeypatch):
    monkeypatch.setattr(lifetime, "LOCK_TIMEOUT_SECONDS", 0.2)
    process = holder(tmp_path, 60)
    said = rf"{tmp_path}: process {process.pid} has worked here since \d{{4}}-\S+ \S+. Wait for it, or end it: kill"
    with pytest.raises(BadInput, match=said), lifetime.hold(tmp_path):
        pass
    with pytest.raises(BadInput, match=said):
        lifetime.refuse_held([tmp_path])
    process.kill()
    process.wait()
    # Parity holds a folder, and so does the run in it.
    with lifetime.hold(tmp_path), lifetime.hold(tmp_path / "." / ""):
        assert json.loads((tmp_path / paths.LOCK).read_text())["pid"] == os.getpid()
    lifetime.refuse_held([tmp_path])


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path):
    process = holder(tmp_path, 1)
    with lifetime.hold(tmp_path):
        assert process.wait(timeout=1) == 0


@pytest.fixture(scope="module")
def without_locks(tmp_path_factory) -> dict[str, str]:
    """Variables with which a process meets a file system without locks: its flock(2) says so, or just says yes."""
    if not shutil.which("cc"):
        pytest.skip("needs: a C compiler")
    folder = tmp_path_factory.mktemp("flock")
    (folder / "flock.c").write_text(
        "#include <errno.h>\n#include <stdlib.h>\n"
        'int flock(int file, int what) { if (getenv("FLOCK_SAYS_YES")) return 0; errno = ENOSYS; return -1; }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "flock.so", "flock.c"], cwd=folder, check=True)
    return {"LD_PRELOAD": str(folder / "flock.so")}


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_that_would_meet_in_a_file_that_cant_be_locked_are_refused_before_they_wait(without_locks, tmp_path):
    place = copy_project(tmp_path / "project")
    place.path("short.yaml").write_text(LONG.replace("max_steps: 30000", "max_steps: 2"), encoding="utf-8")
    common = ["--config=config/config.yaml", "--config=short.yaml"]
    for script in ("prepare", "plan"):
        assert place.script(script, *common).returncode == 0
    common += ["--row", "ddp_spawn"]
    for variables, said in (
        ({}, "can't lock files (Function not implemented)"),
        ({"FLOCK_SAYS_YES": "1"}, "lets two processes lock one file at the same time"),
    ):
        refused = place.script("launch", *common, **without_locks, **variables)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
        assert "Set rendezvous: tcp in the row" in refused.stderr
    # What it says to do helps; and where there are locks nothing is refused.
    by_tcp = ["--set", "rows.ddp_spawn.rendezvous=tcp"]
    for sets, variables in ((by_tcp, without_locks), ([], {})):
        trained = place.script("launch", *common, *sets, **variables)
        assert trained.returncode == 0, trained.stderr


@pytest.mark.parametrize("supervisor", ["the one that holds it", "another"])
def test_a_rank_ends_with_its_supervisor(tmp_path, supervisor):
    """Whatever is between them, and also where it comes so late that the next run has begun."""
    process = holder(tmp_path, 60)
    named = {lifetime.SUPERVISOR: str(process.pid if supervisor != "another" else 1)}
    rank = python(f"import os; os.environ |= {named}; lifetime.end_with_holder(folder); time.sleep(60)", tmp_path)
    if supervisor != "another":
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=2)
        process.kill()
    assert rank.wait(timeout=5) == -signal.SIGKILL
    process.kill()
    process.wait()


def test_a_starter_that_ended_is_told_from_another_with_its_number(monkeypatch, tmp_path):
    monkeypatch.delenv(lifetime.STARTER, raising=False)
    assert not lifetime.starter_is_gone()  # nobody did: by hand
    program = "import os; lifetime.name_starter(); print(os.environ[lifetime.STARTER], flush=True); time.sleep(60)"
    starter = python(program, tmp_path)
    named = starter.stdout.readline().strip()
    monkeypatch.setenv(lifetime.STARTER, named)
    assert not lifetime.starter_is_gone()
    monkeypatch.setenv(lifetime.STARTER, named + "0")  # the number was given to another since
    assert lifetime.starter_is_gone()
    # In a container with numbers of its own.
    monkeypatch.setenv(lifetime.STARTER, f"pid:[1] {named.split(maxsplit=1)[1]}0")
    assert not lifetime.starter_is_gone()
    monkeypatch.setenv(lifetime.STARTER, named)
    starter.kill()
    time.sleep(0.5)
    assert lifetime.starter_is_gone()  # a zombie has ended
    starter.wait()
    assert lifetime.starter_is_gone()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    """A copy of the project in which rows take a while."""
    place = copy_project(tmp_path_factory.mktemp("ties"))
    place.path("long.yaml").write_text(LONG)
    place.prepare(*LONG_CONFIG)
    return place


@pytest.fixture(autouse=True)
def nothing_is_left_for_the_next_test(request):
    yield
    if "place" in request.fixturenames:
        for process in working_in(request.getfixturevalue("place")):
            process.kill()


def start(place: Workplace, *command: str, **options) -> subprocess.Popen:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen(command, cwd=place.folder, env=place.environment(), **options)


def launch(place: Workplace, row: str, *arguments: str, **options) -> subprocess.Popen:
    return start(place, "python", "workflow/scripts/launch.py", *LONG_CONFIG, "--row", row, *arguments, **options)


def steps(folder: Path) -> np.ndarray:
    """Of each rank: process id, things done, steps done. Empty before there are any."""
    file = folder / "progress"
    return np.fromfile(file, dtype=np.int64).reshape(-1, 5) if file.exists() else np.empty((0, 5), dtype=np.int64)


def training(folder: Path, seconds: float = 300) -> list[psutil.Process]:
    """The ranks of the run in `folder`, once each has done a step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        table = steps(folder)
        if len(table) and table[:, 2].min() >= 1 and all(psutil.pid_exists(int(pid)) for pid in table[:, 0]):
            return [psutil.Process(int(pid)) for pid in table[:, 0]]
        time.sleep(0.1)
    raise AssertionError((folder / "run.log").read_text() if (folder / "run.log").exists() else "it never began")


def below(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def working_in(place: Workplace) -> list[psutil.Process]:
    """All processes whose working directory is the place."""
    return [
        process
        for process in psutil.process_iter(["cwd", "status"])
        if process.info["cwd"] == str(place.folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def nothing_is_left(place: Workplace, seconds: float = 60) -> None:
    """Soon, whatever began while the others were ended; a rank that is importing ends when it has done that."""
    deadline = time.monotonic() + seconds
    while working_in(place) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [process.cmdline() for process in working_in(place)] == []


@pytest.mark.slow
def test_two_supervisors_of_one_row(place):
    """The second says who is there and leaves the files alone, also of what parity and profiles run."""
    folder = place.path("results/runs/ddp/n2/rep1")
    first = launch(place, "ddp")
    try:
        training(folder)
        before = {file: file.stat().st_ino for file in folder.rglob("*") if file.is_file()}
        second = launch(place, "ddp")
        said, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert said == said.splitlines()[0] + "\n"
        assert re.fullmatch(
            rf"error: results/runs/ddp/n2/rep1: process {first.pid} has worked here since \S+ \S+"
            rf" Wait for it, or end it: kill {first.pid}\n",
            said,
        )
        assert before.items() <= {file: file.stat().st_ino for file in folder.rglob("*") if file.is_file()}.items()
        assert first.poll() is None
        # Nor does Snakemake start, which would remove what it is to make anew.
        third = start(
            place, "snakemake", "--cores", "all", "ddp", "--configfile", "long.yaml", stdin=subprocess.DEVNULL
        )
        said, _ = third.communicate(timeout=60)
        assert third.returncode == 2, said
        assert f"error: results/runs/ddp/n2/rep1: process {first.pid} has worked here since" in said
        assert "Traceback" not in said
        assert list(place.path(".snakemake").glob("locks/*")) == []
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=30)
    assert working_in(place) == []


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("parity/reference_fp32/n1/rep1", ("parity", "--row=reference")),
        ("profile/single/n1/rep1", ("launch", "--row=single", "--profile", "--set=profile.steps=3")),
        ("runs/single/n1/rep1", ("launch", "--row=single")),
        ("tune", ("tune",)),
    ],
)
def test_every_kind_of_run_keeps_out_of_a_folder_that_is_held(place, folder, command):
    folder = place.path("results") / folder
    (folder / "native").mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text("somebody's")
    process = holder(folder, 120)
    try:
        finished = place.script(command[0], *LONG_CONFIG, *command[1:])
        assert finished.returncode == 2
        assert finished.stderr.count("\n") == 1
        assert f"process {process.pid} has worked here since" in finished.stderr
        assert (folder / "record.json").read_text() == "somebody's"
        assert (folder / "native").is_dir()
    finally:
        process.kill()
        process.wait()


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        return any(word.endswith("train.py") for word in words[1:3]) or "multiprocessing.spawn" in " ".join(words)
    return False


FRAMEWORKS = ["ddp", "accelerate", "deepspeed", "horovod", "fabric", "trainer"]


@pytest.mark.parametrize(
    "row", ["dataparallel", "ddp_spawn", *(pytest.param(row, marks=pytest.mark.slow) for row in FRAMEWORKS)]
)
@pytest.mark.parametrize("moment", ["training", "importing"])
def test_a_supervisor_that_is_killed_takes_everything_along(place, row, moment):
    if row == "horovod" and not HOROVOD:
        pytest.skip("Horovod is not installed: `make horovod` builds it")
    (folder,) = {place.path(f"results/runs/{row}/n{1 if row == 'dataparallel' else 2}/rep1")}
    (folder / "progress").unlink(missing_ok=True)
    supervisor = launch(place, row)
    if moment == "training":
        training(folder)
    else:
        deadline = time.monotonic() + 120
        while not any(map(is_rank, below(supervisor))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    supervisor.kill()
    supervisor.communicate()
    nothing_is_left(place)


def test_a_supervisor_in_the_background_outlives_its_shell(place):
    """`nohup python launch.py &`, then logging out: nobody wanted it to end."""
    folder = place.path("results/runs/ddp/n2/rep1")
    (folder / "progress").unlink(missing_ok=True)
    script = f"python workflow/scripts/launch.py {' '.join(LONG_CONFIG)} --row ddp"
    shell = start(place, "bash", "-c", f"nohup {script} > out.log 2>&1 & echo $!", start_new_session=True)
    said, _ = shell.communicate(timeout=30)
    supervisor = psutil.Process(int(said))
    training(folder)
    time.sleep(2)
    assert supervisor.is_running()
    assert supervisor.ppid() != shell.pid
    supervisor.send_signal(signal.SIGTERM)
    psutil.wait_procs([supervisor], timeout=20)
    assert "failed: ddp: the run was ended from outside (SIGTERM)" in place.path("out.log").read_text()
    assert working_in(place) == []


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("ddp", marks=[pytest.mark.slow, pytest.mark.ci]),
        *(pytest.param(row, marks=pytest.mark.slow) for row in ["single", *FRAMEWORKS[1:]]),
    ],
)
def test_a_killed_snakemake_leaves_nothing_and_carries_on_when_it_is_started_again(place, row):
    if row == "horovod" and not HOROVOD:
        pytest.skip("Horovod is not installed: `make horovod` builds it")
    folder = place.path(f"results/runs/{row}/n{1 if row == 'single' else 2}/rep1")
    (folder / "progress").unlink(missing_ok=True)
    asked = ("snakemake", "--cores", "all", f"train_{row}_1", "--configfile", "long.yaml")
    asked += ("--config", "train={checkpoint_every: 50}")
    snakemake = start(place, *asked, stdin=subprocess.DEVNULL)
    training(folder)
    deadline = time.monotonic() + 60
    while not paths.saved_states(folder):
        assert time.monotonic() < deadline, "it saves no state"
        time.sleep(0.1)
    snakemake.kill()
    snakemake.communicate()
    nothing_is_left(place)
    reason = json.loads((folder / "failed.json").read_text())["reason"]
    assert reason == "Snakemake, which had started the run, was ended"

    locked = start(place, *asked, stdin=subprocess.DEVNULL)
    said, _ = locked.communicate(timeout=60)
    assert locked.returncode == 1
    assert "--unlock" in said
    unlocked = start(place, *asked, "--unlock", stdin=subprocess.DEVNULL)
    assert unlocked.wait(timeout=60) == 0
    again = start(place, *asked, stdin=subprocess.DEVNULL)
    (folder / "progress").unlink(missing_ok=True)
    training(folder)
    assert json.loads((folder / "settings.json").read_text())["saved"].startswith(
        f"{folder.relative_to(place.folder)}/"
    )
    again.send_signal(signal.SIGINT)
    for supervisor in psutil.Process(again.pid).children():
        supervisor.send_signal(signal.SIGINT)  # as a terminal would
    again.communicate(timeout=60)
    assert working_in(place) == []


def test_a_second_snakemake_is_one_message(place):
    first = start(place, "snakemake", "--cores", "all", "train_single_1", "--configfile", "long.yaml")
    folder = place.path("results/runs/single/n1/rep1")
    (folder / "progress").unlink(missing_ok=True)
    training(folder)
    second = start(place, "snakemake", "--cores", "all", "train_single_1", "--configfile", "long.yaml")
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "Traceback" not in said
    assert "Directory cannot be locked" in said
    assert first.poll() is None
    first.kill()
    first.communicate()
    nothing_is_left(place)
