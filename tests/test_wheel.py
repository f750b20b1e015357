"""`pip install .`: the API and the commands that need no clone, in an environment without PyTorch."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from lockstep.records import packing
from tests.conftest import PROJECT
from tests.script.test_gate import TRAIN

NOTEBOOK = PROJECT / "docs" / "notebook.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.ci]


def pip(python: Path | str, *words: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(PROJECT))
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """The folder of programs of an environment that has the wheel, with the versions that are pinned here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip(folder / "bin/python", "install", "-c", str(PROJECT / "requirements.txt"), str(wheel))
    return folder / "bin"


def run(place: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "MPLBACKEND": "Agg"} | variables
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_it_has_the_whole_package_and_neither_weights_nor_compiled_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(file.relative_to(PROJECT / "workflow/scripts"))
        for file in PROJECT.glob("workflow/scripts/lockstep/**/*.py")
    }
    studies = [file for file in PROJECT.glob("workflow/studies/**/*.*") if file.suffix != ".pyc"]
    package |= {f"lockstep/_project/{file.relative_to(PROJECT)}" for file in studies}
    assert package <= names
    assert not [name for name in names if name.endswith((".pyc", ".safetensors", ".pt"))]
    assert wheel.stat().st_size < 1_000_000


def test_the_notebook_runs_without_pytorch(benchmark, environment, tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells), "what it printed on some machine is not kept"
    told = 'import sys; assert not {"torch", "transformers", "datasets"} & set(sys.modules); print(r.pictures)'
    (tmp_path / "cells.py").write_text("\n".join([*code, told]), encoding="utf-8")
    results = str(benchmark.path("results"))
    done = run(tmp_path, str(environment / "python"), "cells.py", LOCKSTEP_RESULTS=results)
    assert done.returncode == 0, done.stderr
    assert "train_seconds" in done.stdout


def test_commands_that_need_no_clone_work_and_others_say_that_they_need_one(benchmark, environment, tmp_path):
    lockstep = str(environment / "lockstep")
    assert "lockstep gate" in run(tmp_path, lockstep, "--help").stdout
    (tmp_path / "x.record").write_bytes(packing.pack(benchmark.path("results")).content)
    shared = run(tmp_path, lockstep, "record", "check", "x.record")
    assert shared.returncode == 1, shared.stderr
    assert "breaches" in shared.stdout
    judged = run(tmp_path, lockstep, "check", str(benchmark.path("results")))
    assert judged.returncode == 1
    assert "exploding" in judged.stdout
    for command in ("bench", "predict"):
        refused = run(tmp_path, lockstep, command)
        assert (refused.returncode, "in a clone" in refused.stderr) == (2, True)
    (tmp_path / "train.py").write_text(
        TRAIN.replace("from model import network", "network = lambda: torch.nn.Linear(16, 4)"), encoding="utf-8"
    )
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    proven = run(tmp_path, lockstep, "prove", "--against", "python train.py", "--", "python", "train.py", PATH=here)
    assert proven.returncode == 0, proven.stdout + proven.stderr
    assert "both scripts did the same" in proven.stdout


def test_in_a_clone_it_starts_the_clone_s_own_command(environment):
    shown = run(PROJECT, str(environment / "lockstep"), "completion")
    assert "_lockstep" in shown.stdout, shown.stderr
