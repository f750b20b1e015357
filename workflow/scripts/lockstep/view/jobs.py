"""What every view knows: the jobs that run, how long jobs of each kind take, and the results of runs."""

import contextlib
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from lockstep import paths
from lockstep.analysis import staleness
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import hash_text, read_json, write_json
from lockstep.run import record_files
from lockstep.run.progress import Progress
from lockstep.run.record import Begun, Record

LINES = 12  # how many lines of a failed job's log are shown
PREPARED_LINES = 30  # how many lines of prepare's log are shown
# The beginnings of the rules whose runs report themselves why they failed, and where their log is.
SAY_WHY = ("train_", "profile_")
# Snakemake's last messages after a failure, which the view has reported with the job.
OVER = ("Exiting because a job execution failed", "At least one job did not complete successfully")
# The beginnings of Snakemake's remarks that say nothing about this benchmark.
USUAL = ("Building DAG", "Using shell", "Provided ", "Rules claiming", "Config file", "Assuming ", "Singularity")


@dataclass
class Job:
    rule: str
    message: str
    logs: list[str]
    began: float = field(default_factory=lambda: time.monotonic())
    before: int | None = None  # the time of an earlier run's progress file, when the job began


@dataclass
class Kind:
    """How long jobs of a kind take: the seconds in which at least one ran, divided by the number that have ended."""

    running: int = 0
    ended: int = 0
    seconds: float = 0
    since: float = 0

    def begin(self) -> None:
        if not self.running:
            self.since = time.monotonic()
        self.running += 1

    def end(self) -> None:
        self.running -= 1
        self.ended += 1
        if not self.running:
            self.seconds += time.monotonic() - self.since

    @property
    def cost(self) -> float | None:
        """Seconds per job; None before any has ended."""
        running = time.monotonic() - self.since if self.running else 0
        return (self.seconds + running) / self.ended if self.ended else None


class Follower(LogHandlerBase):
    """Follows Snakemake's jobs through its log events. A view overrides the methods that come first."""

    # The Snakefile sets both, when the configuration is checked.
    config: Config | None = None  # what is trained
    local = True  # whether jobs run on this machine, so that their output appears here

    def say(self, text: str) -> None:
        """Show a text of one or more lines."""
        raise NotImplementedError

    def planned(self) -> None:
        """Called when the jobs are known."""

    def began_job(self, job: Job) -> None:
        """Called when a job has begun."""

    def ended_job(self, job: Job) -> None:
        """Called when a job has succeeded."""

    def over(self) -> None:
        """Called when all jobs have ended and some have failed; the report that follows needs the terminal."""

    def interrupted(self) -> None:
        """Called after Ctrl-C, while the running jobs are being ended."""
        self.say("interrupted: running jobs are ended, then follows the report on the results so far")

    writes_to_stream = True
    writes_to_file = False
    has_filter = False
    has_formatter = False
    needs_rulegraph = False

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.jobs: dict[int, Job] = {}
        self.left: Counter[str] = Counter()  # jobs that have not ended, by rule
        self.kinds: dict[str, Kind] = {}
        self.earlier: dict[str, float] = {}  # seconds per job by kind, of the last benchmark like this one
        self.done = self.total = 0
        self.ending = False  # after Ctrl-C
        self.failed = False  # whether a job has failed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:  # a view that can't be drawn must not end the benchmark
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            self.left = Counter({rule: n for rule, n in record.stats.items() if rule != "total"})
            self.total = sum(self.left.values())
            self.earlier = self._remembered()
            self.planned()
        elif event == LogEvent.JOB_INFO:
            job = Job(record.rule_name, record.rule_msg or record.rule_name, list(record.log))
            job.before = self._progress_written(job)
            self.jobs[record.jobid] = job
            self.kinds.setdefault(kind(job.rule), Kind()).begin()
            self.began_job(job)
        elif event == LogEvent.JOB_FINISHED:
            if job := self._end(record.job_id):
                self.done += 1
                self._remember()
                self.ended_job(job)
                if job.rule == "prepare":
                    self._tell_preparation(job)
        elif event == LogEvent.JOB_ERROR:
            if (job := self._end(record.jobid)) and not self.ending:
                self.failed = True
                self._tell_failure(job)
        elif event == LogEvent.PROGRESS:
            self.done, self.total = record.done, record.total
        elif str(record.msg).startswith("Terminating processes on user request"):
            self.ending = True
            self.interrupted()
        elif any(words in str(record.msg) for words in OVER):
            self.over()
        elif self._worth_saying(record, event):
            self.remark(record)

    def remark(self, record: logging.LogRecord) -> None:
        """Show another message of Snakemake's."""
        self.say(self.format(record))

    def _worth_saying(self, record: logging.LogRecord, event: LogEvent | None) -> bool:
        """Whether to show a message of Snakemake's. Once there are jobs, these are only warnings and errors.

        After a failure it is also where Snakemake's log is. A failed command is reported with its job instead.
        """
        remark = str(record.msg)
        if record.levelno >= logging.WARNING:
            return not self.ending and "CalledProcessError in file" not in remark
        if remark.startswith("Complete log"):
            return self.failed
        return event is None and not (self.total or remark.startswith(USUAL))

    def _end(self, number: int) -> Job | None:
        job = self.jobs.pop(number, None)
        if job:
            self.kinds[kind(job.rule)].end()
            self.left[job.rule] -= 1
        return job

    def _remembered(self) -> dict[str, float]:
        """Seconds per job by kind, as a benchmark of the same data, model and work took here before."""
        before = read(paths.costs_file(self.config.results)) if self.config else None
        return before.get("seconds", {}) if isinstance(before, dict) and before.get("of") == self._work() else {}

    def _remember(self) -> None:
        """Keep what each kind of job has taken by now, for the next benchmark; one that is ended early leaves some."""
        if self.config and self.local:
            taken = {name: each.cost for name, each in self.kinds.items() if each.cost is not None}
            said = {"of": self._work(), "seconds": self.earlier | taken}
            with contextlib.suppress(OSError):  # it is no reason to end a benchmark
                write_json(paths.costs_file(self.config.results), said)

    def _work(self) -> str:
        """A hash of what decides how long jobs take: other data, another model, more steps."""
        asked = {
            name: self.config.source[name] for name in ("task", "data", "model", "train", "hardware", "profile", "rows")
        }
        return hash_text(json.dumps(asked, sort_keys=True))

    def _tell_preparation(self, job: Job) -> None:
        """Show how the data was understood: its labels with their counts, and notes on it."""
        for log in map(Path, job.logs):
            for line in last_lines(log, PREPARED_LINES):
                self.say(line)

    def _tell_failure(self, job: Job) -> None:
        """Show why a job failed: the reason that a run has written, otherwise the end of its log."""
        self.say(f"failed: {job.message}; {self.how_far()}")
        for log in map(Path, job.logs):
            if reason := (read(log.with_name(paths.FAILED)) or {}).get("reason"):
                if self.local and job.rule.startswith(SAY_WHY):
                    continue
                self.say(f"    {reason}")
            else:
                for line in last_lines(log):
                    self.say(f"    {line}")
            self.say(f"    the whole log: {log}")

    def running(self) -> list[Job]:
        return list(self.jobs.values())

    def how_far(self) -> str:
        """The number of finished jobs, and an estimate of the time left where there is one."""
        seconds = self.seconds_left()
        left = "" if seconds is None else f", about {format_duration(seconds)} left"
        return f"{self.done} of {self.total} jobs{left}"

    def seconds_left(self) -> float | None:
        ended = {name: each.cost for name, each in list(self.kinds.items()) if each.cost is not None}
        costs = self.earlier | ended
        for job in self.running():
            done, planned = self.steps(job)
            if kind(job.rule) not in ended and done:
                costs[kind(job.rule)] = (time.monotonic() - job.began) * planned / done
        taken = [cost for name, cost in costs.items() if name.startswith("train_")]
        if not costs or (not taken and any(n > 0 and trained(rule)[0] for rule, n in list(self.left.items()))):
            return None  # most of the time goes to trainings, and none has ended yet
        others = [cost for name, cost in costs.items() if not name.startswith("train_")]
        # A kind of job without a finished one is assumed to take the mean of trainings, or of other jobs.
        usual = {True: statistics.fmean(taken or others), False: statistics.fmean(others or taken)}
        left = {rule: n for rule, n in list(self.left.items()) if n > 0}
        seconds = sum(n * costs.get(kind(rule), usual[rule.startswith("train_")]) for rule, n in left.items())
        unnamed = self.total - self.done - sum(left.values())  # jobs that a checkpoint of Snakemake's has added
        return max(seconds + max(unnamed, 0) * usual[False] - self._under_way(costs), 0)

    def _under_way(self, costs: dict[str, float]) -> float:
        """The seconds that running jobs of a known kind have worked, at most their kind's cost each."""
        return sum(
            min(time.monotonic() - job.began, costs[kind(job.rule)])
            for job in self.running()
            if kind(job.rule) in costs
        )

    def steps(self, job: Job) -> tuple[int, int]:
        """The steps that a training's slowest rank has done, and those planned; 0 and 0 if unknown."""
        if not (asked := self._asked(job)) or self._progress_written(job) == job.before:
            return 0, 0
        row, repeat = asked
        with contextlib.suppress(OSError, ValueError, KeyError):
            done = int(Progress(self.config.results / row.folder(repeat)).table[:, 2].min())
            return done, _planned(paths.plan_summary_file(self.config.results, row.plan_name))
        return 0, 0

    def _progress_written(self, job: Job) -> int | None:
        """When a training's progress file was last written; None if there is none."""
        if asked := self._asked(job):
            row, repeat = asked
            with contextlib.suppress(OSError):
                return (self.config.results / row.folder(repeat) / paths.PROGRESS).stat().st_mtime_ns
        return None

    def _asked(self, job: Job) -> tuple[Row, int] | None:
        """The row that a job trains, in its repetition, and the repetition's number; None if it trains none."""
        name, repeat = trained(job.rule)
        if self.config is None or name not in self.config.rows:
            return None
        return self.config.repetition(self.config.rows[name], repeat), repeat

    def verdict(self, row: str) -> str:
        """The proof's verdict on a row; empty if it is unknown for the row as it is now."""
        trial = self.config.trial(self.config.rows[row])
        verdict = read(self.config.results / trial.folder(1) / paths.VERDICT)
        if not verdict or not self._current(lambda results: staleness.folder(self.config, trial, results)):
            return ""
        return verdict["proof"].replace("-", " ")

    def run(self, name: str, repeat: int) -> dict | None:
        """What a view needs of a run's record; None if there is none, or if the row's settings have changed since."""
        row = self.config.repetition(self.config.rows[name], repeat)
        folder = self.config.results / row.folder(repeat)
        for name in (paths.RECORD, paths.FAILED):
            with contextlib.suppress(OSError, BadInput):
                record = _record(folder, (folder / name).stat().st_mtime_ns)
                if not self._current(partial(self._stale, row, record)):
                    return None
                ok = isinstance(record, Record)
                return {
                    "status": record.status,
                    "disturbed": record.watch.disturbed if ok else [],
                    "seconds": record.clock.train_seconds if ok else None,
                }
        return None

    def _stale(self, row: Row, record: Begun, results: Path) -> str:
        return staleness.run(self.config, row, record, results)

    def _current(self, why_not: Callable[[Path], str]) -> bool:
        """Whether results match the present settings and data; False if there is no data."""
        try:
            return not why_not(self.config.results)
        except (BadInput, KeyError):
            return False


def kind(rule: str) -> str:
    """The kind of a job, whose jobs take similar times: a row's repetitions, all proofs, or the rule itself."""
    if rule.startswith("train_"):
        return rule.rpartition("_")[0]
    return "prove" if rule.startswith("prove_") else rule


def trained(rule: str) -> tuple[str, int]:
    """The row and the repetition that a rule trains; an empty row if it trains none."""
    if not rule.startswith("train_"):
        return "", 0
    row, _, repeat = rule.removeprefix("train_").rpartition("_")
    return row, int(repeat)


def format_duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def last_lines(log: Path, most: int = LINES) -> list[str]:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    return lines[-most:]


def read(file: Path) -> dict | None:
    with contextlib.suppress(OSError, BadInput):
        return read_json(file)
    return None


@cache
def _planned(about: Path) -> int:
    """The number of steps of a plan; cached, because a plan does not change while rows train it."""
    return json.loads(about.read_text(encoding="utf-8"))["steps"]


@cache
def _record(folder: Path, changed: int) -> Begun:
    """The record of a run. `changed` is when its file was written, so that a new run's record is read anew."""
    return record_files.read_run(folder)
