"""What each launcher requires and refuses."""

from dataclasses import replace

import pytest

from lockstep.config import launchers, reading, registry
from lockstep.errors import BadInput


def row(**settings):
    return reading.parse({"rows": {"x": {"device": "cpu", "processes": 2, "oversubscribe": True} | settings}}).rows["x"]


def test_every_launcher_that_a_strategy_names_is_declared_and_every_declared_one_is_named():
    options = [registry.literals(name)["OPTIONS"] for name in registry.names()]
    named = {name for option in options if "launcher" in option for name in option["launcher"]["enum"]}
    assert named | {"python"} == launchers.LAUNCHERS.keys()


def test_ranks_by_hand_are_on_one_machine_and_trials_of_such_a_row_start_by_themselves():
    by_hand = row(strategy="ddp", launcher="hand")
    by_hand.refuse()
    assert by_hand.launcher.by_hand
    assert not by_hand.unattended.launcher.by_hand
    with pytest.raises(BadInput, match=r"rows\.x\.launcher: hand: .* hardware\.nodes is 2\. Choose another launcher"):
        row(strategy="ddp", launcher="hand", nodes=2).refuse()
    row(strategy="ddp", nodes=2).refuse()


@pytest.mark.parametrize(
    ("built", "gpus", "controller", "why"),
    [
        ({"nccl"}, 1, "gloo", "NCCL here, which refuses two ranks on one GPU"),
        ({"nccl"}, 2, "gloo", ""),
        (set(), 1, "gloo", ""),
        (set(), 2, "mpi", "built without MPI"),
        ({"mpi"}, 2, "mpi", ""),
    ],
)
def test_horovodrun_needs_what_horovod_is_built_with(monkeypatch, built, gpus, controller, why):
    monkeypatch.setattr(launchers.provenance, "horovod_has", lambda what: what in built)
    on_gpus = replace(row(strategy="horovod").hardware, device="cuda", gpu_count=gpus)
    said = launchers.LAUNCHERS["horovodrun"].unavailable({"controller": controller}, on_gpus)
    assert why in said
    assert bool(said) == bool(why)
