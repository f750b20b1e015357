"""How a recording tells whether its command failed on its way, and what the recorder takes for samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import RunFailed
from lockstep.script import findings, recording
from lockstep.script.recording import RECORDER, Recording

PARENT = 1  # of both ranks, which are 10 and 11


def ended(folder: Path, *failed: int, started: tuple[int, ...] = (1, 2, 10, 11), by_itself: bool = True) -> Recording:
    """A recording of three steps of two ranks, of whose processes some have failed."""
    for pid in started:
        parent = PARENT if pid >= 10 else 0
        (folder / f"started.{pid}.json").write_text(json.dumps({"pid": pid, "parent": parent}), encoding="utf-8")
    for pid in failed:
        about = {"pid": pid, "rank": max(0, pid - 10), "says": f"Error: of {pid}"}
        (folder / f"failed.{pid}.json").write_text(json.dumps(about), encoding="utf-8")
    about = {"parent": PARENT, "world": 2, "steps": [{}] * 3}
    ranks = [about | {"rank": rank, "pid": 10 + rank, "ended": by_itself or rank == 0} for rank in range(2)]
    return Recording(folder, ranks, 0, None)


@pytest.mark.parametrize(
    ("failed", "more", "says"),
    [
        ((), {}, ""),
        ((11,), {}, "failed after 3 of 8 steps: rank 1: Error: of 11"),
        ((PARENT, 11), {}, "failed after 3 of 8 steps: rank 1: Error: of 11"),
        ((PARENT,), {}, "failed after 3 of 8 steps: Error: of 1"),
        ((2,), {}, ""),  # a process that started no rank, as one that only tries whether something works
        ((), {"by_itself": False}, "failed after 3 of 8 steps: rank 1 was killed, or left by os._exit"),
        ((), {"by_itself": False, "started": (1,)}, ""),  # forks, of which this is not known
    ],
)
def test_a_command_that_fails_is_told_from_one_that_ends(failed, more, says, tmp_path):
    recorded = ended(tmp_path, *failed, **more)
    assert recorded.broken_off(8) == says
    assert recorded.broken_off(3) == ""


@pytest.mark.parametrize(
    ("idle", "found"),
    [
        ({"passes": 4, "changed": False}, True),
        ({"passes": 4, "changed": True}, False),  # it may get the weights of rank 0
        ({"passes": 1, "changed": False}, False),  # it may have failed on its way
        (None, False),  # it computes nothing, as one that only loads data
    ],
)
def test_ranks_that_never_step_are_told_from_those_that_train_in_another_way(idle, found, tmp_path):
    step = {"losses": [1.0], "hashes": {"a": "changed"}, "line": "train.py:9"}
    both = {"parent": PARENT, "world": 2, "initial": {"hashes": {"a": "begun"}}}
    ranks = [{"rank": 0, "steps": [step] * 4, "idle": None}, {"rank": 1, "steps": [], "idle": idle}]
    for rank in ranks:
        about = both | rank | {"pid": 10 + rank["rank"]}
        (tmp_path / f"process.{about['pid']}.json").write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(RunFailed, match="of 2 ranks, only these did a step: 0") as raised:
        recording._read(tmp_path, 1, None)
    assert isinstance(raised.value, recording.OthersIdle) == found
    if found:
        assert findings.idle(raised.value).answer == findings.DIFFERENT
        assert raised.value.line == "train.py:9"


READ = """
import json, sys, torch
import lockstep_recorder as recorder

recorder.state.loader = {"dispatched": False, "indexed": True, "batches": [[list(range(8))] * 2]}
read = lambda shape, kind: recorder.samples_first(str(shape), torch.zeros(shape, dtype=getattr(torch, kind))).shape
print(json.dumps([list(read(*each)) for each in json.loads(sys.argv[1])]))
"""
BATCHES = {  # of eight samples: the shape of a tensor, its type, and what is read as [samples, ...]
    "samples": ([8, 8], "float32", [8, 8]),
    "two views of each, as long as a batch": ([16, 8], "float32", [16, 8]),
    "a part of a batch": ([4, 8], "float32", [4, 8]),
    "tokens": ([16, 8], "int64", [8, 16]),
    "frames of sound": ([16, 8, 5], "float32", [8, 16, 5]),
    "a series of numbers": ([20, 8], "float32", [8, 20]),
}


def test_the_dimension_of_samples_is_found():
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    command = [sys.executable, "-c", READ, json.dumps([about[:2] for about in BATCHES.values()])]
    finished = subprocess.run(command, env=variables | {"PYTHONPATH": str(RECORDER)}, capture_output=True, check=True)
    assert dict(zip(BATCHES, json.loads(finished.stdout), strict=True)) == {
        name: expected for name, (_, _, expected) in BATCHES.items()
    }
