"""Requirements of the trackers that get a run's figures while it trains (run/trackers.py writes to them)."""

import os

from lockstep.config.registry import Need
from lockstep.errors import BadInput

# Packages that set-up does not install.
NEEDS = {
    "tensorboard": Need("tensorboardX", "2.6.5", "pip install tensorboardX==2.6.5", only={}),
    "mlflow": Need("mlflow-skinny", "3.17.2", "pip install mlflow-skinny==3.17.2", only={}),
}


def refuse(names: list[str], where: str) -> None:
    """Raise BadInput if one of the trackers `names` can't be used; `where` is the key that names it."""
    for name in names:
        need = NEEDS[name]
        if need.installed is None:
            raise BadInput(f"{where}: {name} needs {need.package}, which is not installed. Run: {need.command}")
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise BadInput(f"{where}: mlflow needs a server. Set MLFLOW_TRACKING_URI, such as http://127.0.0.1:5000.")
