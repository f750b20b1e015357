"""Writes the report's files: report.html, report.md, summary.csv, summary.json and plots/."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import yaml

from lockstep import columns, paths
from lockstep.columns import Column
from lockstep.config import registry
from lockstep.config.qualities import QUALITIES
from lockstep.errors import brief
from lockstep.files import write_json, write_text
from lockstep.report import (
    cautions,
    charts,
    choice,
    conditions,
    headline,
    own_script,
    paper,
    pictures,
    rendering,
    studies,
)
from lockstep.report.reading import good_runs, records, succeeded
from lockstep.report.summary import Summary
from lockstep.report.words import Text, join, meaning, note, same, say
from lockstep.run.record import Tested

WORDS = ("proof", "status")  # columns whose values are translated


@dataclass(frozen=True)
class Cell:
    """One cell of the table: its column, its text, the value that it is sorted by, and the range below the figure.

    length: the length of its bar relative to the longest, from 0 to 1; None if the column has no bars. within: the
    larger distance of the range's ends from the figure.
    """

    column: Column
    text: Text
    sort: str
    more: str
    length: float | None = None
    within: str = ""

    @property
    def key(self) -> str:
        return self.column.key

    @property
    def heading(self) -> Text:
        return say(self.key)

    @property
    def about(self) -> Text:
        return meaning(self.key)

    @property
    def number(self) -> bool:
        return self.column.digits is not None

    @property
    def deciding(self) -> bool:
        return self.column.shown == columns.AT_ONCE

    @property
    def first(self) -> bool:
        """Whether a phone shows it."""
        return self.key in ("row", "proof", "train_seconds", "speedup", "status")


def test_line(names: tuple[str, ...], test: dict) -> Text:
    """The result of a test, in its task's figures of quality; tests of an earlier version may lack some."""
    known = [QUALITIES[name] for name in names if name in test]
    said = [say("quality_figure", figure=say(of.name), value=f"{test[of.name]:.{of.digits}f}") for of in known]
    counted = say(f"counted_{known[-1].counted}")
    line = say("quality_on", figures=join(said, say("comma")), support=f"{test['support']:,}", counted=counted)
    if "images" in test:
        line += say("quality_images", images=test["images"])
    if "trigram_perplexity" in test:
        line += say("quality_trigram", trigram=f"{test['trigram_perplexity']:.2f}")
    return line


def ladder_words(figure: str) -> dict[str, Text]:
    """The names of the figure that the open division compares, and of its difference."""
    word = say(figure)
    if QUALITIES[figure].compared_by:
        return {"figure": say("quality_log", figure=word), "difference": say("quality_difference_of_log", figure=word)}
    return {"figure": word, "difference": say("quality_difference", figure=word)}


def by_time(rows: list[dict]) -> list[dict]:
    """Rows in the table's order: by training time; those without a time come last, in the configuration's order."""
    return sorted(rows, key=lambda row: (row["train_seconds"] is None, row["train_seconds"] or 0))


def table(rows: list[dict]) -> list[list[Cell]]:
    """The table for people, without columns that are empty, and without most that have the same value in all rows."""
    shown = [
        column
        for column in columns.COLUMNS
        if column.shown
        and any(row[column.key] not in (None, 0) for row in rows)
        and (column.alike or len({row[column.key] for row in rows}) > 1)
    ]
    longest = max((row["train_seconds"] or 0 for row in rows), default=0)
    return [[_cell(row, longest, column) for column in shown] for row in rows]


def _cell(row: dict, longest: float, column: Column) -> Cell:
    value = row[column.key]
    if column.digits is None:
        word = "" if value is None else str(value)
        return Cell(column, say(f"{column.key}_{value}") if column.key in WORDS else same(word), word, "")
    ends = [row[end] for end in column.ends]
    # One run has no spread, and the ratio of the baseline to itself is exactly 1.
    spread = ends and None not in ends and ends[0] != ends[1] and row["repeats"] > 1
    more = " – ".join(f"{end:.{column.digits}f}" for end in ends) if spread else ""
    shown = "" if value is None else f"{value * column.factor:.{column.digits}f}"
    length = value / longest if column.key == "train_seconds" and value else None
    within = f"± {max(abs(end - value) for end in ends):.{column.digits}f}" if spread and column.unit else ""
    return Cell(column, same(shown), "" if value is None else repr(value), more, length, within)


def as_csv(rows: list[dict]) -> str:
    """The table with all columns, for summary.csv."""
    return pd.DataFrame(rows, columns=columns.KEYS).to_csv(index=False)


def plain(rows: list[dict], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """The table for a terminal, with fewer columns if it would be wider than `width`: headings, and lines."""
    cells = table(rows)
    shown = [cell.column for cell in cells[0] if cell.column.terminal is not None]
    while width and _width(cells, shown) > width and (spare := [column for column in shown if column.terminal]):
        shown.remove(min(spare, key=lambda column: column.terminal))
    if width and _width(cells, shown) > width:  # better than breaking a cell into two lines
        cells = [[replace(cell, more="", within="") for cell in line] for line in cells]
    lines = [[_plain(cell) for cell in line if cell.column in shown] for line in cells]
    return [say(column.key).en for column in shown], lines


def _plain(cell: Cell) -> str:
    """A figure with its range: the largest distance of its ends for a measurement, both ends for a ratio."""
    beside = cell.within or (f"({cell.more.replace(' ', '')})" if cell.more else "")
    return " ".join(filter(None, (cell.text.en, beside)))


def _width(cells: list[list[Cell]], shown: list[Column]) -> int:
    """The width of an unbroken line in characters, with frame and blanks."""
    kept = [column for column in zip(*cells, strict=True) if column[0].column in shown]
    widths = [max([len(column[0].heading.en), *(len(_plain(cell)) for cell in column)]) for column in kept]
    return sum(width + 3 for width in widths) + 1


def notes(summary: Summary) -> list[tuple[Text, Text]]:
    """What readers must know about a row, or about the data and the model of all rows: (row, note), each once."""
    said = [(say("all_rows"), note(text)) for text in summary.data.get("notes", ())]
    said += [(say("all_rows"), same(what)) for what in summary.damaged]
    of_rows: list[tuple[str, Text]] = []
    for name, runs in summary.runs.items():
        of_rows += [(name, note(text)) for made in records(runs) for text in made.notes]
        of_rows += [
            (name, say("run_disturbed", repeat=run.repeat, why="; ".join(run.watch.disturbed)))
            for run in succeeded(runs)
            if run.watch.disturbed
        ]
        of_rows += [(name, _snapshots(run)) for run in succeeded(runs) if run.snapshots]
        of_rows += [
            (name, say("run_repeated", repeat=made.repeat, why="; ".join(attempt.disturbed)))
            for made in records(runs)
            for attempt in made.disturbed_before
        ]
    for what, reasons in summary.stale.items():
        of_rows += [(name, say(f"stale_{what}", why=why)) for name, why in reasons.items()]
    return list(dict.fromkeys([*said, *((same(name), told) for name, told in of_rows)]))


def _snapshots(run: Tested) -> Text:
    """The models that a run kept at the ends of epochs: their steps, and their scores on the dev split."""
    told = []
    for about in run.snapshots:
        scores = {name: value for name, value in (about.dev or {}).items() if name != "support"}
        figures = "".join(f", dev {name} {value:.4f}" for name, value in scores.items())
        told.append(f"{about.epoch} (step {about.step}{figures})")
    return say("run_snapshots", repeat=run.repeat, epochs="; ".join(told), folder=Path(run.log).parent)


def settings(tested: list[tuple[str, Tested]]) -> dict[str, list[str]]:
    """The settings, as read back, in which rows differ: name -> one value per row."""
    values = _by_setting(tested)
    return {name: of_rows for name, of_rows in values.items() if len({*of_rows} - {NO_SETTING}) > 1}


def own_settings(tested: list[tuple[str, Tested]]) -> dict[str, list[str]]:
    """The settings that only some rows have, with the same value in all of these: row -> each setting and its value."""
    own = {
        name: of_rows for name, of_rows in _by_setting(tested).items() if NO_SETTING in of_rows and len({*of_rows}) == 2
    }
    told = {
        row: [f"{name} {of_rows[at]}" for name, of_rows in own.items() if of_rows[at] != NO_SETTING]
        for at, (row, _) in enumerate(tested)
    }
    return {row: lines for row, lines in told.items() if lines}


def _by_setting(tested: list[tuple[str, Tested]]) -> dict[str, list[str]]:
    by_row = [_flat(run.settings) for _, run in tested]
    for of_row in by_row:  # ZeRO-3 leaves empty parameters behind, which earlier versions counted
        of_row |= {name: NO_SETTING for name, value in of_row.items() if name.endswith(".parameters") and value == "0"}
    names = dict.fromkeys(name for of_row in by_row for name in of_row)
    return {name: [of_row.get(name, NO_SETTING) for of_row in by_row] for name in names}


NO_SETTING = "–"


def _flat(nested: dict, before: str = "") -> dict[str, str]:
    """Nested settings as a flat dict of readable texts, without braces and quotes."""
    flat = {}
    for name, value in nested.items():
        name = f"{before}{name}"
        if isinstance(value, dict):
            flat |= _flat(value, "" if name == "options" else f"{name}.")
        elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
            flat |= _flat({str(number): inner for number, inner in enumerate(value)}, f"{name.removesuffix('s')} ")
        else:
            flat[name] = _word(value)
    return flat


def _word(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or NO_SETTING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NO_SETTING if value in (None, "") else str(value)


def write(summary: Summary, folder: Path, predictions: Path, galleries: list | None = None) -> None:
    """Write all files of the report into `folder`.

    `predictions` is the CSV file with every model's predictions for the same samples; `galleries` are those of
    report/gallery.py.
    """
    everything, summary = summary, summary.compared
    first = headline.lines(summary)
    drawn = pictures.draw(summary, folder / paths.PLOTS)
    drawn += pictures.draw_all(studies.drawings(everything), folder / paths.PLOTS)
    write_text(folder / paths.TABLE, as_csv(everything.rows))
    write_json(folder / paths.SUMMARY, {"headline": [line.en for line in first]} | everything.as_json())
    texts, damaged = None, list(summary.damaged)
    if predictions.is_file():
        try:
            texts = pd.read_csv(predictions, keep_default_na=False, dtype=str, encoding="utf-8-sig")
        except (ValueError, pd.errors.ParserError) as error:
            damaged.append(f"{predictions}: is damaged ({brief(error)}). Remove it, and predict again.")
    tested = [(row["row"], good_runs(summary.runs[row["row"]])[0]) for row in summary.finished_rows]
    rows = by_time(summary.rows)
    cells, caption = table(rows), _caption(summary)
    context = vars(summary) | {
        "rows": rows,
        "headline": first,
        "box": headline.box(summary),
        "recommended": choice.name(summary),
        "cautions": cautions.count(summary),
        "figures": headline.figures(summary),
        "mind": cautions.warning(summary),
        "cells": cells,
        "notes": notes(replace(summary, damaged=damaged)),
        "pictures": [each for each in drawn if each.name != "ranks" or not charts.ranks_are_usual(summary)],
        "caption": caption,
        "made": _made(summary),
        "predictions": texts,
        "galleries": galleries or [],
        "own_script": own_script.gather(summary, rows, folder.parent),
        "tested": tested,
        "test_line": partial(test_line, registry.task_literals(summary.config["task"])["QUALITY"]),
        "ladder_words": summary.ladder and ladder_words(summary.ladder["figure"]),
        "settings": settings(tested),
        "own_settings": own_settings(tested),
        "settings_rows": [name for name, _ in tested],
        "by_time": by_time,
        "cells_of": table,
        "studies": studies.sections(everything),
        "paper": paper.write(summary, cells, caption, folder),
        "peak_text": _peak_text(summary.peak),
        "counters": list(dict.fromkeys(name for _, run in tested for name in run.energy.counters)),
        "variance_text": _variance_text(summary.variance),
        "config_text": yaml.safe_dump(summary.config, allow_unicode=True, sort_keys=False),
    }
    write_text(folder / paths.MARKDOWN, rendering.markdown("report.md.j2", context))
    write_text(folder / paths.PAGE, rendering.page("report.html.j2", say("title"), context))


def _caption(summary: Summary) -> Text:
    """The conditions that a picture must state, so that it stays true when it is copied from the page."""
    done = summary.finished_rows
    if not done:
        return same("")
    manifest = summary.manifest or {"commit": None}
    return say(
        "caption",
        devices=conditions.machine(summary.environment, done[0]["device"]),
        precision="/".join(dict.fromkeys(row["precision"] for row in done)),
        batch="/".join(dict.fromkeys(str(row["global_batch"]) for row in done)),
        n=max(row["repeats"] for row in done),
        date=" – ".join(dict.fromkeys(time[:10] for time in _made(summary))),
        commit=(manifest["commit"] or "?")[:10],
    )


def _made(summary: Summary) -> list[str]:
    """When the first and the last run in the table were started, which may be before the last request."""
    started = sorted(run.started for run in summary.succeeded_runs)
    return list(dict.fromkeys([*started[:1], *started[-1:]]))


def _peak_text(peak: dict | None) -> Text:
    if not peak or not peak["flops_per_second"]:  # nothing was trained on the CPU
        return same("")
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peak["flops_per_second"].items())
    return say("peak_cpu", cores=peak["cores"], peak=rates)


def _variance_text(variance: dict | None) -> Text:
    if not variance:
        return same("")
    best = variance["best_steps"]
    percents = {
        "launch": variance["launch"],
        "step": variance["step"],
        "left": variance["step"] / variance["steps"] ** 0.5,
    }
    return say(
        "variance_text",
        steps=variance["steps"],
        advice=say("variance_best", steps=best) if best else say("variance_longer"),
        **{name: f"{100 * value:.2g}" for name, value in percents.items()},
    )
