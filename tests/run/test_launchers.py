"""What starts and watches a run imports neither PyTorch nor a framework: that took longer than some trainings.

Nor does a strategy import a framework that it does not use.
"""

import subprocess
import sys

import pytest

from tests.conftest import PROJECT

FRAMEWORKS = {"deepspeed", "lightning", "horovod", "peft", "bitsandbytes", "matplotlib", "sklearn"}


def imported(code: str) -> set[str]:
    """All modules that are there after `code` ran."""
    folder = PROJECT / "workflow" / "scripts"
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*(name for name in sys.modules if sys.modules[name]))"]
    return set(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split())


def test_starting_a_run_imports_nothing_heavy():
    heavy = FRAMEWORKS | {"torch", "transformers", "accelerate"}
    assert heavy & imported("from lockstep.run import launchers, runs") == set()


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("single", {"datasets", "pandas", "jsonschema"}), ("recipe", {"datasets"}), ("trainer", set())],
)
def test_a_strategy_imports_no_framework_that_it_does_not_use(strategy, more):
    code = (
        "from lockstep.model import models; from lockstep.rank import main;"
        f" from lockstep.strategies import {strategy}; models.keep_masks()"
    )
    modules = imported(code)
    assert "torch" in modules
    assert (FRAMEWORKS | more) & modules == set()
