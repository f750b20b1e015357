"""Forecasts that are sealed before the rows run: results/foretold/foretold.json, and its line in the journal.

The line has the time, the file's sha256, and the sha256 of all lines before it. So a forecast that was changed, made
after its row had run, or put between earlier lines does not pass `lockstep check`. Whoever rewrites the whole journal
is found out only by those who know the file's sha256: the command prints it, to be told to others beforehand.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from lockstep import paths
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import hash_bytes, hash_file, hash_text, read_object, write_json
from lockstep.run import journal, record_files

WHAT = "foretold"  # in the journal
SLACK = datetime.timedelta(seconds=2)  # by which a clock that is set right may run back; the journal has whole seconds
KEYS = ("time", "rows")


def seal(results: Path, foretold: list[dict]) -> str:
    """Write forecasts into a results folder, in place of earlier ones, and return the file's sha256.

    foretold: as of forecast/foretelling.py. Raises BadInput as `refuse` does.
    """
    refuse(results, [each["row"] for each in foretold])
    file = paths.foretold_file(results)
    before = paths.journal_file(results).read_bytes() if paths.journal_file(results).is_file() else b""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(file, {"time": now, "rows": {each["row"]: each for each in foretold}})
    sealed = {"rows": [each["row"] for each in foretold], "sealed": now, "before": hash_bytes(before)}
    journal.note(results, WHAT, file.parent, (file.name,), **sealed)
    return hash_file(file)


def refuse(results: Path, rows: list[str]) -> None:
    """Raise BadInput if rows that are to be foretold have run already, or ones whose forecasts this would replace."""
    where = f"run in {results} already"
    if begun := _begun(results, rows):
        raise BadInput(
            f"--seal: {begun} {where}, so nothing can be foretold there any more. Name other rows by --rows, or another"
            " folder by --results."
        )
    if begun := _begun(results, (read(results) or {"rows": ()})["rows"]):
        raise BadInput(
            f"--seal: {begun} {where}, after being foretold, which another seal would replace. Name another folder by"
            " --results."
        )


def _begun(results: Path, rows: Iterable[str]) -> str:
    """Which of these rows have run, as the begin of a sentence; empty if none has."""
    names = [row for row in rows if first_run(results, row)]
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}" if names else ""


def read(results: Path) -> dict | None:
    """The sealed forecasts of a results folder: their `time`, and `rows` by name; None if there are none.

    Raises BadInput if the file is damaged.
    """
    file = paths.foretold_file(results)
    return read_object(file, KEYS) if file.is_file() else None


def settings_hash(row: Row) -> str:
    """What decides a row's result, as a hash: a forecast is of a run with the same one."""
    return hash_text(json.dumps(row.deciding(), sort_keys=True, default=str))


def first_run(results: Path, row: str) -> str | None:
    """When a row's first timed run began, failed and repeated attempts included (ISO 8601); None if it has none."""
    began = []
    for name in (paths.RECORD, paths.FAILED):
        for file in paths.run_files(results, name, row=row):
            run = record_files.read_run(file.parent)
            began += [attempt.started for attempt in (run, *run.disturbed_before)]
    return min(began, key=_moment, default=None)


def broken(results: Path) -> list[tuple[str, str]]:
    """Why sealed forecasts can't be relied on: the row, or the file, and what is wrong with its seal.

    Raises BadInput if the journal or the file is damaged.
    """
    file = paths.foretold_file(results)
    lines = journal.read(results)
    seals = [number for number, line in enumerate(lines) if line["what"] == WHAT]
    if not file.is_file():
        return [(str(file), "was sealed, and is gone")] if seals else []
    if not seals:
        return [(str(file), "no line of the journal is about it")]
    at = seals[-1]
    line, sealed = lines[at], read(results)
    wrong = [(str(file), why) for why in _line(results, lines, at, sealed)]
    for row in sealed["rows"]:
        began = first_run(results, row)
        folders = [_row_of(other) for other in lines[:at] if other["what"] == "run"]
        if began and _moment(began) < _moment(sealed["time"]):
            wrong.append((row, f"was foretold at {sealed['time']}, after its first run had begun at {began}"))
        elif row in folders:
            wrong.append((row, "was foretold after its first run, by the order of the journal's lines"))
        elif row not in line.get("rows", ()):
            wrong.append((row, "was not among what was sealed"))
    for before in seals[:-1]:
        runs = {_row_of(other) for other in lines[before:at] if other["what"] == "run"}
        lost = runs.intersection(lines[before].get("rows", ())) - sealed["rows"].keys()
        wrong += [(row, "had run when another seal took the place of its forecast") for row in sorted(lost)]
    return wrong


def _line(results: Path, lines: list[dict], at: int, sealed: dict):
    """What is wrong with the journal's line about the file, whatever was foretold."""
    line, file = lines[at], paths.foretold_file(results)
    packed = paths.packed_file(results).is_file()  # names were removed from its lines; journal.changed knows its hashes
    if not packed and line.get("files", {}).get(file.name) != hash_file(file):
        yield "was changed after it was sealed"
    if line.get("sealed") != sealed["time"] or abs(_moment(line["time"]) - _moment(sealed["time"])) > SLACK:
        yield f"says that it was sealed at {sealed['time']}, and the journal says {line['time']}"
    content = b"".join(paths.journal_file(results).read_bytes().splitlines(keepends=True)[:at])
    if not packed and line.get("before") != hash_bytes(content):
        yield "lines of the journal before its own were changed, removed or added since"
    moments = [_moment(each["time"]) for each in lines]
    if any(moment > moments[at] + SLACK for moment in moments[:at]) or any(
        moment < moments[at] - SLACK for moment in moments[at + 1 :]
    ):
        yield "its time in the journal is not between those of the lines around it"


def _row_of(line: dict) -> str:
    """The row whose run a line of the journal is about."""
    return paths.row_of(Path(line.get("folder", "///")))


def _moment(time: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(time)
