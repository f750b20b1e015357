"""Pretended GPUs for tests: a project's copy as a machine with so many. See workflow/pretended/."""

import os
import shutil
from pathlib import Path

from lockstep.script.pretended import LOADED, PARTS, libraries

__all__ = ["libraries", "machine"]


def machine(place, gpus: int, built: Path) -> dict[str, str]:
    """Make the project's copy `place` one of a machine with so many GPUs; returns the variables to call it with."""
    scripts = place.path("workflow/scripts")
    for file in LOADED:
        shutil.copy2(PARTS / file, scripts / file)
    path = os.pathsep.join([str(scripts), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"LOCKSTEP_PRETENDED_GPUS": str(gpus), "LOCKSTEP_PRETENDED_LIBRARIES": str(built), "PYTHONPATH": path}
