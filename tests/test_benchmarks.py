"""`make benchmark` itself: that it runs and prints its ratios. What they are is for a quiet machine to say."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks import growth, processes, workflow
from lockstep.files import read_json
from tests.conftest import PROJECT


@pytest.mark.slow
def test_the_ratios_are_measured():
    command = [sys.executable, "-m", "benchmarks", "--rounds", "1", "padding", "harness"]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={"PYTHONPATH": "workflow/scripts", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    ratios = dict(re.findall(r"│ (single over [^│]+?) +│ +([\d.]+) │", done.stdout))
    assert len(ratios) == 2
    assert all(float(ratio) > 0.5 for ratio in ratios.values())


@pytest.fixture
def threads():
    """The loops take one thread; the tests after them have what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_growth_and_memory_are_measured(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(growth, "SIZES", (600, 900, 1200))
    monkeypatch.setattr(growth, "ROWS", 300)
    monkeypatch.setattr(growth, "STEPS", 4)
    lines = growth.growth(tmp_path, {}, 1) + processes.memory(tmp_path, {"data.limit": 900}, 1)
    medians = {name: float(median) for name, median, *_ in lines}
    assert len(medians) == 6
    assert medians.pop("planning an epoch of 1,200 rows, seconds") < 60
    assert all(0.3 < ratio < 3 for ratio in medians.values()), medians


def test_time_in_which_any_job_runs_counts_once():
    assert workflow.covered({(10.0, 20.0), (12.0, 14.0), (15.0, 30.0), (40.0, 41.0)}) == 21.0


def test_the_workflow_s_own_share_is_read_from_snakemake_s_notes(benchmark):
    jobs = [read_json(file) for file in (benchmark.folder / ".snakemake" / "metadata").iterdir()]
    ended = max(job["endtime"] for job in jobs)
    share = workflow.own_share(benchmark.folder, benchmark.began, ended)
    assert 0 < share < 0.5
    # A minute more in which nothing ran is the workflow's.
    seconds = ended - benchmark.began
    longer = workflow.own_share(benchmark.folder, benchmark.began, ended + 60)
    assert longer * (seconds + 60) == pytest.approx(share * seconds + 60)
