"""How a recording tells whether its command failed on its way, whatever exit code a wrapper gave."""

import json
from pathlib import Path

import pytest

from lockstep.script.recording import Recording

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
