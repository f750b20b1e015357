"""The folder for caches: the user's, or one beside the results if the user's can't be written, as in containers.

Snakemake creates its cache before it reads the Snakefile, and ends with a traceback if it can't, for example if a
service user has no home.
"""

import os
import tempfile
from pathlib import Path

VARIABLE = "XDG_CACHE_HOME"


def here() -> Path:
    """The folder for caches beside the results."""
    return Path.cwd() / ".snakemake" / "cache"


def asked() -> Path:
    """The user's folder for caches, which may not exist."""
    return Path(os.environ.get(VARIABLE) or os.path.expanduser("~/.cache"))


def can_be_written(folder: Path) -> bool:
    """Whether files can be created in a folder, or in its first existing parent. It is tried, as modes can mislead."""
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError:
        return False
    return folder.is_absolute()  # without a home, expanduser leaves ~, which would be a folder named ~ here


def choose() -> None:
    """Make this process and its children use `here` for caches if the user's folder can't be written."""
    if not can_be_written(asked()):
        os.environ[VARIABLE] = str(here())
