"""Reads the results of runs from their folders, and decides which runs count."""

from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.qualities import QUALITIES
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import read_object
from lockstep.model import metrics
from lockstep.proof import verdicts
from lockstep.run import record, staleness
from lockstep.run.progress import WARMUP_STEPS

LOG_LINES = 15
# The keys that are read from files which may have been changed.
ENVIRONMENT = ("cpu", "cores", "gpus", "packages", "image")
LONG = ("installed", "torch_config")  # long parts of an environment, which have a file of their own in the report


def read_run(config: Config, row: Row, repeat: int, results: Path, peak: dict | None) -> dict:
    """What is known about one run. A run whose files can't be read counts as failed, and does not affect the others."""
    try:
        return _read(config, row, repeat, results, peak)
    except (BadInput, OSError) as error:
        return {"status": "failed", "reason": str(error), "repeat": repeat, "log_end": []}


def _read(config: Config, row: Row, repeat: int, results: Path, peak: dict | None) -> dict:
    folder = results / row.folder(repeat)
    missing = {"status": "skipped", "reason": "not run yet"}
    if row.unavailable:
        missing = {"status": "unavailable", "reason": row.unavailable}
    run = {"log_end": []} | (record.read_run(folder) or missing) | {"repeat": repeat}
    if "asked" in run and (why := staleness.run(config, row, run, results)):
        return run | {"status": "stale", "reason": why}
    if run["status"] == "ok":
        tested = folder / paths.TEST_REPORT
        if not tested.is_file():
            if (folder / paths.UNTESTED).is_file():
                return run | {
                    "status": "failed",
                    "reason": read_object(folder / paths.UNTESTED, ("reason",))["reason"],
                }
            return run | {"status": "skipped", "reason": "trained, but not converted and tested yet"}
        run["test"] = read_object(tested, _tested(config.task))
        run["test"]["text"] = (folder / paths.TEST_TEXT).read_text(encoding="utf-8")
        run["environment"] = read_object(folder / paths.ENVIRONMENT, ENVIRONMENT)
        for name in LONG:
            run["environment"].pop(name, None)
        devices, rate = metrics.peak_of(row, run, peak)
        run["peak"] = {"devices": devices, "flops_per_second": rate}
    elif run["status"] == "failed" and Path(run["log"]).is_file():
        log = Path(run["log"]).read_text(encoding="utf-8", errors="replace")
        run["log_end"] = log.splitlines()[-LOG_LINES:]
    return run


def _tested(task: str) -> tuple[str, ...]:
    """The keys that a task's report on the test split must have. Results of an earlier version lack later figures."""
    name = registry.deciding_quality(task)
    return (name, "support", *QUALITIES[name].reads)


def good_runs(runs: list[dict]) -> list[dict]:
    """The runs that a row's medians are made of: the successful undisturbed ones or, if none, all successful ones."""
    done = succeeded(runs)
    return [run for run in done if not run["watch"]["disturbed"]] or done


def succeeded(runs: list[dict]) -> list[dict]:
    return [run for run in runs if run["status"] == "ok"]


def trusted(runs: list[dict]) -> bool:
    """Whether a row has an undisturbed run."""
    return any(not run["watch"]["disturbed"] for run in succeeded(runs))


def read_verdict(config: Config, row: Row, results: Path) -> dict | None:
    """The verdict on a row; a verdict that can't be read counts as a failed proof."""
    try:
        return verdicts.read(config, row, results)
    except BadInput as error:
        return verdicts.failed(config, row, str(error))


def take_out_stale(config: Config, by_row: dict[str, dict | None], run_of, results: Path) -> dict[str, str]:
    """Remove from `by_row` the verdicts or profiles that were made with other settings; returns why, by row."""
    reasons = {
        name: why
        for name, made in by_row.items()
        if made and (why := staleness.folder(config, run_of(config.rows[name]), results))
    }
    by_row |= dict.fromkeys(reasons)
    return reasons


def read_optional(file: Path, keys: tuple[str, ...], damaged: list[str]) -> dict | None:
    """The content of an optional file; None if it is missing or damaged. An error is added to `damaged`."""
    try:
        return read_object(file, keys) if file.is_file() else None
    except BadInput as error:
        damaged.append(str(error))
        return None


def step_seconds(file: Path) -> np.ndarray:
    """The seconds of the steady steps of the rank that took longest; empty if they are unknown."""
    try:
        ranks = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.zeros(0)  # made by an earlier version, or damaged, which check.py reports
    return ranks[ranks.sum(axis=1).argmax(), WARMUP_STEPS:]
