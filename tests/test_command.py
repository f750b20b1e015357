"""`lockstep` as a name to type, and what `lockstep doctor` sees."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import caches
from lockstep.paths import SCRIPTS
from tests.conftest import copy_project

COMMAND = runpy.run_path(str(SCRIPTS / "command.py"))
DOCTOR = runpy.run_path(str(SCRIPTS / "doctor.py"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench"], ["--cores", "all"]),
        (["bench", "--cores", "2", "-n"], ["--cores", "2", "-n"]),
        (["row", "ddp", "--config", "repeats=3"], ["--cores", "all", "ddp", "--config", "repeats=3"]),
        (["proof"], ["--cores", "all", "parity"]),
        (["quick", "--cores", "2"], ["--cores", "2", "--configfile", "config/quick.yaml"]),
        (["tune"], ["--cores", "all", "tune"]),
    ],
)
def test_targets_are_snakemakes(words, expected):
    program, *rest = COMMAND["snakemake"](words)
    assert (Path(program).name, rest) == ("snakemake", expected)


@pytest.mark.parametrize("name", COMMAND["SCRIPTS"])
def test_commands_are_those_in_the_folder_of_scripts(name):
    assert (SCRIPTS / f"{name}.py").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["benhc"], "benhc is not a command. There are: bench, quick,"),
        (["row"], "row: name one"),
        (["row", "nope"], "nope: no such row. The configuration has: single,"),
        (["row", "nope", "--cores", "2"], "nope: no such row. The configuration has: single,"),
        (["quick", "--configfile", "mine.yaml"], "quick: has its own configuration."),
    ],
)
def test_a_wrong_word_gets_one_line(run_script, words, expected):
    code, _, said = run_script("command", *words)
    assert code == 2
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1


def test_without_a_word_all_commands_are_listed_and_a_shell_can_complete_them():
    listed = subprocess.run([sys.executable, SCRIPTS / "command.py"], capture_output=True, text=True, check=True).stdout
    program = f'eval "$({sys.executable} {SCRIPTS}/command.py completion)"; declare -f _lockstep'
    completed = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    for name in COMMAND["COMMANDS"]:
        assert f"lockstep {name}" in listed
        assert name in completed


def test_set_up_leaves_the_name_in_the_environment(tmp_path):
    """It starts what is in the folder that one is in; elsewhere it has help, and says what is called in a clone."""
    place = copy_project(tmp_path / "project")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    subprocess.run([place.folder / "setup" / "command.sh", tmp_path / "venv"], check=True)
    lockstep = tmp_path / "venv" / "bin" / "lockstep"
    inside = subprocess.run([lockstep, "--help"], cwd=place.folder, capture_output=True, text=True, check=False)
    assert (inside.returncode, inside.stderr) == (0, "")
    assert "lockstep doctor" in inside.stdout
    assert subprocess.run([lockstep, "--help"], cwd=tmp_path, capture_output=True, check=False).returncode == 0
    outside = subprocess.run([lockstep, "bench"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outside.returncode == 2
    assert "not Lockstep's folder" in outside.stderr


def test_the_doctor_names_what_is_here_and_what_is_not(run_script):
    code, said, errors = run_script("doctor")
    assert (code, errors) == (0, "")
    for name in ("CPU", "PyTorch", "Docker", "single", "ddp"):
        assert name in said
    docker = next(line for line in said.splitlines() if " Docker " in line)
    assert ("make images" in docker) == (not _docker_answers())


def _docker_answers() -> bool:
    return bool(shutil.which("docker")) and not subprocess.run(["docker", "info"], capture_output=True).returncode


def test_the_doctor_sees_a_clock_that_is_not_held(tmp_path, monkeypatch):
    governor = tmp_path / "cpu0" / "cpufreq" / "scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("powersave\n")
    monkeypatch.setitem(DOCTOR["disturbers"].__globals__, "CPU", tmp_path)
    assert ["clock's governor", "powersave", "sudo cpupower frequency-set -g performance"] in DOCTOR["disturbers"]()
    governor.write_text("performance\n")
    assert not [line for line in DOCTOR["disturbers"]() if line[0] == "clock's governor"]


def test_the_doctor_says_how_to_get_a_strategy_that_lacks_a_package(monkeypatch):
    need = next(need for name in ("horovod",) for need in DOCTOR["registry"].needs(name))
    monkeypatch.setattr(DOCTOR["registry"], "version", lambda name: None)
    lines = DOCTOR["strategies"]()
    assert ["ddp", "yes", ""] in lines
    assert ["horovod", f"lacks {need.package} {need.version}", need.command] in lines


def test_where_the_home_can_t_be_written_caches_lie_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home, here = tmp_path / "home", str(tmp_path / ".snakemake" / "cache")

    def told():
        (line,) = (line for line in DOCTOR["this_machine"]() if line[0] == "caches")
        return line[1]

    monkeypatch.setenv("HOME", str(home))
    assert told() == str(home / ".cache")
    assert not home.exists()
    caches.choose()
    assert "XDG_CACHE_HOME" not in os.environ
    home.write_text("no folder")
    assert told() == f"{here}, as {home / '.cache'} can't be written"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    caches.choose()
    assert os.environ["XDG_CACHE_HOME"] == told() == str(tmp_path / "mine")
    for wrong in (home / "inside", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(wrong))
        caches.choose()
        assert os.environ["XDG_CACHE_HOME"] == here


def test_snakemake_starts_where_the_home_can_t_be_written(tmp_path):
    place = copy_project(tmp_path / "project")
    started = place.run("snakemake", "-n", "single", HOME="/proc/none", XDG_CACHE_HOME="")
    assert started.returncode == 0, started.stderr
    assert place.path(".snakemake/cache/snakemake").is_dir()


def test_show_has_what_differs_and_what_starts_it(run_script):
    code, said, _ = run_script("show", "ddp", "--set", "hardware.device=cpu")
    assert code == 0
    assert "+" in said
    assert "DistributedDataParallel(" in said
    assert "torch.distributed.run" in said
    code, _, said = run_script("show", "nothing")
    assert (code, said.startswith("error: nothing: no such row. The configuration has: single")) == (2, True)


@pytest.mark.parametrize("name", COMMAND["TARGETS"])
def test_a_target_s_help_is_its_own_line_and_names_snakemake_s(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["lockstep", name, "--help"])
    COMMAND["main"]()
    told = capsys.readouterr().out
    assert told.startswith(f"lockstep {name} ")
    assert "snakemake --help lists them" in told
