"""Where caches lie: in the user's own folder for them, or, where that can't be written, here, as in containers.

Snakemake makes its own before it reads the Snakefile, and ends in a traceback where it can't, as with a service's home.
"""

import os
import tempfile
from pathlib import Path

VARIABLE = "XDG_CACHE_HOME"


def here() -> Path:
    """The folder for caches beside the results."""
    return Path.cwd() / ".snakemake" / "cache"


def asked() -> Path:
    """The user's own folder for caches, which need not exist."""
    return Path(os.environ.get(VARIABLE) or os.path.expanduser("~/.cache"))


def can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, or where it would be made. It is tried, as permissions don't tell all."""
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError:
        return False
    return folder.is_absolute()  # without a home ~ is left as it is, and would be a folder here


def choose() -> None:
    """Have this process, and all that it starts, keep caches here if the user's own folder can't be written."""
    if not can_be_written(asked()):
        os.environ[VARIABLE] = str(here())
