"""The picture of `lockstep which`: a mark for each row, whose step's time is to its right, and its memory upwards."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from lockstep.files import write_text
from lockstep.report import charts, pictures
from lockstep.report.charts import COLOURS, HEIGHT, LINE, MARKERS, plt
from lockstep.report.words import say
from lockstep.terminal import short

GREY = COLOURS[-1]
LINES = 110  # letters in a line of the reasons below


@dataclass(frozen=True)
class Mark:
    """A row. milliseconds: of its step, with the ends of the interval, if it has one; gib: memory of the GPU that needs
    most; fits: whether the GPU has as much.
    """

    row: str
    milliseconds: float
    low: float | None
    high: float | None
    gib: float
    fits: bool


def draw(file: Path, marks: list[Mark], capacity: float | None, without: dict[str, str]) -> None:
    """Write the picture as SVG. capacity: GiB of a GPU; without: for each row without a mark, the reason."""
    with plt.rc_context(pictures.SETTINGS | {"svg.hashsalt": "which"}):
        write_text(file, pictures.svg_of(figure(marks, capacity, without)))


def figure(marks: list[Mark], capacity: float | None, without: dict[str, str]) -> plt.Figure:
    """The figure. Labels stand in a column of their own, each with a line to its mark, so that none covers another."""
    ordered = sorted(marks, key=lambda mark: (mark.gib, mark.milliseconds))
    reasons = [line for row, why in without.items() for line in textwrap.wrap(f"{row}: {why}", LINES)]
    height = max(HEIGHT, LINE * len(marks) + 0.8)
    drawn, axes = plt.subplots(figsize=(1.6 * charts.WIDTH, height + 0.6 * LINE * len(reasons)), layout="constrained")
    most = max(mark.gib for mark in marks)
    # A memory that is far larger than all of them would press them flat.
    shown = capacity is not None and capacity < 2 * most
    top = 1.15 * max(most, capacity if shown else 0)
    axes.set_ylim(0, top)
    axes.set_xlim(0, 1.08 * max(mark.high or mark.milliseconds for mark in marks))
    if shown:
        axes.axhline(capacity, linestyle="--", color=GREY, linewidth=1)
        there = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 8}
        axes.annotate(say("memory_there").en, (0.01, capacity), **there)
    places = spread([mark.gib / top for mark in ordered], LINE / height)
    for number, (mark, place) in enumerate(zip(ordered, places, strict=True)):
        colour = COLOURS[0] if mark.fits else GREY
        if mark.low is not None:
            axes.plot([mark.low, mark.high], [mark.gib] * 2, color=colour, linewidth=1)
        style = {"color": colour, "markersize": 8, "markerfacecolor": colour if mark.fits else "white"}
        style |= {"zorder": 3, "gid": f"mark-{mark.row}"}
        axes.plot(mark.milliseconds, mark.gib, MARKERS[number % len(MARKERS)], **style)
        axes.annotate(
            label(mark),
            (mark.milliseconds, mark.gib),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=pictures.INK if mark.fits else GREY,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkB": 5},
        )
    axes.set_xlabel(say("axis_foretold_step").en)
    axes.set_ylabel(say("axis_counted_memory").en)
    if reasons:
        drawn.supxlabel("\n".join(reasons), x=0.01, ha="left", fontsize=8)
    return drawn


def label(mark: Mark) -> str:
    """A row's name with its numbers, and why it is grey."""
    numbers = f"{mark.row}: {short(mark.milliseconds)} ms, {short(mark.gib)} GiB"
    if mark.low is None:
        numbers += ", extrapolated"
    return numbers if mark.fits else f"{numbers}, does not fit"


def spread(wanted: list[float], gap: float) -> list[float]:
    """Places from 0 to 1 that are near the wanted ones, in their order, and at least `gap` apart if there is room."""
    gap = min(gap, 1 / max(len(wanted), 1))
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else max(place, 0.0))
    highest = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], highest)
        highest = places[number] - gap
    return places
