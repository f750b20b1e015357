"""What comes from others runs nothing: no configuration file, no checkpoint, no model."""

import asyncio
import json
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from snakemake.exceptions import print_exception
from snakemake.logging import logger

from lockstep import inside_snakemake, trust
from lockstep.config import registry
from lockstep.errors import BadInput
from lockstep.files import seal
from lockstep.model import encoders
from tests.conftest import PROJECT, Workplace, copy_project
from tests.data.test_data import scratch

PROGRAM = """
"__use\\x5fyte__": true
__definitions__:
  - open("marker", "w").write("it ran")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    return copy_project(tmp_path_factory.mktemp("project"))


def test_a_configuration_file_can_not_run_python(place):
    place.path("program.yaml").write_text(PROGRAM)
    finished = place.snakemake(
        "--dry-run", "--config", "repeats=1", "--configfile", "config/emotion.yaml", "program.yaml"
    )
    assert finished.returncode == 2
    said = "error: program.yaml: __use_yte__ would run Python from this file. Remove that line."
    assert finished.stderr.splitlines()[1:] == [said]  # the first is Snakemake's, about the profile
    assert not place.path("marker").exists()


def test_the_default_configuration_can_not_either(tmp_path):
    place = copy_project(tmp_path)
    place.path("config/config.yaml").write_text(PROGRAM)
    finished = place.snakemake("--dry-run")
    assert (finished.returncode, place.path("marker").exists()) == (2, False)
    assert "error: config/config.yaml: __use_yte__ would run Python from this file." in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--configfiles=program.yaml"], "program.yaml: __use_yte__ would run Python"),
        (["-n", "--config", "a=1", "--configfile", "fine.yaml", "program.yaml"], "program.yaml: __use_yte__ would run"),
        (["--config", "data.limit=600"], "accepts no dots in a key. Write: --config 'data={limit: 600}'"),
        (["-C", "data.splits.train=.9", "-n"], "Write: --config 'data={splits: {train: .9}}'"),
        (["--configfile", "octal.yaml"], "octal.yaml, line 2: 064: YAML reads it as 52 (octal). Write 64"),
        (["--configfile", "missing.yaml"], "missing.yaml: No such file or directory. Name an existing"),
        (["--configfile", "broken.yaml"], "broken.yaml: not valid YAML: "),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    texts = {"program": PROGRAM, "fine": "repeats: 1", "broken": "data: [", "octal": "train:\n  max_steps: 064"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        trust.check_command(arguments)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n"), said[:7]) == (2, 1, "error: ")
    assert message in said


def test_started_elsewhere_snakemake_says_so(tmp_path):
    finished = Workplace(tmp_path).snakemake("--dry-run", "--snakefile", str(PROJECT / "Snakefile"))
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[1:] == [
        "error: Snakemake was started elsewhere; start it in Lockstep's folder, beside the Snakefile."
    ]


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return subprocess.call, (["touch", str(self.marker)],)


# Every file that a framework's checkpoint may consist of, so that each strategy finds those that it looks for.
CHECKPOINT = ["checkpoint.pt", ".metadata", "final/mp_rank_00_model_states.pt"]
SHARDS = ["final/zero_pp_rank_0_mp_rank_00_model_states.pt", "final/zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.fixture
def marker(tmp_path) -> Path:
    """What must not be there in the end; an unpickler that is not careful makes it."""
    marker = tmp_path / "marker"
    torch.save({"module": Evil(marker)}, tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert marker.exists()
    marker.unlink()
    return marker


@pytest.mark.parametrize("files", [CHECKPOINT, CHECKPOINT + SHARDS], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", ["zip", "pickle"])
@pytest.mark.parametrize("strategy", registry.names())
def test_no_strategy_unpickles_what_may_run_something(run_script, tmp_path, marker, strategy, kind, files):
    """Sealed with the right hashes, as somebody who means harm would seal it."""
    run, evil = tmp_path / "run", {"module": Evil(marker), "optimizer_state_dict": {}}
    torch.save(evil, tmp_path / "evil.pt")
    for file in (run / "native" / name for name in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((tmp_path / "evil.pt").read_bytes() if kind == "zip" else pickle.dumps(evil))
    seal(run / "native", {"weights": "0" * 64})
    (run / "settings.json").write_text(json.dumps({"strategy": strategy, "data": str(tmp_path)}))
    code, _, said = run_script("convert", str(run))
    assert (code, said.count("\n"), marker.exists()) == (1, 1, False), said
    assert f"{run}" in said


def test_a_foreign_model_is_read_without_running_anything(run_script, tmp_path, marker, capsys):
    encoders.initialise(scratch(), encoders.make_tokenizer(scratch(), ["ab"], 16), ["a", "b"], 16, 0).save_pretrained(
        tmp_path / "m"
    )
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save({"classifier.weight": Evil(marker)}, tmp_path / "m" / "pytorch_model.bin")
    capsys.readouterr()
    code, _, said = run_script("predict", "--model", str(tmp_path / "m"), "--text", "ab")
    assert (code, said.count("\n"), marker.exists()) == (2, 1, False), said
    with pytest.raises(BadInput, match=r"model\.name: .* can't be loaded"):
        encoders.initialise(scratch(name=str(tmp_path / "m")), None, ["a", "b"], 16, 0)
    assert not marker.exists()


def test_a_second_ctrl_c_is_a_word_too(caplog, monkeypatch):
    """It meets Snakemake while it closes what the first has left running, and Snakemake logs what comes of that."""
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", True)
    inside_snakemake.say_interrupted()
    loop = asyncio.new_event_loop()

    async def close() -> None:
        loop.close()

    for task, said in ((close(), "interrupted"), (asyncio.sleep(0), None)):
        try:
            loop.run_until_complete(task)
        except RuntimeError as error:
            print_exception(error)
        assert [record.getMessage() for record in caplog.records] == ([said] if said else [])
        caplog.clear()


def test_a_target_after_a_configuration_file_is_told_of(monkeypatch, capsys):
    """Snakemake takes it for another configuration file."""
    monkeypatch.chdir(PROJECT)
    with pytest.raises(SystemExit):
        trust.check_command(["--cores", "all", "--configfile", "config/gpu.yaml", "ddp"])
    said = capsys.readouterr().err
    assert "there is no file ddp. Put targets first: ddp --configfile config/gpu.yaml" in said
