"""Prepared data as a whole: what is known of it, and whether its files are as `prepare` left them."""

from pathlib import Path

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.files import lacking, read_json

MAKE_DATA = "Remove it: Snakemake makes it again, or by hand prepare.py and plan.py with the same configuration."


def require(results: Path) -> dict:
    """What data.json says. Raises BadInput where there is none, or where a file is gone or has changed since."""
    about = read_json(paths.require(paths.data_file(results), "prepare.py"))
    if gone := lacking(paths.data_folder(results), about.get("files", {})):
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise BadInput(f"{gone[0]}{more} is gone or changed. {MAKE_DATA}")
    return about
