"""results/blocks/<k>.json: the decision after block k, with `repeats: auto`. Imports nothing slow."""

from pathlib import Path

from lockstep.config.configuration import FIRST_BLOCKS, MOST_BLOCKS
from lockstep.errors import BadInput
from lockstep.files import read_object

AFTER = range(FIRST_BLOCKS, MOST_BLOCKS + 1)  # the blocks after which to decide whether another one follows
KEYS = ("rows", "contending", "why", "width", "seconds")
AGAIN = "Remove it and start Snakemake again, which makes the decision anew; no run is lost."


def read(file: Path) -> dict:
    """The decision in a file. Raises BadInput if the file is damaged."""
    try:
        decision = read_object(file, KEYS)
    except BadInput:
        raise BadInput(f"{file}: is damaged. {AGAIN}") from None
    names = [decision["rows"], decision["contending"]]
    if not all(isinstance(several, list) and all(isinstance(name, str) for name in several) for several in names):
        raise BadInput(f"{file}: is damaged (its rows are not a list of names). {AGAIN}")
    if not (isinstance(decision["why"], str) and isinstance(decision["width"], float | int | None)):
        raise BadInput(f"{file}: is damaged (it has no reason, or its width is not a number). {AGAIN}")
    return decision
