"""Each strategy's whole script (docs/scripts) starts as its docstring says, and trains the same model as one device."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from tests.script.test_prove import HOROVOD, started

FILES = sorted((PROJECT / "docs" / "scripts").glob("*.py"))
UNTOLD = ("single", "dataparallel", "tp", "pp", "cp")  # one process, or ranks that divide layers or texts
OTHER_MODEL = ("local_sgd", "diloco")


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
    (name,) = (Path(word).stem for word in command if word.endswith(".py"))
    other = name in OTHER_MODEL
    assert done.returncode == (3 if name in UNTOLD else int(other)), done.stdout + done.stderr
    assert ("- different: gradients are not averaged over ranks" in done.stdout) == other
    assert ("different" in done.stdout) == other
    assert "caution" not in done.stdout


def trained(folder: Path, script: str, ranks: int) -> dict[str, torch.Tensor]:
    """The weights that a script saves, by this number of ranks in a folder of its own."""
    folder.mkdir()
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "script.py"]
    done = started(command, folder)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "model.pt")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-6, rtol=0)


def script_of(name: str, **other: str) -> str:
    """The text of a script with some of it replaced, by the names in REPLACED."""
    text = (PROJECT / "docs" / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    for what, by in other.items():
        assert text.count(REPLACED[what]) == 1
        text = text.replace(REPLACED[what], by)
    return text


REPLACED = {"optimizer": "AdamW(model.parameters(), lr=1e-3)", "outer": "lr=0.7, momentum=0.9, nesterov=True"}
REPLACED |= {"every": "EVERY = 8", "outer_every": "EVERY = 16"}
SGD = "SGD(model.parameters(), lr=0.1)"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", "pp", "cp"])
def test_ranks_that_divide_a_model_train_what_one_does(name, tmp_path):
    assert_same(*(trained(tmp_path / str(ranks), script_of(name), ranks) for ranks in (1, 2)))


@pytest.mark.slow
def test_local_steps_are_those_of_ddp_where_they_are_averaged_each_time(tmp_path):
    """A mean of weights is then one step along the mean gradient, if the optimizer is plain SGD."""
    ddp = trained(tmp_path / "ddp", script_of("ddp", optimizer=SGD), 2)
    assert_same(ddp, trained(tmp_path / "local", script_of("local_sgd", optimizer=SGD, every="EVERY = 1"), 2))
    seldom = trained(tmp_path / "seldom", script_of("local_sgd", optimizer=SGD), 2)
    with pytest.raises(AssertionError):
        assert_same(ddp, seldom)
    # An outer step of rate 1 without momentum goes to the mean of the weights.
    outer = script_of("diloco", optimizer=SGD, outer="lr=1.0", outer_every="EVERY = 8")
    assert_same(seldom, trained(tmp_path / "outer", outer, 2))


def test_show_prints_a_script():
    command = [sys.executable, "workflow/scripts/show.py", "ddp", "--script"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == (PROJECT / "docs" / "scripts" / "ddp.py").read_text(encoding="utf-8")
    assert done.stderr == "note: the benchmark starts each process of ddp with OMP_NUM_THREADS=1\n"
    other = ["x", "--set", "rows.x={strategy: published_ddp}", "--script"]
    none = subprocess.run([*command[:2], *other], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert none.returncode == 2
    assert "--script: there is none for published_ddp. There are: accelerate, cp, dataparallel," in none.stderr
    no_row = subprocess.run([*command[:2], "tp", "--script"], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert no_row.stdout == (PROJECT / "docs" / "scripts" / "tp.py").read_text(encoding="utf-8")
