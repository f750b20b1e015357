"""A page that compares several reports: first what differs, then each row's time beside the first folder's."""

from dataclasses import dataclass
from pathlib import Path

from lockstep import stats
from lockstep.report import rendering
from lockstep.report.comparison import Comparison, Line, beside, read_report
from lockstep.report.reading import good_runs
from lockstep.report.words import Text, join, say


@dataclass(frozen=True)
class Time:
    """A row in one folder: its median, the range and number of its runs, and how it compares with the first."""

    seconds: float | None
    range: str
    n: int
    line: Line | None  # None in the first folder, or if that has no such row


def page(folders: list[Path], compared: list[Comparison]) -> str:
    """compared: for each folder except the first, its comparison with the first (report/comparison.py)."""
    reports = [read_report(folder) for folder in folders]
    names = list(dict.fromkeys(row["row"] for report in reports for row in report["rows"]))
    by_row = [{line.row: line for line in comparison.lines} for comparison in compared]
    lines = {name: [lines.get(name) for lines in by_row] for name in names}
    times = {
        name: [_time(report, name, line) for report, line in zip(reports, [None, *lines[name]], strict=True)]
        for name in names
    }
    across = sorted({kind for comparison in compared for line in comparison.lines for kind in line.differs})
    context = {
        "folders": [str(folder) for folder in folders],
        "headline": [_headline(folders[0], *pair) for pair in zip(folders[1:], compared, strict=True)],
        "across": join([say(f"compare_kind_{kind}") for kind in across], say("comma")) if across else None,
        "differing": beside(reports),
        "times": {name: of for name, of in times.items() if any(time.seconds for time in of)},
        "notes": {
            f"{folders[0]} – {folder}": comparison.environment
            for folder, comparison in zip(folders[1:], compared, strict=True)
            if comparison.environment
        },
    }
    return rendering.page("compare.html.j2", say("compare_title"), context)


def _time(report: dict, name: str, line: Line | None) -> Time:
    row = next((row for row in report["rows"] if row["row"] == name), None)
    if row is None or row["train_seconds"] is None:
        return Time(None, "", 0, line)
    seconds = [run.clock.train_seconds for run in good_runs(report["runs"][name])]
    told = f"{min(seconds):.3g} – {max(seconds):.3g}" if len(seconds) > 1 else ""
    return Time(stats.spread(seconds).median, told, len(seconds), line)


def _headline(first: Path, other: Path, compared: Comparison) -> Text:
    """How many rows' times differ, and which differs most."""
    if compared.copied:
        return say("compare_copied", first=first, other=other)
    distinct = [line for line in compared.lines if line.ratio.distinct]
    said = say("compare_headline", first=first, other=other, n=len(distinct), all=len(compared.lines))
    if not distinct:
        return said
    most = max(distinct, key=lambda line: max(line.ratio.value, 1 / line.ratio.value))
    figures = {name: f"{getattr(most.ratio, name):.3f}" for name in ("value", "low", "high")}
    return join([said, say("compare_most", row=most.row, **figures)], Text(" ", ""))
