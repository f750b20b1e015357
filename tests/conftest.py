"""One small benchmark, run once as a user runs it, whose results many tests look at."""

import collections
import importlib.util
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from lockstep.paths import PROJECT
from tests import fork_server

# A property holds or not; how long an example took says how busy the machine was.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Started in the background by a shell, this process ignores SIGINT, as would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As lockstep.cli has it for the commands; here some test may import the libraries that read it before that.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

HOROVOD = importlib.util.find_spec("horovod") is not None  # where it can't be built, its row is unavailable
REAL_DATA = PROJECT.parent / "shared" / "data" / "emotion" / "emotion-10k.json"

# Small, without dropout, and with an odd batch that two processes can't share evenly. `exploding` is meant to fail.
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0}
train: {epochs: 1, global_batch: 31, max_steps: 9, eval_every: 4, warmup: 2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
predict: {count: 2, label: 高兴}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  all_threads: null
  exploding: {strategy: single, learning_rate: 1.0e+30, clip: 0}
"""
# More rows over the same data and plan, trained one by one.
MORE = """
rows:
  ddp_launch: {strategy: ddp, launcher: launch}
  ddp_tcp: {strategy: ddp_spawn, rendezvous: tcp, port: 29555, processes: 3, accumulation: 2}
  single_fp16: {strategy: single, precision: fp16}
"""


PROFILED = ("--configfile", "small.yaml", "--config", "profile={steps: 3, trace: true}")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too, and would come first
def pytest_collection_modifyitems(items):
    """What looks at the results of a whole benchmark is left to CI and `make test-slow`: that alone takes minutes.

    Of pytest's workers one makes that benchmark, and has all these tests; the others have each file as a whole, for the
    fixtures that its tests share, and for tests that follow from each other. What takes longest begins first, or one
    worker would be busy with it after all the others are done.
    """
    groups, slow = {}, collections.Counter()
    for item in items:
        wants_benchmark = "benchmark" in getattr(item, "fixturenames", ())
        groups[item] = "benchmark" if wants_benchmark else item.path.stem
        item.add_marker(pytest.mark.xdist_group(groups[item]))
        if wants_benchmark and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.ci)
        slow[groups[item]] += item.get_closest_marker("slow") is not None
    number = collections.Counter(groups.values())
    items.sort(key=lambda item: (groups[item] != "benchmark", -slow[groups[item]], -number[groups[item]], groups[item]))


@dataclass
class Workplace:
    """A copy of the project in which commands are run as a user would."""

    folder: Path
    in_forks: bool = True

    def run(self, *command: str, timeout: float = 300, stdin=None, **environment: str) -> subprocess.CompletedProcess:
        """Run a command of the project's environment in the copy; output is captured."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment() | environment,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONWARNINGS": ""}

    def script(self, name: str, *arguments: str, timeout: float = 300, **options) -> subprocess.CompletedProcess:
        """Run a script, in a fork (tests/fork_server.py) unless there are options, or launching is tested."""
        script = f"workflow/scripts/{name}.py"
        if self.in_forks and not options:
            return fork_server.run(script, arguments, self.folder, self.environment(), timeout)
        return self.run("python", script, *arguments, timeout=timeout, **options)

    def prepare(self, *arguments: str) -> None:
        """Prepare the data and the plans, as every training needs them."""
        for name in ("prepare", "plan"):
            finished = self.script(name, *arguments)
            assert finished.returncode == 0, finished.stdout + finished.stderr

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.run("snakemake", *arguments, timeout=2400)

    def path(self, relative: str) -> Path:
        return self.folder / relative


def copy_project(folder: Path) -> Workplace:
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for file in files:
        if (PROJECT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / file, folder / file)
    return Workplace(folder)


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory) -> Workplace:
    """A copy of the project after `snakemake --cores all` over SMALL; `first_run` is how that went."""
    place = copy_project(tmp_path_factory.mktemp("project"))
    place.path("small.yaml").write_text(SMALL, encoding="utf-8")
    place.path("more.yaml").write_text(MORE, encoding="utf-8")
    place.began = time.time()
    place.first_run = place.snakemake("--cores", "all", "--configfile", "small.yaml")
    # Two profiles, for the report; a slow test has those of all rows.
    place.snakemake("--cores", "all", "profile_single", "profile_ddp", *PROFILED)
    place.script("report", "--config=results/config.yaml")
    return place


@pytest.fixture(scope="session")
def train_more(benchmark):
    """Trains a row of MORE in the benchmark's folder, once, and returns its record."""
    done = {}

    def train(row: str) -> dict:
        if row not in done:
            with socket.socket() as occupied:  # the port that ddp_tcp asks for
                occupied.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                occupied.bind(("127.0.0.1", 29555))
                occupied.listen()
                configs = [f"--config={file}" for file in ("config/config.yaml", "small.yaml", "more.yaml")]
                finished = benchmark.script("launch", *configs, "--row", row)
            assert finished.returncode == 0, finished.stderr
            (record,) = benchmark.path("results/runs").glob(f"{row}/n*/rep1/record.json")
            done[row] = json.loads(record.read_text()) | {"stderr": finished.stderr}
        return done[row]

    return train


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """Runs a script in this process (which spares imports), in an empty folder; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT / "config", tmp_path / "config")

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROJECT / "workflow" / "scripts" / f"{name}.py"), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run
