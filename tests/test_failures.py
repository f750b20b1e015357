"""What users do wrong, with real processes: each ends with one clear message, soon, and nothing is left behind.

What goes wrong of itself, under each strategy, is in test_faults.py.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import SMALL, Workplace, copy_project

# Long enough that a fault can be timed, on the data that the benchmark's folder already holds.
LONG = """
train: {epochs: 400, max_steps: 3000, eval_every: 0, checkpoint: last}
rows:
  slow_ddp: {strategy: ddp}
"""
LONG_CONFIG = [f"--config={file}" for file in ("config/config.yaml", "small.yaml", "long.yaml")]


@pytest.fixture(scope="module")
def place(benchmark) -> Workplace:
    benchmark.path("long.yaml").write_text(LONG)
    finished = benchmark.script("plan", *LONG_CONFIG)
    assert finished.returncode == 0, finished.stderr
    return benchmark


def start(place: Workplace, row: str, *, steps: int = 20):
    """Start a row's long run; returns the supervisor, and its ranks' process ids once they have done some steps."""
    folder = place.path(f"results/runs/{row}/n2/rep1")
    (folder / "progress").unlink(missing_ok=True)
    supervisor = subprocess.Popen(
        ["python", "workflow/scripts/launch.py", *LONG_CONFIG, "--row", row],
        cwd=place.folder, env=place.environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "progress").exists():
            table = np.fromfile(folder / "progress", dtype=np.int64).reshape(-1, 5)
            if len(table) and table[:, 2].min() >= steps:
                return supervisor, [psutil.Process(int(pid)) for pid in table[:, 0]], folder
        time.sleep(0.05)
    raise AssertionError((folder / "run.log").read_text())


def ended(supervisor, ranks, folder, seconds: float) -> str:
    """Waits for the end, which must come within `seconds`; returns the reason that was written down."""
    began = time.monotonic()
    descendants = psutil.Process(supervisor.pid).children(recursive=True)
    _, said = supervisor.communicate(timeout=60)
    assert time.monotonic() - began < seconds
    assert supervisor.returncode == 1, said
    _, alive = psutil.wait_procs([*ranks, *descendants], timeout=2)
    assert not alive
    reason = json.loads((folder / "failed.json").read_text())["reason"]
    assert (
        said.strip().splitlines()[-1]
        == f"failed: {folder.parts[-3]}: {reason} (log: results/{'/'.join(folder.parts[-4:])}/run.log)"
    )
    assert "Traceback" not in said
    assert not (folder / "record.json").exists()
    return reason


def test_ctrl_c_ends_the_run(place):
    supervisor, ranks, folder = start(place, "slow_ddp")
    supervisor.send_signal(signal.SIGINT)
    assert ended(supervisor, ranks, folder, seconds=8) == "interrupted"


def test_a_killed_supervisor_takes_its_ranks_along(place):
    supervisor, ranks, _ = start(place, "slow_ddp")
    descendants = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.kill()
    supervisor.communicate(timeout=10)
    _, alive = psutil.wait_procs([*ranks, *descendants], timeout=5)
    assert not alive


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Workplace:
    place = copy_project(tmp_path_factory.mktemp("fresh"))
    place.path("small.yaml").write_text(SMALL, encoding="utf-8")
    return place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "train={lerning_rate: 1}"], "train.lerning_rate: unknown key. Did you mean learning_rate?"),
        (["--config", "rows={x: {strategy: dpp}}"], "rows.x.strategy: 'dpp' is not one of"),
        (["--config", "data={path: nothing.json}"], "data.path: nothing.json does not exist"),
        (["--config", "hardware={device: cpu, processes: 999}"], "hardware.processes: 999, but there are"),
        (["--config", "hardware={device: cpu, backend: nccl}"], "backend: nccl works between GPUs only"),
        (["-n", "--config", "train={accumulation: 100}"], "rows.single.global_batch: 64 samples can't be shared by"),
        (["-n", "--config", "hardware={backend: mpi}"], "hardware.backend: 'mpi' is not one of auto, gloo, nccl"),
        (["-n", "--config", "train={learning_rate: nan}"], "train.learning_rate: nan is not a finite number"),
        (["-n", "--config", "model={heads: 3, hidden_size: 65}"], "model.heads: 3 heads can't share"),
        (["-n", "--directory", "tests"], "tests, which is not Lockstep's folder. Start it there: cd /"),
        (["--use-singularity"], "or run without containers"),
    ],
)
def test_snakemake_refuses_before_anything_runs(fresh, arguments, message):
    finished = fresh.snakemake("--cores", "1", *arguments)
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert finished.returncode == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in finished.stderr
    assert not fresh.path("results").exists()


def test_a_bad_row_is_shown_where_snakemake_stops(fresh):
    fresh.path("bad.json").write_text('[["好", 0], ["", 1]]')
    finished = fresh.snakemake("--cores", "1", "--config", "data={path: bad.json}")
    assert finished.returncode == 1
    assert "error: bad.json, row 2: the text is empty. Remove the row." in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not fresh.path("results/data/data.json").exists()
    assert not list(fresh.path("results").rglob("*.tmp"))


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("prepare", ["--config", "nothing.yaml"], "nothing.yaml: No such file or directory"),
        ("prepare", ["--set", "train.epochs"], "--set train.epochs: expected key=value"),
        ("prepare", ["--set", "=3"], "--set =3: expected key=value"),
        ("plan", [], "data.json does not exist. Run workflow/scripts/prepare.py first."),
        (
            "launch",
            ["--row", "nothing"],
            "--row nothing: no such row. The configuration has: single, all_threads, dataparallel",
        ),
        ("launch", ["--row", "ddp", "--set", "train.clip=nan"], "train.clip: nan is not a finite number"),
        ("launch", ["--row", "ddp"], "data.json does not exist. Run workflow/scripts/prepare.py first."),
        ("convert", ["results/runs/x"], "results/runs/x: is not a folder of a run"),
        ("evaluate", ["results/runs/x"], "results/runs/x: is not a folder of a run"),
        ("test", ["results/runs/x"], "results/runs/x/model: is not a model folder"),
        ("predict", ["--model", "x", "--text", "好"], "x: is not a model folder"),
        ("predict", ["--model", "x"], "--model needs a text or an image too"),
        ("predict", ["--model", "x", "--text", " "], "--text: the text is empty"),
        ("report", [], "data.json does not exist. Run workflow/scripts/prepare.py first."),
    ],
)
def test_scripts_refuse_in_one_line(run_script, script, arguments, message):
    about_one_run = script in ("convert", "evaluate", "test")
    exit_code, _, said = run_script(script, *([] if about_one_run else ["--results", "elsewhere"]), *arguments)
    assert exit_code == 2
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not Path("elsewhere").exists()


def test_a_model_that_cannot_be_had_is_one_message(fresh):
    model = ["--set", "model.name=nobody/nothing", "--set", "model.revision=1"]
    finished = fresh.script("prepare", "--results", "elsewhere", *model, HF_HUB_OFFLINE="1")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: model.name: nobody/nothing at revision 1 can't be loaded")
    assert finished.stderr.count("\n") == 1
    assert not fresh.path("elsewhere/data").exists()


def interrupted(place: Workplace, command: list[str], ready) -> tuple[int, list[str]]:
    """Sends Ctrl-C to a command as soon as it is `ready(process, what it said)`: how it ended, and its last words."""
    log = place.path("said.txt")
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=place.folder, env=place.environment(), stdout=stream, stderr=stream)
        deadline = time.monotonic() + 120
        while not ready(process, log.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=180), log.read_text().splitlines()


@pytest.mark.parametrize("name", ["prepare", "predict"])
def test_ctrl_c_while_a_script_imports_is_a_word(fresh, name):
    """That is what takes a script longest, and when people see their mistake."""

    def imports(process, said: str) -> bool:
        return "numpy" in Path(f"/proc/{process.pid}/maps").read_text()

    code, said = interrupted(fresh, ["python", f"workflow/scripts/{name}.py"], imports)
    assert code in (130, -signal.SIGINT)
    assert said == ["interrupted"]


def test_ctrl_c_while_snakemake_looks_what_to_do_is_a_word(fresh):
    command = ["snakemake", "--cores", "1", "--configfile", "small.yaml"]
    # Snakemake's own view, which says when that is
    command = ["env", "LOCKSTEP_VIEW=snakemake", *command]
    code, said = interrupted(fresh, command, lambda process, said: "Building DAG of jobs" in said)
    assert code == -signal.SIGINT
    assert (said[-1], [line for line in said if "Traceback" in line]) == ("interrupted", [])


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_while_a_row_is_trained_ends_with_130_and_the_report(fresh):
    """Snakemake itself would end with 1, and the predictions would ask for a model to be trained first."""
    command = ["snakemake", "--cores", "all", "--configfile", "small.yaml", "--config", "train={epochs: 500}"]
    trains = fresh.path("results/runs/single/n1/rep1/progress")
    code, said = interrupted(fresh, [*command, "--until", "train_single_1"], lambda process, said: trains.is_file())
    assert code == 130, said
    assert "interrupted: running jobs are ended, then follows the report on the results so far" in said
    assert "report: results/report/report.html" in said
    told = " ".join(said)
    assert "Train one first" not in told
    assert "WorkflowError" not in told
    assert "Traceback" not in told


def test_ctrl_c_while_an_event_loop_is_made_is_a_word(fresh):
    """Python complains of what is half made, when it takes it away, after the last words of the program."""
    program = """import sys
sys.path.insert(0, "workflow/scripts")
import asyncio.selector_events, lockstep

def cut_off(loop):
    raise KeyboardInterrupt

asyncio.selector_events.BaseSelectorEventLoop._make_self_pipe = cut_off
asyncio.new_event_loop()
"""
    finished = subprocess.run(["python", "-c", program], cwd=fresh.folder, env=fresh.environment(), capture_output=True)
    assert (finished.returncode, finished.stderr.decode()) == (-signal.SIGINT, "interrupted\n")
