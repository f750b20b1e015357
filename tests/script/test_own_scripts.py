"""Each strategy's whole script (docs/scripts) starts as its docstring says, and trains the same model as one device."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import PROJECT
from tests.script.test_prove import HOROVOD, started

FILES = sorted((PROJECT / "docs" / "scripts").glob("*.py"))
ALONE = ("single", "dataparallel")  # one process


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def command(request, tmp_path) -> list[str]:
    """The command in a script's docstring, for the script in the test's folder."""
    if request.param.stem == "with_horovod" and not HOROVOD:
        pytest.skip("needs: make horovod")
    shutil.copy(request.param, tmp_path)
    return shlex.split(re.search(r"Start it by: (.*?)(?:\"\"\")?$", request.param.read_text(), re.MULTILINE)[1])


@pytest.mark.slow
def test_a_script_starts_as_it_says_and_leaves_its_model(command, tmp_path):
    done = started(command, tmp_path)
    assert done.returncode == 0, done.stderr
    made = {file.name for file in tmp_path.iterdir()} - {file.name for file in FILES} - {"__pycache__"}
    assert len(made) == 1, made
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?(\d\.\d+)", done.stdout)]
    assert losses


@pytest.mark.slow
def test_a_script_is_proven(command, tmp_path):
    words = [sys.executable, str(PROJECT / "workflow" / "scripts" / "prove.py"), "--", *command]
    done = started(words, tmp_path)
    alone = any(f"{name}.py" in command for name in ALONE)
    assert done.returncode == (3 if alone else 0), done.stdout + done.stderr
    assert "different" not in done.stdout
    assert "caution" not in done.stdout


def test_show_prints_a_script():
    command = [sys.executable, "workflow/scripts/show.py", "ddp", "--script"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == (PROJECT / "docs" / "scripts" / "ddp.py").read_text(encoding="utf-8")
    other = ["x", "--set", "rows.x={strategy: local_sgd}", "--script"]
    none = subprocess.run([*command[:2], *other], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert none.returncode == 2
    assert "--script: there is none for local_sgd. There are: accelerate, dataparallel, ddp," in none.stderr
