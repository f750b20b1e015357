"""What CI does, and leaves out: .ci/ and .github/, with what takes long replaced."""

import csv
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.conftest import PROJECT

CI = PROJECT / ".ci"
WORKFLOWS = PROJECT / ".github" / "workflows"


def workflow(name: str) -> dict:
    return yaml.load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"), yaml.BaseLoader)


def test_what_is_not_known_to_be_unchanged_is_built_on_github():
    """In `echo "changed=$(...)"` a failure is none, and what is empty was taken for unchanged."""
    steps = workflow("ci")["jobs"]["containers"]["steps"]
    (since,) = (step for step in steps if step.get("id") == "since")
    assert "\nchanged=$(.ci/containers --changed " in since["run"]
    conditions = [step["if"] for step in steps if "if" in step]
    assert conditions == ["steps.since.outputs.changed != 'no'"] * 2


def test_slow_tests_are_run_every_night():
    """CI leaves most of them out, and nobody would see one that fails."""
    ci, nightly = workflow("ci"), workflow("nightly")
    assert len(nightly["on"]["schedule"]) == 1
    assert nightly["jobs"]["slow"]["steps"][-1]["run"].startswith("make test-slow")
    assert nightly["jobs"]["bare"]["steps"][-1]["run"] == ".ci/containers"  # whatever has changed
    pinned = {step["uses"] for job in ci["jobs"].values() for step in job["steps"] if "uses" in step}
    for job in nightly["jobs"].values():
        assert {step["uses"] for step in job["steps"] if "uses" in step} <= pinned


# Of what images are made of, or what tests in them start.
OF_CONTAINERS = (
    *("docker/Dockerfile", ".dockerignore", "requirements.txt", "requirements-dev.txt", "CITATION.cff", "Snakefile"),
    *("workflow/rules/common.smk", "workflow/scripts/self_test.py", "workflow/scripts/lockstep/remaking.py"),
    *("workflow/scripts/lockstep/config/row.py", "workflow/scripts/lockstep/strategies/ddp.py", "tests/conftest.py"),
)
OTHERS = ("docs/guide/words.md", ".ci/containers-passed")  # the latter is where .ci/run looks for the commit


def test_containers_are_built_in_ci_unless_nothing_of_them_has_changed(tmp_path):
    """Since the last commit that passed; where that is unknown, they are built."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(tmp_path)]
    some = [next(path for path in (PROJECT / name).rglob("*") if path.is_file()) for name in ("resources", "profiles")]
    decides = [*OF_CONTAINERS, *(str(file.relative_to(PROJECT)) for file in some)]
    for name in (".ci/containers", *OTHERS, *decides):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True)
    green = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    def changed(since: str) -> str:
        command = [str(tmp_path / ".ci" / "containers"), "--changed", since]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    for names, answer in ((OTHERS, "no"), (decides, "yes")):
        for name in names:
            before = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(before + b"\n")
            assert (name, changed(green)) == (name, answer)
            (tmp_path / name).write_bytes(before)
    assert changed("") == changed("0" * 40) == "yes"


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run where all that it calls only notes its name; returns what was called, and what was said."""
    place, programs, notes = tmp_path / "clone", tmp_path / "bin", tmp_path / "notes"
    (place / ".ci").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(CI / "run", place / ".ci" / "run")
    (place / ".ci" / "containers-passed").write_text("0123abc\n")

    def program(file, script: str) -> None:
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def run(changed: str = "no", docker: bool = True, code: int = 0, **variables: str) -> tuple[int, list[str], str]:
        notes.unlink(missing_ok=True)
        for name in ("setup", "style", "small", "engines"):
            program(place / ".ci" / name, f"echo {name} >> {notes}")
        program(place / ".ci" / "containers", f"[ $1 = --changed ] && echo {changed} || exit {code}")
        program(programs / "make", f'echo "$1" >> {notes}')
        program(programs / "python3", "")
        program(programs / "docker", f"exit {int(not docker)}")
        environment = {"PATH": f"{programs}:/usr/bin:/bin", **variables}
        command = [str(place / ".ci" / "run")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, notes.read_text().split() if notes.is_file() else [], done.stdout + done.stderr

    return run


def test_where_containers_changed_and_docker_is_silent_ci_fails_unless_told_to_leave_them_out(ci):
    code, called, said = ci(changed="yes", docker=False)
    assert (code, called) == (1, ["engines"])
    assert "error: what decides how containers are built has changed since 0123abc, and Docker does not answer" in said
    code, called, said = ci(changed="yes", docker=False, CONTAINERS="skip")
    assert (code, called) == (0, ["setup", "style", "test", "small"])
    assert "containers are left out: CONTAINERS=skip" in said
    assert ci(changed="no", docker=False)[:2] == (0, ["setup", "style", "test", "small"])


@pytest.mark.parametrize("code", [0, 3])
def test_all_rows_are_trained_beside_containers_and_ci_ends_as_these_do(ci, code):
    """In a container a newcomer trains three rows only."""
    assert ci(changed="yes", code=code)[:2] == (code, ["engines", "setup", "style", "test", "small"])


def test_all_rows_are_trained_on_github():
    assert ".ci/small" in [step.get("run") for step in workflow("ci")["jobs"]["tests"]["steps"]]


@pytest.mark.parametrize(
    ("proofs", "passes"),
    [
        ({"fp32": "equal", "bf16": "within-tolerance"}, True),
        ({"fp32": "equal"}, True),
        ({"fp32": "equal", "bf16": "unequal"}, False),
        ({"fp32": "equal", "fp16": "not-run"}, False),
        ({"fp32": "within-tolerance", "bf16": "within-tolerance"}, False),
    ],
)
def test_the_small_benchmark_passes_by_the_proof_of_every_row(tmp_path, proofs, passes):
    (tmp_path / "report").mkdir()
    rows = [
        {"row": precision, "precision": precision, "proof": proof, "status": "ok", "train_seconds": "1.5"}
        for precision, proof in proofs.items()
    ]
    with (tmp_path / "report" / "summary.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for row in proofs:
        (tmp_path / "profile" / row / "n1" / "rep1").mkdir(parents=True)
        (tmp_path / "profile" / row / "n1" / "rep1" / "profile.json").touch()
    command = [sys.executable, str(CI / "all_rows"), str(tmp_path), str(len(rows))]
    assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) == passes
