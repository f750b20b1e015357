"""Prepared data as a whole: what is known of it, and whether its files are as `prepare` left them."""

from pathlib import Path

from lockstep import paths
from lockstep.errors import BadInput, brief
from lockstep.files import lacking, read_json

MAKE_DATA = "Remove it: Snakemake makes it again, or by hand prepare.py and plan.py with the same configuration."


def require(results: Path) -> dict:
    """What data.json says. Raises BadInput where there is none, or where a file is gone or has changed since."""
    about = read_json(paths.require(paths.data_file(results), "prepare.py"))
    if gone := lacking(paths.data_folder(results), about.get("files", {})):
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise BadInput(f"{gone[0]}{more} is gone or changed. {MAKE_DATA}")
    return about


def damaged(split: Path, error: Exception) -> BadInput:
    """What to raise where a split's files can't be read."""
    return BadInput(f"{split}: is damaged ({brief(error)}). Remove it, and prepare the data again.")


def stamps(results: Path) -> dict[Path, tuple[int, int] | None]:
    """The size of each file of prepared data, and when it was last written to; None for one that is gone."""
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
    """A file that is not as `stamps` found it; None where all are."""
    return next((file for file, stamp in before.items() if _stamp(file) != stamp), None)
