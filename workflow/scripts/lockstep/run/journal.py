"""results/journal.jsonl: what was requested and made, when, and the hashes of its files. Lines are only appended.

`check.py` compares a results folder with the journal: a file that was changed afterwards no longer has the hash that
was recorded when it was made. It can't detect a change if the journal was rewritten too.
"""

import datetime
import json
import os
from pathlib import Path

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.files import hash_file, read_object

# The files of a run that say how it went. Its checkpoint and its model have their own manifests.
OF_A_RUN = (paths.RECORD, paths.LEDGER, paths.STEPS, paths.ENVIRONMENT, paths.SETTINGS, paths.WATCH, paths.EVENTS)
OF_A_RUN += (str(paths.rank_summary(Path(), "*")),)
OF_A_TEST = (paths.TEST_REPORT, paths.TEST_PREDICTIONS)


def note(results: Path, what: str, folder: Path | None = None, patterns: tuple[str, ...] = (), **about) -> None:
    """Append a line: `what` was done in `folder`, with the hashes of the files there that match `patterns`."""
    line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "what": what} | about
    if folder is not None:
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        line["folder"] = folder.relative_to(results).as_posix()
        line["files"] = {file.relative_to(folder).as_posix(): hash_file(file) for file in files}
    with paths.journal_file(results).open(
        "a+b", buffering=0
    ) as stream:  # one write, because two trials may end at the same time
        if stream.tell() and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n":
            stream.write(b"\n")  # the last line was cut off by a power cut, so it is ended first
        stream.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


def note_test(run: Path) -> None:
    """Record the test of a run's model, if the run is in a results folder."""
    run = run.resolve()
    if results := paths.results_of(run):
        note(results, "test", run, OF_A_TEST)


def read(results: Path) -> list[dict]:
    """All lines, the oldest first; none if there is no journal. Raises BadInput if a line is damaged."""
    file = paths.journal_file(results)
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return [_entry(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _entry(line: bytes, where: str) -> dict:
    try:
        entry = json.loads(line)
    except ValueError:  # not JSON, or not text
        entry = None
    if not isinstance(entry, dict) or "what" not in entry:
        raise BadInput(f"{where}: is damaged, so it is unknown whether files were changed since.")
    return entry


def listed(lines: list[dict]) -> dict[str, str]:
    """The sha256 of each file by its path relative to the results folder; the last line about it counts."""
    files = [
        (_path(line.get("folder", "."), name), sha256)
        for line in lines
        for name, sha256 in line.get("files", {}).items()
    ]
    return dict(files)


def _path(folder: str, name: str) -> str:
    return os.path.normpath(f"{folder}/{name}")


def changed(results: Path, lines: list[dict]) -> list[tuple[str, str]]:
    """The files that are missing or differ from the last line about them: each one's folder, and what is wrong."""
    last = {(line["what"], line["folder"]): line["files"] for line in lines if "folder" in line}
    changes, before = _unpacked(results)
    for (what, folder), files in last.items():
        for name, sha256 in files.items():
            file = results / folder / name
            if before.get(_path(folder, name)) == sha256:
                continue
            if not file.is_file():
                changes.append((str(results / folder), f"{name}, which the {what} left, is gone"))
            elif hash_file(file) != sha256:
                changes.append((str(results / folder), f"{name} was changed after the {what} that left it"))
    return changes


def _unpacked(results: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Of an unpacked record: the files that are not as it had them, and hashes from before it was packed.

    It leaves files out, and has others with names of machines, users and folders removed.
    """
    if not paths.packed_file(results).is_file():
        return [], {}
    manifest = read_object(paths.packed_file(results), ("files", "left_out"))
    changes, before = [], dict(manifest["left_out"])
    changes += [
        (str(results), f"{name} is there, though the record left it out")
        for name in before
        if (results / name).exists()
    ]
    for name, packed in manifest["files"].items():
        if not (results / name).is_file() or hash_file(results / name) != packed["sha256"]:
            changes.append((str(results), f"{name} is not as the record had it"))
        before[name] = packed.get("before", packed["sha256"])
    return changes, before
