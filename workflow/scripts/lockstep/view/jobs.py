"""What every view knows: which jobs run, how long those of their kind take, and what runs have left behind."""

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
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.run import staleness
from lockstep.run.progress import Progress

LINES = 12  # of a failed job's log
PREPARED_LINES = 30  # of what prepare says
# How the rules begin whose runs say themselves why they failed, and where their log is.
SAY_WHY = ("train_", "profile_")
# How it says at the end that a job has failed, which is told with the job.
OVER = ("Exiting because a job execution failed", "At least one job did not complete successfully")
# What is kept of a run's record.
OF_A_RECORD = ("asked", "hashes", "status", "watch", "clock")
# How those remarks of Snakemake's begin that say nothing of this benchmark.
USUAL = ("Building DAG", "Using shell", "Provided ", "Rules claiming", "Config file", "Assuming ", "Singularity")


@dataclass
class Job:
    rule: str
    message: str
    logs: list[str]
    began: float = field(default_factory=lambda: time.monotonic())
    before: int | None = None  # when the file of its progress was written by then: what an earlier run left


@dataclass
class Kind:
    """How long jobs of a kind take: seconds in which at least one of them ran, over how many have ended."""

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
        """Seconds for each; None before one has ended."""
        running = time.monotonic() - self.since if self.running else 0
        return (self.seconds + running) / self.ended if self.ended else None


class Follower(LogHandlerBase):
    """Follows Snakemake's jobs by what it logs. A view says how it shows that, in the methods that come first."""

    # The Snakefile says both, once the configuration is checked.
    config: Config | None = None  # what is trained
    local = True  # whether jobs run on this machine, so that what they print is seen here

    def say(self, text: str) -> None:
        """Show a text, which may have several lines."""
        raise NotImplementedError

    def planned(self) -> None:
        """It is known which jobs there are."""

    def began_job(self, job: Job) -> None:
        """A job has begun."""

    def ended_job(self, job: Job) -> None:
        """A job has ended well."""

    def over(self) -> None:
        """All jobs have ended, and some have failed; what follows, the report, has the terminal."""

    def interrupted(self) -> None:
        """Somebody pressed Ctrl-C, and what runs is being ended."""
        self.say("interrupted: what runs is ended, then comes the report over what there is")

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
        self.done = self.total = 0
        self.ending = False  # as somebody asked for, by Ctrl-C
        self.failed = False  # a job has

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:  # a view that can't be drawn must not end what it shows
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            self.left = Counter({rule: n for rule, n in record.stats.items() if rule != "total"})
            self.total = sum(self.left.values())
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
        """Snakemake has something to say besides."""
        self.say(self.format(record))

    def _worth_saying(self, record: logging.LogRecord, event: LogEvent | None) -> bool:
        """Once there are jobs, the view says what Snakemake does, but for where its log is, and what went wrong.

        That a job's command failed is told with the job.
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

    def _tell_preparation(self, job: Job) -> None:
        """What the data was taken for: its labels with their counts, and what is to be known of it."""
        for log in map(Path, job.logs):
            for line in last_lines(log, PREPARED_LINES):
                self.say(line)

    def _tell_failure(self, job: Job) -> None:
        """Why a job failed: a run's own reason, where it has left one, else the end of its log."""
        self.say(f"failed: {job.message}; {self.how_far()}")
        for log in map(Path, job.logs):
            if reason := (read(log.with_name(paths.FAILED)) or {}).get("reason"):
                if self.local and job.rule.startswith(SAY_WHY):
                    continue
                self.say(f"    {reason}")
            else:
                for line in last_lines(log):
                    self.say(f"    {line}")
            self.say(f"    all of it: {log}")

    def running(self) -> list[Job]:
        return list(self.jobs.values())

    def how_far(self) -> str:
        """How many jobs are done, and how long the others may take."""
        seconds = self.seconds_left()
        left = "time left not known yet" if seconds is None else f"about {format_duration(seconds)} left"
        return f"{self.done} of {self.total} jobs, {left}"

    def seconds_left(self) -> float | None:
        costs = {name: each.cost for name, each in list(self.kinds.items()) if each.cost is not None}
        for job in self.running():
            done, planned = self.steps(job)
            if kind(job.rule) not in costs and done:
                costs[kind(job.rule)] = (time.monotonic() - job.began) * planned / done
        taken = [cost for name, cost in costs.items() if name.startswith("train_")]
        if not costs or (not taken and any(n > 0 and trained(rule)[0] for rule, n in list(self.left.items()))):
            return None  # trainings are most of it
        others = [cost for name, cost in costs.items() if not name.startswith("train_")]
        # A kind of which none has ended yet takes what its like do.
        usual = {True: statistics.fmean(taken or others), False: statistics.fmean(others or taken)}
        left = {rule: n for rule, n in list(self.left.items()) if n > 0}
        seconds = sum(n * costs.get(kind(rule), usual[rule.startswith("train_")]) for rule, n in left.items())
        unnamed = self.total - self.done - sum(left.values())  # those that a checkpoint added
        return max(seconds + max(unnamed, 0) * usual[False] - self._under_way(costs), 0)

    def _under_way(self, costs: dict[str, float]) -> float:
        """Seconds of work that the running jobs have done, as far as they are of a known kind."""
        return sum(
            min(time.monotonic() - job.began, costs[kind(job.rule)])
            for job in self.running()
            if kind(job.rule) in costs
        )

    def steps(self, job: Job) -> tuple[int, int]:
        """How many steps a training's slowest rank has done, and how many are planned; 0 where that is not known."""
        if not (asked := self._asked(job)) or self._progress_written(job) == job.before:
            return 0, 0
        row, repeat = asked
        with contextlib.suppress(OSError, ValueError, KeyError):
            done = int(Progress(self.config.results / row.folder(repeat)).table[:, 2].min())
            return done, _planned(paths.plan_summary_file(self.config.results, row.plan_name))
        return 0, 0

    def _progress_written(self, job: Job) -> int | None:
        """When the file of a training's progress was written; None where there is none."""
        if asked := self._asked(job):
            row, repeat = asked
            with contextlib.suppress(OSError):
                return (self.config.results / row.folder(repeat) / paths.PROGRESS).stat().st_mtime_ns
        return None

    def _asked(self, job: Job) -> tuple[Row, int] | None:
        """The row that a job trains, as its repetition does, and which one that is; None where it trains none."""
        name, repeat = trained(job.rule)
        if self.config is None or name not in self.config.rows:
            return None
        return self.config.repetition(self.config.rows[name], repeat), repeat

    def verdict(self, row: str) -> str:
        """Whether a row is proven to train the same model; empty where that is not known of the row as it is now."""
        trial = self.config.trial(self.config.rows[row])
        verdict = read(self.config.results / trial.folder(1) / paths.VERDICT)
        if not verdict or not self._current(lambda results: staleness.folder(self.config, trial, results)):
            return ""
        return verdict["proof"].replace("-", " ")

    def run(self, name: str, repeat: int) -> dict | None:
        """What a view needs of a run; None where it has left no record, or one of other settings than its row's."""
        row = self.config.repetition(self.config.rows[name], repeat)
        folder = self.config.results / row.folder(repeat)
        for file in (folder / paths.RECORD, folder / paths.FAILED):
            with contextlib.suppress(OSError):
                record = _record(file, file.stat().st_mtime_ns)
                if "asked" in record and not self._current(partial(self._stale, row, record)):
                    return None
                return {
                    "status": record.get("status", "failed"),
                    "disturbed": (record.get("watch") or {}).get("disturbed") or [],
                    "seconds": (record.get("clock") or {}).get("train_seconds"),
                }
        return None

    def _stale(self, row: Row, record: dict, results: Path) -> str:
        return staleness.run(self.config, row, record, results)

    def _current(self, why_not: Callable[[Path], str]) -> bool:
        """Whether results are of the settings and the data that hold now; none are where the data is not there."""
        try:
            return not why_not(self.config.results)
        except (BadInput, KeyError):
            return False


def kind(rule: str) -> str:
    """What a job is like in how long it takes: a row's repetitions, all proofs, all tests."""
    if rule.startswith("train_"):
        return rule.rpartition("_")[0]
    return "prove" if rule.startswith("prove_") else rule


def trained(rule: str) -> tuple[str, int]:
    """The row and the repetition that a rule trains; no row where it trains none."""
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
    """The steps of a plan, which stays what it is once a row trains it."""
    return json.loads(about.read_text(encoding="utf-8"))["steps"]


@cache
def _record(file: Path, changed: int) -> dict:
    """`changed`: when the file was written, after which another one would be another run's."""
    return {name: value for name, value in (read(file) or {}).items() if name in OF_A_RECORD}
