"""What a person sees in a terminal while Snakemake works: what runs now, how far all is, and the table as it fills.

A logger plugin for Snakemake, which profiles/default/config.yaml takes where there is a terminal. With
LOCKSTEP_VIEW=snakemake Snakemake's own words are shown, which are in its log file, .snakemake/log, either way.
"""

import atexit
import contextlib
import json
import logging
import os
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from lockstep import paths
from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.errors import BadInput, exit_on_bad_input, printable
from lockstep.files import read_json
from lockstep.run.progress import VIEW, Progress

NAME = "lockstep"
ASKED = "LOCKSTEP_VIEW"
# Snakemake's own ways to tell, and the letters that stand for them.
OTHERS = ("--dry-run", "--dryrun", "--quiet", "--verbose", "--debug-dag", "--logger", "--printshellcmds")
LETTERS = set("nqp")
SECONDS = 2  # between two drawings; one takes some milliseconds, which a timed run does not get
BAR = 16  # columns
LINES = 12  # of a failed job's log
# How the rules begin beside which the view is drawn; the others print what they have to say, and have the terminal.
SILENT = ("prepare", "plan", "peak", "prove_", "train_", "profile_", "decide", "evaluate")


@exit_on_bad_input()
def choose(words: list[str]) -> bool:
    """Whether Snakemake, with these words on its command line, is to show this view; then it is made known to it."""
    asked = os.environ.get(ASKED, "")
    if asked not in ("", "live", "snakemake"):
        raise BadInput(f"{ASKED}={asked}: is no view. Set it to live or snakemake, or leave it out.")
    otherwise = any(word.partition("=")[0] in OTHERS or _short(word) & LETTERS for word in words)
    plain = asked == "snakemake" or os.environ.get("TERM") in (None, "", "dumb")
    if plain or otherwise or not os.isatty(2):
        return False
    os.environ[VIEW] = "1"
    LoggerPluginRegistry().register_plugin(f"snakemake_logger_plugin_{NAME}", sys.modules[__name__])
    return True


def _short(word: str) -> set[str]:
    """The letters of several short options in one word, as in -nq; of -call, or of -Ctrain=..., none."""
    return set(word[1:]) if word[:1] == "-" and word[1:2] != "-" and set(word[1:]) <= set("nqpFRkr") else set()


@dataclass
class Job:
    rule: str
    message: str
    logs: list[str]
    began: float = field(default_factory=lambda: time.monotonic())


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


class LogHandler(LogHandlerBase):
    """Draws the view from what Snakemake logs, and from the records of runs."""

    writes_to_stream = True
    writes_to_file = False
    has_filter = False
    has_formatter = False
    needs_rulegraph = False

    def __post_init__(self) -> None:
        # The terminal itself: what others write to stderr is to come out above the view.
        self.console = Console(file=os.fdopen(os.dup(2), "w", encoding="utf-8"))
        self.began = time.monotonic()
        self.jobs: dict[int, Job] = {}
        self.left: Counter[str] = Counter()  # jobs that have not ended, by rule
        self.kinds: dict[str, Kind] = {}
        self.done = self.total = 0
        self.config: Config | None = None
        self.table: list[dict] = []
        self.live: Live | None = None
        # Before any job begins, since what a job begins with it keeps.
        self.stderr = Stderr(self._say)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:  # a view that can't be drawn must not end what it shows
            self._stop()
            self.handleError(record)

    def close(self) -> None:
        if self.live:
            self.live.transient = False  # where no report follows, what it drew last stays
        self._stop()
        self.stderr.give_back()
        super().close()

    def _take(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            self.left = Counter({rule: n for rule, n in record.stats.items() if rule != "total"})
            self.total = sum(self.left.values())
        elif event == LogEvent.JOB_INFO:
            self._begin(record)
        elif event in (LogEvent.JOB_FINISHED, LogEvent.JOB_ERROR):
            self._end(record.job_id if event == LogEvent.JOB_FINISHED else record.jobid, event == LogEvent.JOB_ERROR)
        elif event == LogEvent.PROGRESS:
            self.done, self.total = record.done, record.total
        elif record.levelno >= logging.WARNING or (event is None and self._worth_saying(str(record.msg))):
            self._say(self.format(record))
            if record.levelno >= logging.ERROR:  # what follows has the terminal
                self._stop()

    def _worth_saying(self, remark: str) -> bool:
        """Once there are jobs, the view says what Snakemake does, but for where its log is."""
        return not self.total or remark.startswith("Complete log")

    def _begin(self, record: logging.LogRecord) -> None:
        job = Job(record.rule_name, record.rule_msg or record.rule_name, list(record.log))
        self.jobs[record.jobid] = job
        self.kinds.setdefault(kind(job.rule), Kind()).begin()
        if not job.rule.startswith(SILENT):
            self._stop()
        elif not self.live:
            self._start()

    def _end(self, number: int, failed: bool) -> None:
        job = self.jobs.pop(number, None)
        if job is None:
            return
        self.kinds[kind(job.rule)].end()
        self.left[job.rule] -= 1
        if failed:
            self._tell_failure(job)
        self.table = self._rows()

    def _tell_failure(self, job: Job) -> None:
        """Why a job failed: a run's own reason, where it has left one, else the end of its log."""
        self._say(f"failed: {job.message}")
        for log in map(Path, job.logs):
            if reason := (_read(log.with_name(paths.FAILED)) or {}).get("reason"):
                self._say(f"    {reason}")
            else:
                for line in last_lines(log):
                    self._say(f"    {line}")
            self._say(f"    all of it: {log}")

    def _start(self) -> None:
        if self.config is None:
            with contextlib.suppress(BadInput):
                self.config = reading.read([paths.config_file(paths.RESULTS)])
        self.table = self._rows()
        self.live = Live(
            get_renderable=self._draw,
            console=self.console,
            refresh_per_second=1 / SECONDS,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.live.start()

    def _stop(self) -> None:
        if self.live:
            live, self.live = self.live, None
            live.stop()

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            if line.strip() and line != "None":
                self.console.print(Text(printable(line)), soft_wrap=True)

    def _draw(self) -> Group:
        now = [
            Text(f"  {job.message}{self._step_of(job)}", overflow="ellipsis", no_wrap=True) for job in self._running()
        ]
        head = Table.grid(padding=(0, 1))
        head.add_column()
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done, width=BAR),
            f"{self.done} of {self.total} jobs, {told(time.monotonic() - self.began)}; {self._time_left()}",
        )
        return Group(head, *now, self._drawn_table(self.console.height - len(now) - 6))

    def _running(self) -> list[Job]:
        return list(self.jobs.values())

    def _time_left(self) -> str:
        seconds = self._seconds_left()
        return "time left not known yet" if seconds is None else f"about {told(seconds)} left"

    def _seconds_left(self) -> float | None:
        costs = {name: each.cost for name, each in list(self.kinds.items()) if each.cost is not None}
        for job in self._running():
            done, planned = self._steps(job)
            if kind(job.rule) not in costs and done:
                costs[kind(job.rule)] = (time.monotonic() - job.began) * planned / done
        trained = [cost for name, cost in costs.items() if name.startswith("train_")]
        if not costs or (not trained and any(n > 0 and _trained(rule)[0] for rule, n in list(self.left.items()))):
            return None  # trainings are most of it
        others = [cost for name, cost in costs.items() if not name.startswith("train_")]
        # A kind of which none has ended yet takes what its like do.
        usual = {True: statistics.fmean(trained or others), False: statistics.fmean(others or trained)}
        left = {rule: n for rule, n in list(self.left.items()) if n > 0}
        seconds = sum(n * costs.get(kind(rule), usual[rule.startswith("train_")]) for rule, n in left.items())
        unnamed = self.total - self.done - sum(left.values())  # those that a checkpoint added
        return max(seconds + max(unnamed, 0) * usual[False] - self._under_way(costs), 0)

    def _under_way(self, costs: dict[str, float]) -> float:
        """Seconds of work that the running jobs have done, as far as they are of a known kind."""
        return sum(
            min(time.monotonic() - job.began, costs[kind(job.rule)])
            for job in self._running()
            if kind(job.rule) in costs
        )

    def _step_of(self, job: Job) -> str:
        done, planned = self._steps(job)
        return f", step {done} of {planned}" if done else ""

    def _steps(self, job: Job) -> tuple[int, int]:
        """How many steps a training's slowest rank has done, and how many are planned; 0 where that is not known."""
        row, repeat = _trained(job.rule)
        if self.config is None or row not in self.config.rows:
            return 0, 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            asked = self.config.repetition(self.config.rows[row], repeat)
            return int(Progress(paths.RESULTS / asked.folder(repeat)).table[:, 2].min()), _planned(asked.plan_name)
        return 0, 0

    def _rows(self) -> list[dict]:
        """What the table says of each row that is trained here, the fastest first; then those without a time."""
        if self.config is None:
            return []
        rows = [self._row(row) for row in self.config.rows.values()]
        return sorted((row for row in rows if row), key=lambda row: (row["seconds"] is None, row["seconds"] or 0))

    def _row(self, row: Row) -> dict | None:
        ahead = {rule: n for rule, n in self.left.items() if n > 0}
        runs = [
            _record(paths.RESULTS / row.folder(repeat))
            for repeat in self.config.repetitions
            if f"train_{row.name}_{repeat}" not in ahead
        ]
        runs = [run for run in runs if run]
        mine = [rule for rule in ahead if _trained(rule)[0] == row.name]
        if not runs and not mine:
            return None
        done = [run for run in runs if run["status"] == "ok"]
        good = [run for run in done if not run["disturbed"]]
        # Disturbed ones where there are no others, as the report has it.
        seconds = [run["seconds"] for run in good or done]
        notes = Counter(
            "failed" if run["status"] != "ok" else "disturbed"
            for run in runs
            if run["status"] != "ok" or run["disturbed"]
        )
        verdict = _read(paths.RESULTS / self.config.trial(row).folder(1) / paths.VERDICT)
        unproven = f"prove_{row.name}" in ahead
        return {
            "row": row.name,
            "seconds": statistics.median(seconds) if seconds else None,
            "range": f"{min(seconds):.2f} to {max(seconds):.2f}" if len(seconds) > 1 else "",
            "runs": f"{len(done)} of {len(runs) + len(mine)}",
            "proof": "" if unproven or not verdict else verdict["proof"].replace("-", " "),
            "note": ", ".join(f"{n} {what}" for what, n in notes.items()),
        }

    def _drawn_table(self, height: int) -> Table:
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        for name, side in (("row", "left"), ("", "left"), ("seconds", "right"), ("range", "left")):
            table.add_column(name, justify=side, no_wrap=True)
        for name in ("runs", "same model?", ""):
            table.add_column(name, no_wrap=True)
        slowest = max((row["seconds"] for row in self.table if row["seconds"]), default=1)
        fits = self.table[: max(height, 1)]
        for row in fits:
            seconds = row["seconds"]
            bar = "" if seconds is None else "█" * max(1, round(BAR * seconds / slowest))
            style = "red" if row["proof"] in ("unequal", "failed") else ""
            table.add_row(
                *(Text(row["row"]), Text(bar, style="cyan"), "" if seconds is None else f"{seconds:.2f}", row["range"]),
                *(row["runs"], Text(row["proof"], style=style), Text(row["note"], style="yellow")),
            )
        if len(self.table) > len(fits):
            table.add_row(f"and {len(self.table) - len(fits)} more")
        return table


class Stderr:
    """stderr of this process, and so of what it starts, while there is a view: its lines are handed to `say`."""

    def __init__(self, say) -> None:
        sys.stderr.flush()
        self.kept = os.dup(2)
        reads, writes = os.pipe()
        os.dup2(writes, 2)
        os.close(writes)
        self.reader = threading.Thread(target=self._hand_on, args=(reads, say), daemon=True)
        self.reader.start()
        atexit.register(self.give_back)

    @staticmethod
    def _hand_on(reads: int, say) -> None:
        with os.fdopen(reads, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                say(line.rstrip("\n"))

    def give_back(self) -> None:
        if self.kept is None:
            return
        sys.stderr.flush()
        os.dup2(self.kept, 2)
        os.close(self.kept)
        self.kept = None
        atexit.unregister(self.give_back)
        self.reader.join(timeout=1)  # for ever, if a process that was started still held the pipe


def kind(rule: str) -> str:
    """What a job is like in how long it takes: a row's repetitions, all proofs, all tests."""
    if rule.startswith("train_"):
        return rule.rpartition("_")[0]
    return "prove" if rule.startswith("prove_") else rule


def _trained(rule: str) -> tuple[str, int]:
    """The row and the repetition that a rule trains; no row where it trains none."""
    if not rule.startswith("train_"):
        return "", 0
    row, _, repeat = rule.removeprefix("train_").rpartition("_")
    return row, int(repeat)


def told(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def last_lines(log: Path) -> list[str]:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    return lines[-LINES:]


@cache
def _planned(plan: str) -> int:
    """The steps of a plan, which stays what it is once a row trains it."""
    return json.loads(paths.plan_summary_file(paths.RESULTS, plan).read_text(encoding="utf-8"))["steps"]


_records: dict[tuple[Path, int], dict] = {}


def _record(folder: Path) -> dict | None:
    """What the table needs of a run; None where it has left no record."""
    for name in (paths.RECORD, paths.FAILED):
        with contextlib.suppress(OSError):
            key = folder / name, (folder / name).stat().st_mtime_ns
            if key not in _records:
                record = _read(folder / name) or {}
                _records[key] = {
                    "status": record.get("status", "failed"),
                    "disturbed": bool((record.get("watch") or {}).get("disturbed")),
                    "seconds": (record.get("clock") or {}).get("train_seconds"),
                }
            return _records[key]
    return None


def _read(file: Path) -> dict | None:
    with contextlib.suppress(OSError, BadInput):
        return read_json(file)
    return None
