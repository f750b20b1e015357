"""The record of a run, which is validated by its schema when written and read; and its ranks' events and errors."""

import json
import re
from functools import cache
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from lockstep.config import registry
from lockstep.config.precisions import PRECISIONS
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json, write_text
from lockstep.paths import FAILED, RECORD, WORKFLOW, rank_error, rank_summary

SCHEMA_FILE = WORKFLOW / "schemas" / "record.schema.yaml"


def read_ranks(folder: Path, world_size: int) -> list[dict]:
    return [read_json(rank_summary(folder, rank)) for rank in range(world_size)]


def read_errors(folder: Path) -> list[dict]:
    """The errors of all ranks, the first one first. On several nodes the order is by their clocks, which may be off."""
    every = rank_error(folder, "*")
    errors = [read_json(file) for file in every.parent.glob(every.name)]
    several = len({error["node"] for error in errors}) > 1
    return sorted(errors, key=lambda error: error["time" if several else "at"])


def read_written(folder: Path) -> list[dict]:
    """The summaries of the ranks that have finished, in order of rank."""
    every = rank_summary(folder, "*")
    files = [file for file in every.parent.glob(every.name) if file.stem.isdecimal()]
    return [read_json(file) for file in sorted(files, key=lambda file: int(file.stem))]


def window(ranks: list[dict]) -> list[float]:
    """The period in which these ranks, all of one node, were timed: [begin, end] by perf_counter, in seconds."""
    windows = [rank["clock"]["window"] for rank in ranks]
    return [min(begin for begin, _ in windows), max(end for _, end in windows)]


def say_error(error: dict, steps: int) -> str:
    return f"rank {error['rank']}, after step {error['step']} of {steps}: {error['type']}: {error['message']}"


def first_error(log: Path) -> str:
    """The first error in the log of a run that never began, after a colon; empty if there is none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    error = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): \S.*)$", text, re.MULTILINE)
    return f": {error[1][:300]}" if error else ""


def write_events(path: Path, ranks: list[dict]) -> None:
    events = sorted((event for rank in ranks for event in rank["events"]), key=lambda event: event["time"])
    write_text(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events))


def read_run(folder: Path) -> dict | None:
    """The record of the last attempt at the run in `folder`, whether it succeeded or failed; None if there is none.

    Raises BadInput if it is not valid.
    """
    for name in (RECORD, FAILED):
        if (folder / name).is_file():
            record = read_json(folder / name)
            if problems := invalid(record):
                raise BadInput(
                    f"{folder / name}: is not a valid record: {problems[0]}. Remove it, and train the row again."
                )
            return record
    return None


@cache
def _validator() -> Draft202012Validator:
    schema = yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))
    schema["properties"]["precision"]["enum"] = list(PRECISIONS)
    schema["properties"]["division"]["enum"] = [*registry.DIVISIONS, *registry.studies()]
    return Draft202012Validator(schema)


def invalid(record: dict) -> list[str]:
    """The violations of the schema in a run's record."""
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(record)]


def write_run(path: Path, record: dict) -> None:
    _validator().validate(record)
    write_json(path, record)
