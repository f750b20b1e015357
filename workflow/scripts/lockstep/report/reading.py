"""Reads the results of runs from their folders, and decides which runs count."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.analysis import staleness
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.qualities import QUALITIES
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import read_object
from lockstep.model import metrics
from lockstep.proof import verdicts
from lockstep.run import facts, record_files
from lockstep.run.progress import WARMUP_STEPS
from lockstep.run.record import Begun, Record, Tested

LOG_LINES = 15
# The keys that are read from files which may have been changed.
ENVIRONMENT = ("cpu", "cores", "gpus", "packages", "image")
LONG = ("installed", "torch_config")  # long parts of an environment, which have a file of their own in the report


@dataclass(frozen=True)
class Missing:
    """A run whose figures are in no table: it failed, is out of date, or has not been trained and tested."""

    repeat: int
    status: str
    reason: str
    record: Begun | None = None
    log_end: list[str] = field(default_factory=list)  # the last lines of its log


Run = Tested | Missing


def read_run(config: Config, row: Row, repeat: int, results: Path, peak: dict | None) -> Tested | Missing:
    """What is known about one run. A run whose files can't be read counts as failed, and does not affect the others."""
    try:
        return _read(config, row, repeat, results, peak)
    except (BadInput, OSError) as error:
        return Missing(repeat, "failed", str(error))


def _read(config: Config, row: Row, repeat: int, results: Path, peak: dict | None) -> Tested | Missing:
    folder = results / row.folder(repeat)
    run = record_files.read_run(folder)
    if run is None and row.unavailable:
        return Missing(repeat, "unavailable", row.unavailable)
    if run is None:
        return Missing(repeat, "skipped", "not run yet")
    if why := staleness.run(config, row, run, results):
        return Missing(repeat, "stale", why, run)
    if not isinstance(run, Record):
        log = Path(run.log)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        return Missing(repeat, run.status, run.reason, run, lines[-LOG_LINES:])
    if (folder / paths.TEST_REPORT).is_file():
        return _tested(config, row, repeat, run, folder, peak)
    if (folder / paths.UNTESTED).is_file():
        return Missing(repeat, "failed", read_object(folder / paths.UNTESTED, ("reason",))["reason"], run)
    return Missing(repeat, "skipped", "trained, but not converted and tested yet", run)


def _tested(config: Config, row: Row, repeat: int, run: Record, folder: Path, peak: dict | None) -> Tested:
    test = read_object(folder / paths.TEST_REPORT, _of_a_test(config.task))
    text = (folder / paths.TEST_TEXT).read_text(encoding="utf-8")
    environment = read_object(folder / paths.ENVIRONMENT, ENVIRONMENT)
    environment = {name: value for name, value in environment.items() if name not in LONG}
    devices, rate = metrics.peak_of(row, run.settings, environment, peak, run.nodes)
    rates = {"devices": devices, "flops_per_second": rate}
    about = {"test": test | {"text": text}, "environment": environment, "peak": rates}
    return Tested(**vars(run) | {"repeat": repeat} | about)


def _of_a_test(task: str) -> tuple[str, ...]:
    """The keys that a task's report on the test split must have. Results of an earlier version lack later figures."""
    name = registry.deciding_quality(task)
    return (name, "support", *QUALITIES[name].reads)


def as_json(run: Run) -> dict:
    """A run by the keys of summary.json: those of its record, and the report's own."""
    if isinstance(run, Tested):
        return asdict(run)
    about = {name: value for name, value in vars(run).items() if name != "record"}
    return (asdict(run.record) if run.record else {}) | about


def of_json(raw: dict) -> Run:
    """A run from summary.json. Raises ValueError if it lacks a part."""
    if raw.get("status") == "ok":
        return facts.of(Tested, raw)
    return facts.of(Missing, {name: value for name, value in raw.items() if name != "record"})


def records(runs: list[Run]) -> list[Begun]:
    """The records of those runs that have one, whatever became of them."""
    every = [run.record if isinstance(run, Missing) else run for run in runs]
    return [each for each in every if each]


def good_runs(runs: list[Run]) -> list[Tested]:
    """The runs that a row's medians are made of: the successful undisturbed ones or, if none, all successful ones."""
    done = succeeded(runs)
    return [run for run in done if not run.watch.disturbed] or done


def succeeded(runs: list[Run]) -> list[Tested]:
    return [run for run in runs if run.status == "ok"]


def trusted(runs: list[Run]) -> bool:
    """Whether a row has an undisturbed run."""
    return any(not run.watch.disturbed for run in succeeded(runs))


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
