"""The live view in a terminal: the running jobs, the overall progress, and the table as it fills."""

import atexit
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import Counter

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from lockstep.config.row import Row
from lockstep.errors import printable, wrapped
from lockstep.view.jobs import Follower, Job, format_duration, trained

SECONDS = 2  # between two drawings; each takes some milliseconds from a timed run
BAR = 16  # characters
# The table's columns, each with the least width of the terminal at which it is shown.
COLUMNS = {"row": 0, "bar": 80, "seconds": 0, "runs": 0, "same model?": 50, "note": 0}
BAD = ("failed", "error", "unequal")  # the beginnings of texts that are shown in red
SIDE = {"seconds": "right"}
# The beginnings of rules beside which the view is drawn; jobs of other rules print to the terminal themselves.
SILENT = ("prepare", "plan", "peak", "prove_", "train_", "profile_", "evaluate")


class LogHandler(Follower):
    """Draws the view from Snakemake's log events and the records of runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The terminal itself, because what others write to stderr is shown above the view.
        self.console = Console(file=os.fdopen(os.dup(2), "w", encoding="utf-8"))
        self.table: list[dict] = []
        self.live: Live | None = None
        self.drawn: tuple[int, list[int]] | None = (
            None  # the terminal's width at the last drawing, and the width of each line
        )
        # Before any job begins, because a job inherits stderr.
        self.stderr = Stderr(self.say)

    def handleError(self, record: logging.LogRecord) -> None:
        self._stop()
        super().handleError(record)

    def close(self) -> None:
        if self.live:
            self.live.transient = False  # if no report follows, the last drawing stays
        self._stop()
        self.stderr.give_back()
        super().close()

    def remark(self, record: logging.LogRecord) -> None:
        super().remark(record)
        if record.levelno >= logging.ERROR:  # what follows needs the terminal
            self._stop()

    def over(self) -> None:
        self._stop()

    def interrupted(self) -> None:
        self._stop()
        super().interrupted()

    def began_job(self, job: Job) -> None:
        if not job.rule.startswith(SILENT):
            self._stop()
        elif not (self.live or self.ending or self._printing()):
            self._start()

    def _printing(self) -> bool:
        """Whether a job is running that prints to the terminal itself."""
        return any(not job.rule.startswith(SILENT) for job in self.running())

    def _end(self, number: int) -> Job | None:
        job = super()._end(number)
        if job:
            self.table = self.rows_now()
            if self.jobs and not (self.live or self.ending or self._printing()):
                self._start()
        return job

    def _start(self) -> None:
        self.table, self.drawn = self.rows_now(), None
        self.live = Live(
            get_renderable=self.draw,
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

    def say(self, text: str) -> None:
        if self.live:
            self.live.refresh()  # to the terminal's present width, as the text appears above the view
        for line in text.splitlines():
            if line.strip() and line != "None":
                style = "red" if line.startswith(BAD) else ""
                self.console.print(Text(wrapped(printable(line), self.console.width), style), soft_wrap=True)

    def draw(self) -> Group:
        now = [
            Text(f"  {job.message}{self._step_of(job)}", overflow="ellipsis", no_wrap=True) for job in self.running()
        ]
        head = Table.grid(padding=(0, 1))
        head.add_column()
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done, width=BAR),
            f"{format_duration(time.monotonic() - self.began)}; {self.how_far()}",
        )
        drawing = Group(head, *now, self.drawn_table(self.console.height - len(now) - 6))
        self._follow_resizing(drawing)
        return drawing

    def _follow_resizing(self, drawing: Group) -> None:
        """Erase the lines that the last drawing takes in addition if the terminal has become narrower since.

        Most terminals wrap lines that no longer fit, but rich erases only as many lines as it wrote.
        """
        width = self.console.width
        if self.drawn and self.live and self.drawn[0] != width:
            added = sum(max(1, math.ceil(length / width)) - 1 for length in self.drawn[1])
            erase = (ControlType.ERASE_IN_LINE, 2)
            self.console.control(Control(ControlType.CARRIAGE_RETURN, *(erase, (ControlType.CURSOR_UP, 1)) * added))
        lines = self.console.render_lines(drawing, pad=False)
        self.drawn = width, [Segment.get_line_length(line) for line in lines]

    def _step_of(self, job: Job) -> str:
        done, planned = self.steps(job)
        return f", step {done} of {planned}" if done else ""

    def rows_now(self) -> list[dict]:
        """The table's content for each row that is trained: the fastest first, those without a time last."""
        if self.config is None:
            return []
        rows = [self._row(row) for row in self.config.rows.values()]
        return sorted((row for row in rows if row), key=lambda row: (row["seconds"] is None, row["seconds"] or 0))

    def _row(self, row: Row) -> dict | None:
        ahead = {rule: n for rule, n in self.left.items() if n > 0}
        runs = [
            self.run(row.name, repeat)
            for repeat in self.config.repetitions
            if f"train_{row.name}_{repeat}" not in ahead
        ]
        runs = [run for run in runs if run]
        mine = [rule for rule in ahead if trained(rule)[0] == row.name]
        if not runs and not mine:
            return None
        done = [run for run in runs if run["status"] == "ok"]
        good = [run for run in done if not run["disturbed"]]
        # Disturbed runs count if there are no others, as in the report.
        seconds = [run["seconds"] for run in good or done]
        middle = statistics.median(seconds) if seconds else None
        notes = Counter(
            "failed" if run["status"] != "ok" else "disturbed"
            for run in runs
            if run["status"] != "ok" or run["disturbed"]
        )
        return {
            "row": row.name,
            "seconds": middle,
            "within": max(max(seconds) - middle, middle - min(seconds)) if len(seconds) > 1 else None,
            "runs": f"{len(done)} of {len(runs) + len(mine)}",
            "proof": "" if f"prove_{row.name}" in ahead else self.verdict(row.name),
            "note": ", ".join(f"{n} {note}" for note, n in notes.items()),
        }

    def drawn_table(self, height: int) -> Table:
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        shown = [name for name, least in COLUMNS.items() if self.console.width >= least]
        for name in shown:
            table.add_column("" if name in ("bar", "note") else name, justify=SIDE.get(name, "left"), no_wrap=True)
        slowest = max((row["seconds"] for row in self.table if row["seconds"]), default=1)
        fits = self.table[: max(height, 1)]
        for row in fits:
            seconds = row["seconds"]
            bar = "" if seconds is None else "█" * max(1, round(BAR * seconds / slowest))
            beside = "" if row["within"] is None else f" ± {row['within']:.2f}"
            cells = {
                "row": Text(row["row"]),
                "bar": Text(bar, style="cyan"),
                "seconds": "" if seconds is None else f"{seconds:.2f}{beside}",
                "runs": row["runs"],
                "same model?": Text(row["proof"], style="red" if row["proof"] in BAD else ""),
                "note": Text(row["note"], style="red" if "failed" in row["note"] else "yellow"),
            }
            table.add_row(*(cells[name] for name in shown))
        if len(self.table) > len(fits):
            table.add_row(f"and {len(self.table) - len(fits)} more")
        return table


class Stderr:
    """Replaces stderr of this process and of those that it starts while there is a view; passes each line to `say`."""

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
        self.reader.join(timeout=1)  # without a timeout it would wait forever if a started process still held the pipe
