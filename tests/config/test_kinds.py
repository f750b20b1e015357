"""The properties of each kind of run: its dropout, the ledgers that it accepts, and how its steps are timed."""

import json
from dataclasses import asdict, replace

import pytest

from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.config.kinds import Kind
from lockstep.config.settings import Settings


@pytest.fixture
def config() -> Config:
    row = {"strategy": "ddp", "device": "cpu", "processes": 2, "oversubscribe": True}
    return reading.parse({"rows": {"x": row}})


def test_trials_alone_have_no_dropout_and_forgive_nothing(config):
    row = config.rows["x"]
    of_row = (row, config.trial(row), config.profiled(row), config.tried("y", {"strategy": "recipe"}))
    assert [each.kind for each in of_row] == list(Kind)
    assert [kind for kind in Kind if kind.measured] == [Kind.TIMED]
    assert [kind for kind in Kind if kind.profiled] == [Kind.PROFILE]
    assert [kind for kind in Kind if not (kind.dropout and kind.forgives)] == [Kind.TRIAL]
    assert [kind for kind in Kind if kind.compared] == [Kind.TRIAL]


def test_a_run_s_settings_tell_its_kind_to_its_ranks(config):
    trial = config.trial(config.rows["x"])
    written = json.dumps(asdict(replace(trial.settings(), profile=config.profile)))
    assert json.loads(written)["kind"] == "parity"
    read = Settings.from_json(json.loads(written))
    assert read.kind is Kind.TRIAL
    assert trial.folder(1) == "parity/x/n2/rep1"
    with pytest.raises(ValueError, match="party"):
        Settings.from_json(json.loads(written) | {"kind": "party"})
