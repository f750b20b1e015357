"""Set-up: what it says of a machine that lacks something, and that a row trains where nothing can be compiled."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import PROJECT, copy_project

TOOLS = ("sh", "bash", "mkdir", "df", "awk", "tail", "grep", "dirname", "realpath")
# A Python that can't do what Debian keeps in packages of its own.
WITHOUT = {
    "headers": "import sysconfig as s; f = s.get_paths; s.get_paths = lambda *a, **k: f(*a, **k) | {'include': '/no'}",
    "venv": "import sys; sys.modules['ensurepip'] = None",
}


@pytest.fixture
def check(tmp_path):
    """Runs setup/check.sh with only the programs that it is given on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(*there: str, without: str | None = None, **scripts: str) -> tuple[int, str]:
        for name in (*TOOLS, *there):
            (programs / name).symlink_to(shutil.which(name))
        (programs / "python3").symlink_to(sys.executable)
        for name, script in scripts.items():
            (programs / name).unlink(missing_ok=True)
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        environment = {"PATH": str(programs)}
        if without:
            (tmp_path / "sitecustomize.py").write_text(WITHOUT[without])
            environment["PYTHONPATH"] = str(tmp_path)
        command = [PROJECT / "setup" / "check.sh", "python3", tmp_path / "venv"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert not done.stdout
        return done.returncode, done.stderr

    return run


def test_a_machine_that_has_all_is_told_nothing(check):
    assert check("git", "g++", df="echo; echo x 90000 1 90000 1% /") == (0, "")


@pytest.mark.parametrize(
    ("there", "without", "package"),
    [(("git",), None, "g++"), (("git", "g++"), "headers", "python3-dev"), (("g++",), None, "git")],
)
def test_what_only_costs_a_row_is_noted_in_one_line(check, there, without, package):
    code, said = check(*there, without=without, df="echo; echo x 90000 1 90000 1% /")
    assert code == 0
    (line,) = said.splitlines()
    assert line.startswith("note: ")
    assert line.endswith(f"On Debian: apt install {package}")
    if package != "git":
        assert "the row horovod is left out, and deepspeed runs without collectives of its own" in line


def test_without_the_venv_module_it_names_all_packages(check):
    code, said = check("git", without="venv")
    assert code == 2
    assert said == "error: python3 has no venv. On Debian: apt install python3-venv g++\n"


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_python_that_it_was_not_tried_with_is_refused(check, version):
    code, said = check(python3=f"echo {version}")
    assert code == 2
    assert said.startswith(f"error: python3 is Python {version}, and Lockstep is tried with 3.11, 3.12 and 3.13.")


def test_a_full_disk_is_told_before_anything_is_installed(check):
    code, said = check("git", "g++", df="echo; echo x 1000 1 999 99% /")
    assert code == 2
    assert "has 999 MB of disk left, and set-up needs 4000" in said


def test_the_readmes_name_what_it_looks_for():
    (command,) = [line for line in (PROJECT / "README.md").read_text().splitlines() if "apt install" in line]
    assert {"python3", "python3-venv", "python3-dev", "git", "make", "g++"} == set(command.split()[3:])
    said = (PROJECT / "setup" / "check.sh").read_text()
    for file in ("README.md", "README.zh-CN.md"):
        for version in ("3.11", "3.12", "3.13"):
            assert version in (PROJECT / file).read_text(encoding="utf-8")
            assert version in said


def test_what_pip_says_is_shown_only_where_it_fails(tmp_path):
    """With a Python whose pip finds nothing."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {python} "$3/bin/python"; exit; fi\n'
        "echo 'WARNING: a mirror does not answer'; echo 'ERROR: no such package'; exit 1\n"
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"
    command = [PROJECT / "setup" / "install.sh", python, venv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    steps = done.stdout.splitlines()
    assert steps[0].startswith(f"set-up, 1 of 4: a Python environment in {venv} ... ")
    assert steps[1] == "set-up, 2 of 4: the packages of requirements.txt and requirements-dev.txt ... failed"
    assert "ERROR: no such package" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: set-up failed.")


@pytest.mark.slow
def test_deepspeed_trains_where_nothing_can_be_compiled(tmp_path):
    copy = copy_project(tmp_path / "project")
    small = ["data.limit=300", "model.hidden_size=32", "model.layers=1", "train.max_steps=3", "train.eval_every=0"]
    small += ["train.checkpoint=last", "hardware.device=cpu", "hardware.processes=2", "hardware.oversubscribe=true"]
    arguments = [word for value in [*small, "hardware.threads=1"] for word in ("--set", value)]
    for script, *more in (("prepare",), ("plan",), ("launch", "--row", "deepspeed")):
        nothing = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        done = copy.script(script, *arguments, *more, timeout=600, **nothing)
        assert done.returncode == 0, done.stderr
    (file,) = copy.path("results/runs/deepspeed").glob("n2/rep1/record.json")
    assert "collectives through shared memory could not be compiled, so gloo's were used" in file.read_text()
