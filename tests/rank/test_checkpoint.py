"""Which weights a run keeps: those that `train.checkpoint` names."""

from types import SimpleNamespace

import pytest

from lockstep.rank import checkpoint

SCORES = {4: 0.3, 8: 0.5, 12: 0.4, 16: 0.5}  # macro-F1 on the dev split, after so many steps


@pytest.mark.parametrize(("asked", "written"), [("best", [4, 8]), ("last", [16])])
def test_the_weights_that_are_asked_for_are_kept(tmp_path, monkeypatch, asked, written):
    saved, events = [], []
    monkeypatch.setattr(checkpoint, "save", lambda strategy, folder, about: saved.append(about))
    session = SimpleNamespace(
        train=SimpleNamespace(checkpoint=asked),
        strategy=None,
        folder=tmp_path,
        files=SimpleNamespace(event=lambda key, value: events.append((key, value["step"]))),
        progress=SimpleNamespace(alive=lambda: None),
    )
    kept = checkpoint.Kept(session, SimpleNamespace(hash="abc"))
    for step, macro_f1 in SCORES.items():
        kept.evaluated(step, macro_f1)
    kept.trained(16)
    assert saved == [{"step": step, "plan": "abc"} for step in written]  # the last of them is the one that stays
    assert events == [("checkpoint", step) for step in written]
