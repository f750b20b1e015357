"""The converted model is sealed like the checkpoint; a truncated or changed file gives a one-line message."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.files import read_json, seal, write_json
from lockstep.model import models
from lockstep.proof import fairness
from tests import made
from tests.conftest import PROJECT

SMALL = ["data.limit=100", "model.hidden_size=8", "model.layers=1", "model.heads=1"]
RUN = Path("results/runs/single/n1/rep1")
MODEL = RUN / "model" / "model.safetensors"


@pytest.fixture
def script(run_script):
    """Run a script in a folder with a converted run of `single`, whose weights are the initial ones."""
    assert run_script("prepare", *(word for value in SMALL for word in ("--set", value)))[0] == 0
    (RUN / "native").mkdir(parents=True)
    state = models.load(Path("results/data/weights")).state_dict()
    torch.save(state, RUN / "native" / "checkpoint.pt")
    seal(RUN / "native", {"weights": models.hash_weights(state)})
    about = {"task": "text-classification", "strategy": "single", "data": "results/data"}
    (RUN / "settings.json").write_text(json.dumps(about))
    code, _, said = run_script("convert", str(RUN))
    assert code == 0, said
    return run_script


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def unsealed(file: Path) -> None:
    (file.parent / "manifest.json").unlink()


COMMANDS = {
    "one model": ["predict", "--model", str(RUN / "model"), "--text", "今天真开心"],
    "all models": ["predict", *(word for value in [*SMALL, "predict.count=1"] for word in ("--set", value))],
    "test": ["test", str(RUN)],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_model_as_it_was_converted(script, command):
    code, _, said = script(*COMMANDS[command])
    assert (code, said) == (0, "")


@pytest.mark.parametrize("spoil", [flip, cut, unsealed])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_notices_a_model_that_changed(script, command, spoil):
    spoil(MODEL)
    code, _, said = script(*COMMANDS[command])
    assert (code, said.count("\n")) == (1, 1), said
    what = f"{MODEL}: is missing or has changed since it was written."
    if spoil is unsealed:
        what = f"{RUN / 'model'}: holds no manifest.json, so it is not complete."
    assert said == f"failed: {what} Make it again: python workflow/scripts/convert.py {RUN}\n"


def test_a_model_that_changed_is_a_breach(script):
    """check.py reports it."""
    assert list(fairness.sealed(RUN, {}, Path("results"))) == []
    flip(MODEL)
    (breach,) = fairness.sealed(RUN, {}, Path("results"))
    assert breach == f"its model is not as it was written: {MODEL}: is missing or has changed since it was written."
    shutil.rmtree(RUN / "model")
    flip(RUN / "native" / "checkpoint.pt")
    (breach,) = fairness.sealed(RUN, {}, Path("results"))
    assert breach.startswith("its native is not as it was written")


def test_a_model_that_lockstep_did_not_make_needs_no_seal(script, tmp_path):
    shutil.copytree(RUN / "model", tmp_path / "theirs", ignore=shutil.ignore_patterns("manifest.json"))
    command = ["predict", "--model", str(tmp_path / "theirs"), "--text", "今天真开心"]
    assert script(*command)[0] == 0
    cut(tmp_path / "theirs" / "model.safetensors")
    code, _, said = script(*command)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {tmp_path / 'theirs'}: can't be read as a model: ")


def test_a_place_that_can_not_be_written_is_named(run_script):
    code, _, said = run_script("prepare", "--results", "config/config.yaml/x")
    assert (code, said) == (2, "error: config/config.yaml/x: Not a directory. Name a folder that can be written.\n")


@pytest.mark.parametrize("name", ["convert", "prepare"])
def test_without_room_on_the_disk_the_file_is_named(script, name):
    """The script runs in a new process, whose files may not exceed 2,000 bytes."""
    before = sorted(Path("results").rglob("*"))
    command = [sys.executable, str(PROJECT / "workflow" / "scripts" / f"{name}.py")]
    finished = subprocess.run(
        [*command, *([str(RUN)] if name == "convert" else ["--set", "data.limit=90"])],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
        capture_output=True,
        text=True,
        check=False,
    )
    said = finished.stderr
    assert (finished.returncode, said.count("\n")) == (1, 1), said
    assert said.startswith(f"failed: {RUN / 'model' if name == 'convert' else 'results/data'}: can't be written: ")
    assert said.endswith(f"{os.strerror(errno.EFBIG)}. Make room, and start again.\n")
    if name == "convert":
        assert sorted(Path("results").rglob("*")) == before  # no incomplete file, and none lost


def test_a_model_is_neither_tested_nor_made_with_other_data_than_its_own(script):
    """The test split of another division holds samples that it was trained on."""
    about = read_json(Path("results/data/data.json"))
    hashes = {"data": about["hash"], "weights": about["weights"], "plan": 64 * "0"}
    write_json(RUN / "record.json", made.raw(hashes=hashes))
    assert script("test", str(RUN))[0] == 0
    again = (word for value in [*SMALL, "data.seed=1"] for word in ("--set", value))
    assert script("prepare", *again)[0] == 0
    for command in ("test", "convert"):
        code, _, said = script(command, str(RUN))
        assert (code, said.count("\n")) == (2, 1), said
        assert f"error: {RUN}: was trained with other data" in said
