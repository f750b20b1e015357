"""Figures as files (SVG and PNG in plots/), and as inline SVG on the page."""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markupsafe import Markup

from lockstep.config import registry
from lockstep.config.qualities import QUALITIES
from lockstep.files import atomic_file, write_text
from lockstep.report import card, charts
from lockstep.report.charts import Drawing, plt
from lockstep.report.summary import Summary
from lockstep.report.words import Text, axis_texts

INK = "#010203"  # the page replaces it by currentColor, so that axes and text follow its theme
SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "font.family": ["sans-serif"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass
class Picture:
    name: str
    title: Text
    note: Text
    svg: Markup
    header: list[Text]
    table: list[list[str]]


def draw(summary: Summary, folder: Path) -> list[Picture]:
    """Draw all pictures for which there are data, write each to `folder`, and return them for the page."""
    pictures = draw_all(charts.drawings(summary), folder)
    done = summary.finished_rows
    if done and "confusion_matrix" in QUALITIES[registry.deciding_quality(summary.config["task"])].reads:
        with plt.rc_context(SETTINGS | {"svg.hashsalt": "confusion"}):
            _save(charts.confusion(done, summary), "confusion", folder)
    with plt.rc_context(SETTINGS | {"svg.hashsalt": "card", "text.color": "black"}):
        if (drawn := card.draw(summary)) is not None:
            _save(drawn, "card", folder, card.DPI)
    return pictures


def draw_all(drawings: Iterable[tuple[str, Callable[[], Drawing]]], folder: Path) -> list[Picture]:
    """Draw each of (name, function), write it to `folder`, and return it for the page."""
    pictures = []
    for name, paint in drawings:
        with plt.rc_context(SETTINGS | {"svg.hashsalt": name}):
            drawing = paint()
            svg = _save(drawing.figure, name, folder)
            pictures.append(
                Picture(name, drawing.title, drawing.note, _inline(svg, name, drawing), drawing.header, drawing.table)
            )
    return pictures


def on_page(name: str, paint: Callable[[], Drawing]) -> Picture:
    """A picture for a page only, without files of its own."""
    with plt.rc_context(SETTINGS | {"svg.hashsalt": name}):
        drawing = paint()
        svg = svg_of(drawing.figure)
        plt.close(drawing.figure)
    return Picture(name, drawing.title, drawing.note, _inline(svg, name, drawing), drawing.header, drawing.table)


def _save(figure, name: str, folder: Path, dpi: int = 130) -> str:
    svg = svg_of(figure)
    write_text(folder / f"{name}.svg", svg)
    with atomic_file(folder / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=dpi, facecolor="white")
    plt.close(figure)
    return svg


def svg_of(figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _inline(svg: str, name: str, drawing: Drawing) -> Markup:
    inline = svg[svg.index("<svg") :].replace(INK, "currentColor")
    inline = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inline, flags=re.DOTALL)
    for gid, tip in drawing.tips.items():
        inline = inline.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(tip)}</title>')
    # Ids must be unique on the page.
    inline = re.sub(r'id="|(?<=xlink:href=")#|(?<=url\()#', lambda match: f"{match[0]}{name}-", inline)
    for text in axis_texts():
        both = "".join(
            f'<tspan class="{language}" lang="{language}">{escape(getattr(text, language))}</tspan>'
            for language in ("en", "zh")
        )
        inline = inline.replace(f">{escape(text.en, quote=False)}</text>", f">{both}</text>")  # as matplotlib escapes
    label = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-note"'
    inline = re.sub(r'(?<=<svg) (width|height)="[^"]*"', "", inline)
    return Markup(inline.replace("<svg", f"<svg {label}", 1))
