"""`parity.py --show`: what is not proven is said, and never ends with 0."""

import re

import pytest

from lockstep import files, paths
from lockstep.config import reading
from lockstep.config.row import Row

ASKED = ("--set", "hardware.oversubscribe=true", "--show", "--row", "ddp")


@pytest.fixture
def show(run_script):
    """Shows the verdict on ddp; returns the exit code and what is printed, in one line."""

    def run(*arguments: str) -> tuple[int, str]:
        code, said, _ = run_script("parity", *ASKED, *arguments)
        return code, " ".join(re.sub("[\u2500-\u257f]", " ", said).split())  # without the table's lines

    return run


def prove(tmp_path, proof: str, **settings) -> None:
    """As if ddp had been proven with these settings."""
    config = reading.read([tmp_path / "config" / "config.yaml"], ["hardware.oversubscribe=true"])
    folder = tmp_path / paths.RESULTS / config.trial(config.rows["ddp"]).folder(1)
    verdict = {"proof": proof, "reason": "", "distances": None, "steps": 12, "world_size": 2}
    files.write_json(folder / paths.VERDICT, verdict)
    files.write_json(folder / paths.SETTINGS, settings)
    files.write_json(paths.data_file(tmp_path / paths.RESULTS), {"hash": "d", "weights": "w"})


def test_a_row_without_a_verdict_is_named_and_is_no_success(show):
    code, said = show()
    assert code == 1
    assert "ddp not run it was not proven yet no verdict on their present settings: ddp." in said
    assert show("--exit-zero")[0] == 0


def test_a_verdict_on_other_settings_is_none(show, tmp_path):
    prove(tmp_path, "equal")
    assert show() == (0, show()[1])
    prove(tmp_path, "equal", precision="bf16")
    code, said = show()
    assert code == 1
    assert "ddp not run made with other settings: precision bf16, now fp32" in said


def test_a_row_that_can_not_be_proven_here_is_no_failure(show, monkeypatch):
    monkeypatch.setattr(Row, "unavailable", "not installed")
    assert show()[0] == 0
