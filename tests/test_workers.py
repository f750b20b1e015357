"""Pytest's workers: tests that share what takes minutes to make, or follow from each other, belong to one of them."""

import re
import subprocess
import sys

import pytest

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
