"""A folder of prepared data: its summary, and whether its files are unchanged since `prepare` wrote them."""

from pathlib import Path

from lockstep import paths
from lockstep.errors import BadInput, brief
from lockstep.files import lacking, read_json

MAKE_DATA = "Remove it; Snakemake makes it again, or run prepare.py and plan.py with the same configuration."


def require(results: Path) -> dict:
    """The content of data.json. Raises BadInput if it, or a file of the data, is missing or has changed."""
    about = read_json(paths.require(paths.data_file(results), "prepare.py"))
    if gone := lacking(paths.data_folder(results), about.get("files", {})):
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise BadInput(f"{gone[0]}{more} is gone or changed. {MAKE_DATA}")
    return about


def damaged(split: Path, error: Exception) -> BadInput:
    """The error to raise if a split's files can't be read."""
    return BadInput(f"{split}: is damaged ({brief(error)}). Remove it, and prepare the data again.")


def stamps(results: Path) -> dict[Path, tuple[int, int] | None]:
    """The size and modification time of each file of prepared data; None for a missing file."""
    about = paths.data_file(results)
    names = read_json(about).get("files", {}) if about.is_file() else {}
    return {file: _stamp(file) for file in (about, *(paths.data_folder(results) / name for name in names))}


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def changed(before: dict[Path, tuple[int, int] | None]) -> Path | None:
    """The first file that has changed since `stamps` returned `before`; None if none has."""
    return next((file for file, stamp in before.items() if _stamp(file) != stamp), None)
