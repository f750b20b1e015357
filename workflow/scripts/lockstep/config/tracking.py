"""Where a run's figures go while it trains, besides its log: what that needs (run/trackers.py does it)."""

import os

from lockstep.config.registry import Need
from lockstep.errors import BadInput

# What is not installed otherwise.
NEEDS = {
    "tensorboard": Need("tensorboardX", "2.6.5", "pip install tensorboardX==2.6.5", only={}),
    "mlflow": Need("mlflow-skinny", "3.17.2", "pip install mlflow-skinny==3.17.2", only={}),
}


def refuse(names: list[str], where: str) -> None:
    """Raises BadInput where one of `names` can't be written to; `where` is the key that names it."""
    for name in names:
        need = NEEDS[name]
        if need.installed is None:
            raise BadInput(f"{where}: {name} needs {need.package}, which is not installed. Run: {need.command}")
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise BadInput(f"{where}: mlflow needs to know where to. Set MLFLOW_TRACKING_URI, as to http://127.0.0.1:5000.")
