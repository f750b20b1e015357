"""Results that are kept by name, and how each row's time changed from one to the next."""

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lockstep import paths, stats
from lockstep.config.kinds import Kind
from lockstep.config.settings import DECIDE_NOTHING
from lockstep.errors import BadInput
from lockstep.files import atomic_folder
from lockstep.report import comparison, pictures, rendering
from lockstep.report.charts import COLOURS, Drawing, plt
from lockstep.report.reading import good_runs, succeeded, trusted
from lockstep.report.words import say

# Parts of a results folder that are large, and that no report and no comparison needs.
OF_DATA = (paths.DATASET, paths.TOKENIZER, paths.WEIGHTS)
OF_A_RUN = (paths.CHECKPOINT, paths.MODEL, paths.SAVED, paths.SNAPSHOTS)
OF_A_RUN += (paths.TENSORBOARD, paths.FINAL_WEIGHTS, paths.TRACE)
RUN_DEPTH = len(Path(paths.run_name("row", 1, 1)).parts) + 1  # the depth of a run's folder below the results
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Settings that do not affect the time, as `asked_otherwise` names them.
NOT_MEASURED = {f"{section}.{key}" for section, keys in DECIDE_NOTHING.items() for key in keys}


@dataclass(frozen=True)
class Kept:
    """Kept results: `date` is when their first run started, `report` the content of their summary.json."""

    name: str
    date: str
    commit: str
    report: dict


@dataclass(frozen=True)
class Point:
    """A row's time in kept results, compared with the time before.

    finding: "first", "change", "open" (no change is shown), "once" (a single run shows nothing), "disturbed", or
    "break" (the measurements are not comparable).
    """

    kept: Kept
    seconds: list[float]
    finding: str
    ratio: stats.Ratio | None = None
    why: str = ""

    @property
    def median(self) -> float:
        return stats.spread(self.seconds).median

    @property
    def range(self) -> str:
        return f"{min(self.seconds):.3g} – {max(self.seconds):.3g}" if len(self.seconds) > 1 else ""

    @property
    def percent(self) -> str:
        return f"{100 * (self.ratio.value - 1):+.1f} %"


def keep(results: Path, name: str, history: Path) -> Path:
    """Copy what reports and comparisons need of `results`, without weights and data, to the folder `name`.

    Raises BadInput if there is no report, or if the name is invalid or already used.
    """
    if not NAME.fullmatch(name):
        raise BadInput(f"{name!r} can't be a name: use letters, digits, dots, dashes and underscores, as in v2-before")
    comparison.read_report(results)
    kept = history / name
    if kept.exists():
        raise BadInput(f"{kept} exists already. Choose another name, or remove that folder.")

    def left_out(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(results).parts
        if inside == paths.data_folder(Path()).parts:
            return [name for name in names if name in OF_DATA]
        if len(inside) == RUN_DEPTH and inside[0] in list(Kind):
            return [name for name in names if name in OF_A_RUN]
        beside = (paths.download_folder(Path()).name, paths.QUICK.name)
        return [name for name in names if not inside and name in beside]

    with atomic_folder(kept) as temporary:
        shutil.copytree(results, temporary, ignore=left_out, symlinks=True, dirs_exist_ok=True)
    return kept


def read(history: Path) -> tuple[list[Kept], list[str]]:
    """All kept results, the oldest first, and messages on damaged ones. Raises BadInput if none can be read."""
    folders = sorted(folder for folder in history.glob("*") if NAME.fullmatch(folder.name) and folder.is_dir())
    if not folders:
        raise BadInput(f"{history}: no results are kept there. To keep the present ones: lockstep keep NAME")
    kept, damaged = [], []
    for folder in folders:
        try:
            kept.append(_kept(folder))
        except BadInput as error:  # kept results can't be made again, so the others are still read
            damaged.append(f"{folder} is left out: {error}")
    if not kept:
        raise BadInput("; ".join(damaged))
    return sorted(kept, key=lambda look: (look.date, look.name)), damaged


def _kept(folder: Path) -> Kept:
    report = comparison.read_report(folder)
    runs = [run for several in report["runs"].values() for run in succeeded(several)]
    environments = [run.environment for run in runs]
    commits = list(dict.fromkeys((environment.get("commit") or "?")[:10] for environment in environments))
    changed = "+" if any(environment.get("changed") for environment in environments) else ""
    started = min((run.started for run in runs), default="")
    return Kept(folder.name, started, " / ".join(commits) + changed, report)


def rows(kept: list[Kept]) -> dict[str, list[Point]]:
    """Each row's points over time, by row; changes are tested for all comparisons together.

    The more pairs can be compared, the wider is each interval, so that the chance of any false change stays below 5 %
    (Bonferroni).
    """
    every = [row for look in kept for row in look.report["rows"]]
    names = dict.fromkeys(row["row"] for row in every if row["train_seconds"] is not None)
    times = {name: [look for look in kept if good_runs(look.report["runs"].get(name, []))] for name in names}
    pairs = [(name, *pair) for name, having in times.items() for pair in itertools.pairwise(having)]
    looks = sum(not _incomparable(name, before, after) for name, before, after in pairs)
    confidence = 1 - (1 - stats.CONFIDENCE) / max(1, looks)
    return {
        name: [_point(name, before, look, confidence) for before, look in zip([None, *having], having, strict=False)]
        for name, having in times.items()
    }


def _seconds(look: Kept, row: str) -> list[float]:
    return [run.clock.train_seconds for run in good_runs(look.report["runs"][row])]


def _point(row: str, before: Kept | None, look: Kept, confidence: float) -> Point:
    seconds = _seconds(look, row)
    if before is None:
        return Point(look, seconds, "first")
    if why := _incomparable(row, before, look):
        return Point(look, seconds, *why)
    ratio = comparison.ratio(look.report, before.report, row, confidence)
    finding = "once" if not ratio.kind else "change" if ratio.distinct else "open"
    return Point(look, seconds, finding, ratio)


def _incomparable(row: str, before: Kept, after: Kept) -> tuple[str, None, str] | None:
    """Why two times are not comparable: the finding, None for the ratio, and what differs; None if they are."""
    if comparison.when(before.report, row) == comparison.when(after.report, row):
        return "break", None, f"these are the same runs as in {before.name}"
    runs = [good_runs(look.report["runs"][row])[0] for look in (before, after)]
    differing = [f"{kind}: {values}" for kind, values in comparison.differences(*runs).items()]
    differing += [each for each in comparison.asked_otherwise(*runs) if each.split(":")[0] not in NOT_MEASURED]
    if differing:
        return "break", None, "; ".join(differing)
    lost = [look.name for look in (before, after) if not trusted(look.report["runs"][row])]
    return ("disturbed", None, ", ".join(lost)) if lost else None


def page(kept: list[Kept]) -> str:
    points_by_row = rows(kept)
    changes = [(name, point) for name, points in points_by_row.items() for point in points if point.finding == "change"]
    between = [
        (before, after, comparison.beside([before.report, after.report])) for before, after in itertools.pairwise(kept)
    ]
    context = {
        "headline": say("history_headline", kept=len(kept), rows=len(points_by_row), changes=len(changes)),
        "changes": changes,
        "kept": kept,
        "overview": [
            (name, _small_line(points), {point.kept.name: point for point in points})
            for name, points in points_by_row.items()
        ],
        "rows": [(_picture(name, points), points) for name, points in points_by_row.items()],
        "between": [(before, after, lines) for before, after, lines in between if lines],
    }
    return rendering.page("history.html.j2", say("history_title"), context)


WIDE, HIGH = 120, 28  # the size of a small line chart in pixels


def _small_line(points: list[Point]) -> Markup:
    """A row's medians as a line without axes, interrupted at a break, and with a large dot at a change."""
    medians = [point.median for point in points]
    low, high = min(medians), max(medians)
    room = max(high - low, 0.1 * high)  # so that chance variation looks small
    middle = (high + low) / 2
    places = [
        (6 + (WIDE - 12) * at / max(1, len(points) - 1), HIGH / 2 - (HIGH - 10) * (median - middle) / room)
        for at, median in enumerate(medians)
    ]
    marks = []
    for at, point in enumerate(points):
        x, y = places[at]
        if at and point.finding != "break":
            marks.append(f'<path d="M{places[at - 1][0]:.1f} {places[at - 1][1]:.1f}L{x:.1f} {y:.1f}"/>')
        colour = COLOURS[1] if point.finding == "change" else COLOURS[0]
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if point.finding == "change" else 2}" fill="{colour}"/>')
    drawn = f'<svg viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" aria-hidden="true">'
    return Markup(f'{drawn}<g fill="none" stroke="{COLOURS[0]}" stroke-width="1.5">{"".join(marks)}</g></svg>')


def _picture(name: str, points: list[Point]) -> pictures.Picture:
    return pictures.on_page(f"history_{name}", lambda: _draw(name, points))


def _draw(name: str, points: list[Point]) -> Drawing:
    """A row's times by date: a dot for each run, and a line through the medians, interrupted at a break."""
    figure, axes = plt.subplots(figsize=(max(6.0, 0.9 * len(points) + 1), 2.4), layout="constrained")
    medians = [point.median for point in points]
    for position, point in enumerate(points):
        axes.plot([position] * len(point.seconds), point.seconds, "o", color=COLOURS[0], markersize=4, alpha=0.6)
        axes.plot(position, point.median, "_", color=COLOURS[0], markersize=18, markeredgewidth=2)
        if position and point.finding == "break":
            axes.axvline(position - 0.5, color=COLOURS[5], linestyle=":")
        elif position:
            axes.plot([position - 1, position], medians[position - 1 : position + 1], color=COLOURS[0], linewidth=1)
        if point.finding == "change":
            axes.plot(position, point.median, "D", color=COLOURS[1], markersize=9, gid=f"change-{position}")
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 10}
            axes.annotate(point.percent, (position, max(point.seconds)), **above)
    axes.set_xticks(range(len(points)), [f"{point.kept.name}\n{point.kept.commit[:7]}" for point in points], fontsize=9)
    axes.set_xlim(-0.6, len(points) - 0.4)
    # With enough room that chance variation looks small.
    every = [seconds for point in points for seconds in point.seconds]
    axes.set_ylim(0.85 * min(every), 1.15 * max(every))
    axes.set_ylabel("s")
    changed = [point for point in points if point.finding == "change"]
    title = say("history_row_same", row=name)
    if changed:
        last = {"percent": changed[-1].percent, "name": changed[-1].kept.name}
        title = say("history_row_changed", row=name, n=len(changed), **last)
    tips = {
        f"change-{position}": f"{point.kept.name}: {point.percent}"
        for position, point in enumerate(points)
        if point.finding == "change"
    }
    return Drawing(figure, title, say("history_picture_note"), [], [], tips)
