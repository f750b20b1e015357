"""results/blocks/<k>.json: what was decided after block k, with `repeats: auto`. Imports nothing heavy."""

from pathlib import Path

from lockstep.config.configuration import FIRST_BLOCKS, MOST_BLOCKS
from lockstep.errors import BadInput
from lockstep.files import read_object

AFTER = range(FIRST_BLOCKS, MOST_BLOCKS + 1)  # the blocks after which it is decided whether another one follows
KEYS = ("rows", "contending", "why", "width", "seconds")
AGAIN = "Remove it and start Snakemake again, which decides anew; no run is lost."


def read(file: Path) -> dict:
    """A decision. Raises BadInput where the file holds none."""
    try:
        decision = read_object(file, KEYS)
    except BadInput:
        raise BadInput(f"{file}: is damaged. {AGAIN}") from None
    names = [decision["rows"], decision["contending"]]
    if not all(isinstance(several, list) and all(isinstance(name, str) for name in several) for several in names):
        raise BadInput(f"{file}: is damaged (rows are no list of names). {AGAIN}")
    if not (isinstance(decision["why"], str) and isinstance(decision["width"], float | int | None)):
        raise BadInput(f"{file}: is damaged (no reason, or a width that is not a number). {AGAIN}")
    return decision
