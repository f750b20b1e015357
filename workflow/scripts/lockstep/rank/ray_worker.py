"""What Ray Train calls in the worker process of each rank (ray_cluster.py)."""

import os
from pathlib import Path

from lockstep import paths
from lockstep.errors import RunFailed
from lockstep.run.progress import NODE


def train(given: dict) -> None:
    """Train one rank's share of a run. TorchTrainer calls it in a thread of each of its worker processes."""
    from lockstep.rank import main, session

    os.chdir(given["beside"])  # the run's settings name files relative to it
    folder = Path(given["folder"])
    if os.environ["RANK"] == "0":  # into the run's log, as with other launchers; Ray has a file for each worker
        session.redirect(paths.node_folder(folder, int(os.environ.get(NODE, 0))) / paths.LOG)
    if main.run(folder):
        raise RunFailed("the rank failed, as its log says")
