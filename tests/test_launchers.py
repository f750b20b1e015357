"""What starts and watches a run imports neither PyTorch nor a framework: that took longer than some trainings."""

import subprocess
import sys

from .conftest import PROJECT

CODE = """
import sys
from lockstep import launchers, runs
print(sorted({"torch", "transformers", "deepspeed", "lightning", "accelerate", "horovod"} & set(sys.modules)))
"""


def test_starting_a_run_imports_nothing_heavy():
    folder = PROJECT / "workflow" / "scripts"
    said = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
