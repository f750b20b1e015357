"""The card: one picture of 1200 x 630 pixels with the answer, the fastest rows, and under which conditions they ran.

For a chat, a README or a slide, where a picture is taken out of its page: so its caption has what one must know to
believe it. In English, since PNG files need a font for Chinese that most machines lack.
"""

import textwrap

from lockstep.report import conditions, headline
from lockstep.report.charts import COLOURS, plt
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import trusted
from lockstep.report.summary import Summary

WIDTH, HEIGHT, DPI = 12, 6.3, 100  # inches, and pixels per inch
MOST = 8  # rows
PROVEN = {
    "equal": "the same model",
    "within-tolerance": "the same model, within rounding",
    "unequal": "ANOTHER MODEL",
    "failed": "proof failed",
}


def draw(summary: Summary):
    """The card as a matplotlib Figure; None if no row has results."""
    done = sorted(summary.finished_rows, key=lambda row: row["train_seconds"])
    if not done:
        return None
    figure = plt.figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    answer = headline.lines(summary)[0].en.replace("`", "")
    figure.text(0.04, 0.94, _wrapped(answer, 84, 3), fontsize=16, va="top", weight="bold", linespacing=1.35)
    axes = figure.add_axes((0.17, 0.2, 0.34, 0.54))
    shown = _shown(done)
    for position, row in enumerate(shown):
        sound = trusted(summary.runs[row["row"]])
        axes.barh(position, row["train_seconds"], color=COLOURS[0] if sound else COLOURS[-1], height=0.62)
        gain = "" if summary.config.get("quick") else _gain(row)  # one run each, which measures nothing
        told = [f"{row['train_seconds']:.3g} s", gain, PROVEN.get(row["proof"], "not proven")]
        told += [] if sound else ["disturbed"]
        axes.annotate(
            "   ".join(filter(None, told)),
            (1, position),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=11.5,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(shown)), [row["row"] for row in shown], fontsize=13)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    figure.text(0.04, 0.135, _wrapped(caption(summary), 150, 3), fontsize=10, va="top", color="#444444")
    return figure


def caption(summary: Summary) -> str:
    """What one must know to believe the picture: hardware, precision, work, runs, date, commit, and who did not fit."""
    runs = summary.succeeded_runs
    dates = sorted(run.started[:10] for run in runs)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commit = str(summary.environment.get("commit") or "")[:10]
    sound = sum(not run.watch.disturbed for run in runs)
    said = [f"{sound} of {len(runs)} runs undisturbed.", conditions.conditions(summary).en]
    if (left := len(summary.finished_rows) - MOST) > 0:
        said.insert(1, f"{left} other rows are not shown.")
    return " ".join([f"Lockstep {commit}".strip() + f", {when}.", *said])


def _shown(done: list[dict]) -> list[dict]:
    """The fastest rows, and the one that all are compared with, wherever it stands."""
    baseline = [row for row in done[MOST:] if row["strategy"] == BASELINE]
    return [*done[: MOST - 1], baseline[0]] if baseline else done[:MOST]


def _gain(row: dict) -> str:
    """How many times as fast as single, with the ends of a 95 % interval."""
    if row["speedup"] is None or (row["strategy"] == BASELINE and row.get("speedup_low") is None):
        return ""
    limits = [row.get("speedup_low"), row.get("speedup_high")]
    nothing = None in limits or limits[0] == limits[1]  # as where single is compared with itself
    between = "" if nothing else f" ({limits[0]:.2f} to {limits[1]:.2f})"
    return f"{row['speedup']:.2f}x{between}"


def _wrapped(text: str, width: int, most: int) -> str:
    """The text in at most this many lines; a longer one ends in an ellipsis."""
    lines = textwrap.wrap(text, width)
    return "\n".join(lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: width - 1] + "…"])
