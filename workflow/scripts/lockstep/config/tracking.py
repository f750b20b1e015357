"""Where a run's figures go while it trains, besides its log: what that needs (run/trackers.py does it)."""

import importlib.metadata
import os

from lockstep.errors import BadInput

# What each needs, which is not installed otherwise.
PACKAGES = {"tensorboard": ("tensorboardX", "2.6.5"), "mlflow": ("mlflow-skinny", "3.17.2")}


def refuse(names: list[str], where: str) -> None:
    """Raises BadInput where one of `names` can't be written to; `where` is the key that names it."""
    for name in names:
        package, version = PACKAGES[name]
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise BadInput(
                f"{where}: {name} needs {package}, which is not installed. Run: pip install {package}=={version}"
            ) from None
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise BadInput(f"{where}: mlflow needs to know where to. Set MLFLOW_TRACKING_URI, as to http://127.0.0.1:5000.")
