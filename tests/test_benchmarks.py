"""`make benchmark` itself: that it runs and prints its ratios. What they are is for a quiet machine to say."""

import re
import subprocess
import sys

import pytest

from .conftest import PROJECT


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
