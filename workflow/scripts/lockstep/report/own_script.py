"""What a reader needs to train as a row does in a script of their own: code, command and configuration files."""

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
class OwnScript:
    """For one row: a whole script, the strategy's diff against single, and configuration files of the run.

    script: empty if the strategy has none. files: the contents, by file name.
    """

    row: str
    strategy: str
    command: str
    script: str
    difference: str
    files: dict[str, str]


def gather(summary: Summary, rows: list[dict], results: Path) -> list[OwnScript]:
    """One entry for each finished row, in the order of `rows`; their runs are in `results`."""
    finished = {row["row"] for row in summary.finished_rows}
    return [_of(row, good_runs(summary.runs[row["row"]])[0], results) for row in rows if row["row"] in finished]


def _of(row: dict, run: dict, results: Path) -> OwnScript:
    strategy = row["strategy"]
    there = registry.path(strategy).is_file()  # the results may be of a strategy that was removed
    lines = difference(strategy) if there and strategy != "single" else ""
    folder = results / paths.RUNS / paths.run_name(row["row"], row["world_size"], run.repeat)
    files = {name: (folder / name).read_text(encoding="utf-8") for name in OWN_FILES if (folder / name).is_file()}
    own = registry.own_scripts().get(strategy)
    script = own.read_text(encoding="utf-8") if own else ""
    command = shlex.join(word.removeprefix(f"{paths.PROJECT}/") for word in run.command)
    return OwnScript(row["row"], strategy, without_folders(command), script, lines, files)
