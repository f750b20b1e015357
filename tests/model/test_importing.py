"""What is left out when transformers is imported; each check runs in a new process."""

import subprocess
import sys

import pytest

from lockstep.paths import SCRIPTS


def imported(program: str) -> set[str]:
    """The packages that are imported when a program has ended."""
    told = f"{program}\nimport sys; print(*(name for name in sys.modules if sys.modules[name]))"
    finished = subprocess.run([sys.executable, "-c", told], cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


MODEL = """
from lockstep.model import importing
with importing.without_unused():
    from transformers import BertForSequenceClassification
"""


@pytest.mark.parametrize(("before", "spared"), [("", True), ("import transformers", False)])
def test_a_model_is_imported_without_what_it_does_not_call(before, spared):
    """This holds even if a user's own strategy or model has imported transformers before."""
    packages = imported(before + MODEL)
    assert ("scipy" in packages) == (not spared)
    assert not {"peft", "bitsandbytes"} & packages


def test_trainer_is_imported_after_a_model():
    packages = imported(f"{MODEL}\nimport lockstep.strategies.trainer")
    assert "transformers.trainer" in packages
    assert "datasets" not in packages
