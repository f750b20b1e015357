"""Ranks that are forks of this process, which has imported what they need: for runs that are not timed.

Twenty trials then take one import of some seconds, instead of twenty (rank/imports.py).
"""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep.config.launchers import rank_variables
from lockstep.config.row import Row
from lockstep.paths import TRAIN
from lockstep.run.addresses import Rendezvous
from lockstep.run.fork import Fork


def wanted(row: Row) -> bool:
    """Whether a row's ranks are to be forks, and can be."""
    return row.in_forks and possible(row)


def possible(row: Row) -> bool:
    """Whether a row's ranks can be forks: on one node, if its launcher allows that and CUDA is not initialised here."""
    torch = sys.modules.get("torch")
    begun = torch is not None and torch.cuda.is_initialized()
    return row.launcher.forkable and not begun and row.hardware.nodes == 1


def ranks(row: Row, folder: Path, rendezvous: Rendezvous) -> Callable[[], None]:
    """A function that starts all ranks of a row in `folder`, waits for them, and exits with their highest exit code."""
    count = row.hardware.processes

    def train() -> None:
        sys.argv = [str(TRAIN), str(folder)]
        runpy.run_path(str(TRAIN), run_name="__main__")

    def start() -> None:
        began = []
        for rank in range(count):
            variables = dict(os.environ)
            if row.launcher.tells_ranks:
                variables |= rank_variables(rank, count, rendezvous.address, rendezvous.port)
            began.append(Fork(train, variables))
        sys.exit(max(fork.wait() for fork in began))

    return start
