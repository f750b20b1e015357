"""Reads and writes the record of a run, validated by its schema, and its ranks' summaries, events and errors."""

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

from lockstep.config import registry
from lockstep.config.precisions import PRECISIONS
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json, write_text
from lockstep.paths import FAILED, RECORD, rank_error, rank_summary
from lockstep.run import facts
from lockstep.run.record import Begun, RankSummary, Record


def read_ranks(folder: Path, world_size: int) -> list[RankSummary]:
    return [_summary(rank_summary(folder, rank)) for rank in range(world_size)]


def _summary(file: Path) -> RankSummary:
    try:
        return facts.of(RankSummary, read_json(file))
    except ValueError as error:
        raise BadInput(f"{file}: {error}. Train the row again.") from None


def read_errors(folder: Path) -> list[dict]:
    """The errors of all ranks, the first one first. On several nodes the order is by their clocks, which may be off."""
    every = rank_error(folder, "*")
    errors = [read_json(file) for file in every.parent.glob(every.name)]
    several = len({error["node"] for error in errors}) > 1
    return sorted(errors, key=lambda error: error["time" if several else "at"])


def read_written(folder: Path) -> list[RankSummary]:
    """The summaries of the ranks that have finished, in order of rank."""
    every = rank_summary(folder, "*")
    files = [file for file in every.parent.glob(every.name) if file.stem.isdecimal()]
    return [_summary(file) for file in sorted(files, key=lambda file: int(file.stem))]


def window(ranks: list[RankSummary]) -> list[float]:
    """The period in which these ranks, all of one node, were timed: [begin, end] by perf_counter, in seconds."""
    windows = [rank.clock.window for rank in ranks]
    return [min(begin for begin, _ in windows), max(end for _, end in windows)]


def say_error(error: dict, steps: int) -> str:
    return f"rank {error['rank']}, after step {error['step']} of {steps}: {error['type']}: {error['message']}"


def first_error(log: Path) -> str:
    """The first error in the log of a run that never began, after a colon; empty if there is none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    error = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): \S.*)$", text, re.MULTILINE)
    return f": {error[1][:300]}" if error else ""


def write_events(path: Path, ranks: list[RankSummary]) -> None:
    events = sorted((event for rank in ranks for event in rank.events), key=lambda event: event["time"])
    write_text(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events))


def read_run(folder: Path) -> Record | Begun | None:
    """The record of the last attempt at the run in `folder`; None if there is none.

    It is a Record if the run succeeded, and otherwise only what is recorded of every run. Raises BadInput if it is not
    valid.
    """
    for name in (RECORD, FAILED):
        if (folder / name).is_file():
            return _read(folder / name)
    return None


def _read(file: Path) -> Record | Begun:
    kind, raw = _kind(file), read_json(file)
    if problems := invalid(kind, raw):
        raise BadInput(f"{file}: is not a valid record: {problems[0]}. Remove it, and train the row again.")
    return facts.of(kind, raw)


def _kind(file: Path) -> type:
    return Record if file.name == RECORD else Begun


@cache
def _validator(kind: type):
    from jsonschema import Draft202012Validator  # imported here, as ranks need only the types

    schema = facts.schema(kind)
    schema["properties"]["precision"]["enum"] = list(PRECISIONS)
    schema["properties"]["division"]["enum"] = [*registry.DIVISIONS, *registry.studies()]
    if kind is Begun:
        schema["properties"]["reason"]["minLength"] = 1
    return Draft202012Validator(schema)


def invalid(kind: type, raw: dict) -> list[str]:
    """The violations of the schema in a run's record, which is to be of `kind`."""
    return [f"{error.json_path}: {error.message}" for error in _validator(kind).iter_errors(raw)]


def write_run(path: Path, made: Record | Begun) -> None:
    raw = asdict(made)
    _validator(_kind(path)).validate(raw)
    write_json(path, raw)
