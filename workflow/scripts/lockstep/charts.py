"""The report's pictures, drawn by matplotlib as SVG: 10 to 30 kB each, text stays text, the same bytes each time."""

import io
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from markupsafe import Markup

from lockstep.files import atomic_file, write_text

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Colours that reach a contrast of 3:1 on white (Okabe & Ito 2008, darkened), each with a line style beside it.
COLOURS = ("#0072B2", "#D55E00", "#008060", "#B0527F", "#7A6A00", "#555555")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
INK = "#010203"  # replaced by currentColor on the page, so that axes and text follow its theme
SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 12,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass
class Picture:
    name: str
    title: str
    svg: Markup


def draw(summary: dict, folder: Path) -> list[Picture]:
    """Draw what there is to draw, write each picture to `folder` as SVG and PNG, and return them for the page."""
    done = [row for row in summary["rows"] if row["train_seconds"]]
    if not done:
        return []
    runs = {row["row"]: [run for run in summary["runs"][row["row"]] if run["status"] == "ok"] for row in done}
    pictures = []
    for name, title, paint in (
        ("train_seconds", "Training time of each row, in seconds; every run is a dot", _times),
        ("losses", "Training loss over steps; rows that train the same model lie on each other", _losses),
    ):
        with plt.rc_context(SETTINGS | {"svg.hashsalt": name}):
            figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
            paint(axes, done, runs)
            pictures.append(_write(figure, name, title, folder))
            plt.close(figure)
    return pictures


def _times(axes, done: list[dict], runs: dict) -> None:
    names = [row["row"] for row in done]
    longest = max(run["clock"]["train_seconds"] for several in runs.values() for run in several)
    for place, row in enumerate(done):
        axes.barh(place, row["train_seconds"], height=0.6, color=COLOURS[0] if row["device"] == "cuda" else COLOURS[5])
        axes.text(row["train_seconds"] + 0.02 * longest, place, f"{row['train_seconds']:.3g} s", va="center")
        seconds = [run["clock"]["train_seconds"] for run in runs[row["row"]]]
        axes.plot(seconds, [place] * len(seconds), "o", color=COLOURS[1], markeredgecolor="white")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.15)
    axes.set_xlabel("training time, s")
    axes.figure.set_size_inches(8, 1.2 + 0.5 * len(names))


def _losses(axes, done: list[dict], runs: dict) -> None:
    for place, row in enumerate(done):
        losses = runs[row["row"]][0]["losses"]
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            color=COLOURS[place % len(COLOURS)],
            linestyle=STYLES[(place + place // len(COLOURS)) % len(STYLES)],  # no two rows have both alike
            linewidth=1.4,
            label=row["row"],
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean loss over the global batch")
    axes.set_ylim(bottom=0)
    axes.figure.legend(loc="outside lower center", frameon=False, ncols=5, fontsize=10)


def _write(figure, name: str, title: str, folder: Path) -> Picture:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    write_text(folder / f"{name}.svg", svg)
    with atomic_file(folder / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=160, facecolor="white")
    inline = svg[svg.index("<svg") :].replace(INK, "currentColor")
    inline = re.sub(r"<metadata>.*?</metadata>", "", inline, flags=re.DOTALL)
    inline = re.sub(
        r'id="|(?<=xlink:href=")#|(?<=url\()#', lambda match: f"{match[0]}{name}-", inline
    )  # unique on the page
    inline = inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return Picture(name, title, Markup(inline))
