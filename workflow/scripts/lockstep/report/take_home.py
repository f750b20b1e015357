"""To take home: of each row what one would write in a script of one's own, what starts it, and the file beside it."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.differences import difference, without_folders
from lockstep.report.reading import good_runs
from lockstep.report.summary import Summary

OWN_FILES = (paths.ACCELERATE, paths.DEEPSPEED)


@dataclass(frozen=True)
class TakeHome:
    """What a reader can take along of a row: a whole script, a diff against single, and files of the run's folder.

    script: empty where there is none for the strategy. files: by name.
    """

    row: str
    strategy: str
    command: str
    script: str
    difference: str
    files: dict[str, str]


def gather(summary: Summary, rows: list[dict], results: Path) -> list[TakeHome]:
    """What can be taken along of all finished rows, in the order of `rows`; their runs lie in `results`."""
    finished = {row["row"] for row in summary.finished_rows}
    return [_of(row, good_runs(summary.runs[row["row"]])[0], results) for row in rows if row["row"] in finished]


def _of(row: dict, run: dict, results: Path) -> TakeHome:
    strategy = row["strategy"]
    there = registry.path(strategy).is_file()  # results may be of a strategy that is gone
    lines = difference(strategy) if there and strategy != "single" else ""
    folder = results / paths.RUNS / paths.run_name(row["row"], row["world_size"], run["repeat"])
    files = {name: (folder / name).read_text(encoding="utf-8") for name in OWN_FILES if (folder / name).is_file()}
    own = registry.own_scripts().get(strategy)
    script = own.read_text(encoding="utf-8") if own else ""
    command = shlex.join(word.removeprefix(f"{paths.PROJECT}/") for word in run["command"])
    return TakeHome(row["row"], strategy, without_folders(command), script, lines, files)
