"""Pytest's workers: tests that share what takes minutes to make, or follow from each other, belong to one of them."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.conftest import PROJECT


def test_what_wants_the_benchmark_belongs_to_one_worker_and_so_does_each_file():
    """Where tests are dealt out one by one, every worker makes the benchmark, and nothing says so."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed here; the images lack it")
    command = [sys.executable, "-m", "pytest", "-m", "", "--numprocesses", "1", "--dist", "loadgroup"]
    command += ["--setup-plan", "--verbose", "-p", "no:cacheprovider", "tests/test_make_benchmark.py"]
    planned = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    groups = dict(re.findall(r"::(\w+).*@(\w+) *$", planned.stdout, re.MULTILINE))
    assert groups.pop("test_the_workflow_s_own_share_is_read_from_snakemake_s_notes") == "benchmark"
    assert set(groups.values()) == {"test_make_benchmark"}


def test_slow_tests_are_run_every_night():
    """CI leaves most of them out, and nobody would see one that fails."""
    files = [PROJECT / ".github" / "workflows" / name for name in ("ci.yml", "nightly.yml")]
    ci, nightly = (yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) for file in files)
    assert len(nightly["on"]["schedule"]) == 1
    assert nightly["jobs"]["slow"]["steps"][-1]["run"].startswith("make test-slow")
    assert nightly["jobs"]["bare"]["steps"][-1]["run"] == ".ci/containers"  # whatever has changed
    pinned = {step["uses"] for job in ci["jobs"].values() for step in job["steps"] if "uses" in step}
    for job in nightly["jobs"].values():
        assert {step["uses"] for step in job["steps"] if "uses" in step} <= pinned


def test_containers_are_built_in_ci_unless_nothing_of_them_has_changed(tmp_path):
    """Since the last commit that passed; where that is unknown, they are built."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(tmp_path)]
    for name in (".ci/containers", ".ci/containers-passed", "docker/Dockerfile", "docs/guide/words.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True)
    green = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    def changed(since: str) -> str:
        command = [str(tmp_path / ".ci" / "containers"), "--changed", since]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    notes = ("docs/guide/words.md", ".ci/containers-passed")  # the latter is where .ci/run looks for the commit
    for name, answer in (*((note, "no") for note in notes), ("docker/Dockerfile", "yes")):
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("\n")
        subprocess.run([*git, "commit", "--quiet", "--all", "--message", name], check=True)
        assert changed(green) == answer
    assert changed("") == changed("0" * 40) == "yes"
