"""Which weights a run keeps: those that `train.checkpoint` names."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.rank import checkpoint

# On the dev split, after so many steps.
SCORES = {
    4: {"macro_f1": 0.3, "accuracy": 0.6, "loss": 2.0},
    8: {"macro_f1": 0.5, "accuracy": 0.5, "loss": 1.5},
    12: {"macro_f1": 0.4, "accuracy": 0.7, "loss": float("nan")},
    16: {"macro_f1": 0.5, "accuracy": 0.7, "loss": 1.4},
}


@pytest.mark.parametrize(
    ("asked", "best", "written"),
    [
        ("best", "macro_f1", [4, 8]),
        ("best", "accuracy", [4, 12]),
        ("best", "loss", [4, 8, 16]),
        ("last", "macro_f1", [16]),
    ],
)
def test_the_weights_that_are_asked_for_are_kept(tmp_path, monkeypatch, asked, best, written):
    saved, events = [], []
    monkeypatch.setattr(checkpoint, "save", lambda strategy, folder, about: saved.append(about))
    training = SimpleNamespace(
        train=SimpleNamespace(checkpoint=asked, best=best),
        strategy=None,
        folder=tmp_path,
        files=SimpleNamespace(event=lambda key, value: events.append((key, value["step"]))),
        progress=SimpleNamespace(alive=lambda: None),
    )
    kept = checkpoint.Kept(training, SimpleNamespace(hash="abc"))
    for step, scores in SCORES.items():
        kept.evaluated(step, scores)
    kept.trained(16)
    assert saved == [{"step": step, "plan": "abc"} for step in written]  # the last of them is the one that stays
    assert events == [("checkpoint", step) for step in written]


def test_a_barrier_brings_what_it_gathered_to_the_host():
    """A collective of NCCL's only has the GPU wait: the host would go on, and save before the folder is there."""
    brought = []
    gathered = SimpleNamespace(cpu=lambda: brought.append(True))
    strategy = SimpleNamespace(all_gather=lambda tensor: gathered, world=SimpleNamespace(device=torch.device("cpu")))
    checkpoint.barrier(strategy)
    assert brought == [True]
