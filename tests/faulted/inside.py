"""What goes wrong inside of a run's processes, as the environment variable LOCKSTEP_FAULT says it in JSON:

    {"after": 12, "gate": "/a/file", "do": "raises"}    the last rank waits after step 12, and then does it
    {"port": 29500}                                     the launcher gets a port that is taken

While the rank waits, the file named `gate` is there: whoever removes it lets the rank go on.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

FAULT = json.loads(os.environ.get("LOCKSTEP_FAULT", "{}"))


def step_done(done):
    """Replay.step_done, which every strategy's loop calls after each step; and then the fault, where it is its time."""

    @functools.wraps(done)
    def and_then(replay, step):
        done(replay, step)
        world = replay.training.strategy.world
        if replay.done == FAULT.get("after") and world.rank == world.size - 1:
            _wait(replay.training.progress)
            DEEDS[FAULT.get("do", "nothing")](replay)

    return and_then


def port(free_port):
    """A port that somebody else has taken since it was found to be free."""
    return lambda wanted: FAULT.get("port") or free_port(wanted)


def _wait(progress) -> None:
    gate = Path(FAULT["gate"])
    gate.touch()
    while gate.exists():
        progress.alive()
        time.sleep(0.01)


def nothing(replay):
    pass


def raises(replay):
    raise ValueError("a label that nobody has")


def allocates(replay):
    """As a batch does that is larger than those before."""
    import torch

    kept = []
    while True:
        kept.append(torch.ones(2**20))


def leaves(replay):
    """Without a word, and as if all were well."""
    os._exit(0)


def exits(replay):
    sys.exit(3)


def aborts(replay):
    os.abort()


def segfaults(replay):
    os.kill(os.getpid(), signal.SIGSEGV)


def explodes(replay):
    """A weight that is not a number, from which every later loss is none."""
    import torch

    with torch.no_grad():
        next(iter(replay.training.strategy.module.parameters())).fill_(float("nan"))


DEEDS = {deed.__name__: deed for deed in (nothing, raises, allocates, leaves, exits, aborts, segfaults, explodes)}
