"""The report's files: report.html, report.md, summary.csv, summary.json, plots/."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import yaml

from lockstep import paths
from lockstep.config import registry
from lockstep.config.qualities import QUALITIES
from lockstep.errors import brief
from lockstep.files import write_json, write_text
from lockstep.report import headline, paper, pictures, rendering, take_home
from lockstep.report.summary import COLUMNS, Summary, good_runs, succeeded
from lockstep.report.words import Text, join, same, say

# The table that people read: column, digits after the point (None: a word), and the columns of its range.
PAGE_COLUMNS = (
    ("row", None, ()),
    ("rank", 0, ()),
    ("proof", None, ()),
    ("train_seconds", 2, ("train_seconds_low", "train_seconds_high")),
    ("speedup", 2, ("speedup_low", "speedup_high")),
    ("efficiency", 2, ()),
    ("samples_per_second", 0, ()),
    ("mfu", 1, ()),
    ("startup_seconds", 1, ()),
    ("cold_seconds", 2, ()),
    ("total_seconds", 1, ()),
    ("evaluation_seconds", 2, ()),
    ("evaluation_samples_per_second", 0, ()),
    ("peak_memory_mb", 0, ()),
    ("proportional_memory_mb", 0, ()),
    ("memory_by_gpu_mb", None, ()),
    ("reserved_by_gpu_mb", None, ()),
    ("nvml_memory_by_gpu_mb", None, ()),
    ("utilisation_by_gpu", None, ()),
    ("sm_mhz_by_gpu", None, ()),
    ("energy_joules", 0, ()),
    ("accuracy", 4, ()),
    ("macro_f1", 4, ()),
    ("perplexity", 2, ()),
    ("pixel_accuracy", 4, ()),
    ("miou", 4, ()),
    ("devices", 0, ()),
    ("precision", None, ()),
    ("repeats", 0, ()),
    ("disturbed", 0, ()),
    ("division", None, ()),
    ("status", None, ()),
)
# What decides, shown at once; the page has the others on demand.
DECIDING = (
    *("row", "rank", "proof", "train_seconds", "speedup", "peak_memory_mb", "accuracy", "macro_f1", "perplexity"),
    *("pixel_accuracy", "miou", "repeats", "disturbed", "status"),
)
# Left out where all rows have the same, which the report says elsewhere.
CONSTANT = ("precision", "division", "status")
# Of these, what fits a terminal.
TERMINAL = (
    *("row", "rank", "proof", "train_seconds", "speedup", "samples_per_second", "startup_seconds", "peak_memory_mb"),
    *("accuracy", "macro_f1", "perplexity", "pixel_accuracy", "miou", "precision", "repeats", "status"),
)
# What a narrow one goes without, the first before the others.
SPARED = (
    *("startup_seconds", "samples_per_second", "accuracy", "pixel_accuracy", "precision", "peak_memory_mb"),
    *("macro_f1", "perplexity", "miou"),
)
PERCENT = ("mfu",)
WORDS = ("proof", "status")  # columns whose values have words of their own


@dataclass(frozen=True)
class Cell:
    """One cell of the table: its column, what it says, what it is sorted by, and the range below the figure.

    share: of the longest bar, from 0 to 1; None where the column has no bars.
    """

    key: str
    text: Text
    sort: str
    more: str
    number: bool
    share: float | None = None

    @property
    def deciding(self) -> bool:
        return self.key in DECIDING


def test_line(names: tuple[str, ...], test: dict) -> Text:
    """What a test came to, by its task's figures of quality."""
    known = [QUALITIES[name] for name in names]
    said = [say("quality_figure", figure=say(of.name), value=f"{test[of.name]:.{of.digits}f}") for of in known]
    counted = say(f"counted_{known[-1].counted}")
    line = say("quality_on", figures=join(said, say("comma")), support=f"{test['support']:,}", counted=counted)
    if "images" in test:
        line += say("quality_images", images=test["images"])
    if "trigram_perplexity" in test:
        line += say("quality_trigram", trigram=f"{test['trigram_perplexity']:.2f}")
    return line


def ladder_words(figure: str) -> dict[str, Text]:
    """What the open division compares, and how its difference is called."""
    word = say(figure)
    if QUALITIES[figure].compared_by:
        return {"figure": say("quality_log", figure=word), "difference": say("quality_difference_of_log", figure=word)}
    return {"figure": word, "difference": say("quality_difference", figure=word)}


def by_time(rows: list[dict]) -> list[dict]:
    """Rows as the table has them: the shortest training first; those without a time last, as they were asked for."""
    return sorted(rows, key=lambda row: (row["train_seconds"] is None, row["train_seconds"] or 0))


def table(rows: list[dict]) -> list[list[Cell]]:
    """The table for people. Columns that say nothing of any row, or the same of all, are left out."""
    columns = [
        column
        for column in PAGE_COLUMNS
        if any(row[column[0]] not in (None, 0) for row in rows)
        and not (column[0] in CONSTANT and len({row[column[0]] for row in rows}) == 1)
    ]
    longest = max((row["train_seconds"] or 0 for row in rows), default=0)
    return [[_cell(row, longest, *column) for column in columns] for row in rows]


def _cell(row: dict, longest: float, key: str, digits: int | None, limits: tuple[str, ...]) -> Cell:
    value = row[key]
    if digits is None:
        word = "" if value is None else str(value)
        return Cell(key, say(f"{key}_{value}") if key in WORDS else same(word), word, "", False)
    factor = 100 if key in PERCENT else 1
    ends = [row[limit] for limit in limits]
    # One run has no spread, and what the others are compared with is once itself.
    spread = limits and None not in ends and ends[0] != ends[1] and row["repeats"] > 1
    more = " – ".join(f"{end:.{digits}f}" for end in ends) if spread else ""
    shown = "" if value is None else f"{value * factor:.{digits}f}"
    share = value / longest if key == "train_seconds" and value else None
    return Cell(key, same(shown), "" if value is None else repr(value), more, True, share)


def plain(rows: list[dict], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """The same table for a terminal, if need be with fewer columns so that it is `width` wide: headings, and lines."""
    cells = table(rows)
    keys = [cell.key for cell in cells[0] if cell.key in TERMINAL]
    spared = iter(SPARED)
    while width and _width(cells, keys) > width and (key := next(spared, None)):
        keys = [other for other in keys if other != key]
    lines = [[_plain(cell) for cell in line if cell.key in keys] for line in cells]
    return [say(key).en for key in keys], lines


def _plain(cell: Cell) -> str:
    return " ".join(filter(None, (cell.text.en, cell.more)))


def _width(cells: list[list[Cell]], keys: list[str]) -> int:
    """Characters of a line, frame and blanks included, if nothing is broken into two."""
    columns = [column for column in zip(*cells, strict=True) if column[0].key in keys]
    widths = [max([len(say(column[0].key).en), *(len(_plain(cell)) for cell in column)]) for column in columns]
    return sum(width + 3 for width in widths) + 1


def notes(summary: Summary) -> list[tuple[str, Text]]:
    """What a reader must know about a row, or about the data and the model of all: (row, note), each once."""
    said = [(say("all_rows").en, same(note)) for note in summary.data.get("notes", ())]
    said += [(say("all_rows").en, same(what)) for what in summary.damaged]
    for name, runs in summary.runs.items():
        said += [(name, same(note)) for run in runs for note in run.get("notes", ())]
        said += [
            (name, say("run_disturbed", repeat=run["repeat"], why="; ".join(run["watch"]["disturbed"])))
            for run in succeeded(runs)
            if run["watch"]["disturbed"]
        ]
        said += [(name, _snapshots(run)) for run in succeeded(runs) if run.get("snapshots")]
        said += [
            (name, say("run_repeated", repeat=run["repeat"], why="; ".join(attempt["disturbed"])))
            for run in runs
            for attempt in run.get("disturbed_before", ())
        ]
    for what, reasons in summary.stale.items():
        said += [(name, say(f"stale_{what}", why=why)) for name, why in reasons.items()]
    return list(dict.fromkeys(said))


def _snapshots(run: dict) -> Text:
    """The models that a run kept at the end of epochs: their steps, and what they came to on the dev split."""
    told = []
    for about in run["snapshots"]:
        scores = {name: value for name, value in (about["dev"] or {}).items() if name != "support"}
        figures = "".join(f", dev {name} {value:.4f}" for name, value in scores.items())
        told.append(f"{about['epoch']} (step {about['step']}{figures})")
    return say("run_snapshots", repeat=run["repeat"], epochs="; ".join(told), folder=Path(run["log"]).parent)


def settings(tested: list[tuple[str, dict]]) -> dict[str, list[str]]:
    """Each setting as it was read back, in every row: name -> one value a row."""
    by_row = [_flat(run["settings"]) for _, run in tested]
    names = dict.fromkeys(name for of_row in by_row for name in of_row)
    return {name: [of_row.get(name, "") for of_row in by_row] for name in names}


def _flat(nested: dict) -> dict[str, str]:
    flat = {}
    for name, value in nested.items():
        if name == "options":
            flat |= {key: _word(inner) for key, inner in value.items()}
        elif name == "groups":
            flat |= {f"group {number}": _word(group) for number, group in enumerate(value)}
        else:
            flat[name] = _word(value)
    return flat


def _word(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write(summary: Summary, folder: Path, predictions: Path, galleries: list | None = None) -> None:
    """Write everything into `folder`.

    `predictions` is the CSV file of the same samples through every model; `galleries` are those of report/gallery.py.
    """
    everything, summary = summary, summary.compared
    first = headline.lines(summary)
    drawn = pictures.draw(summary, folder / paths.PLOTS)
    write_text(folder / paths.TABLE, pd.DataFrame(everything.rows, columns=COLUMNS).to_csv(index=False))
    write_json(folder / paths.SUMMARY, {"headline": [line.en for line in first]} | vars(everything))
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
        "figures": headline.figures(summary),
        "mind": headline.warning(summary),
        "cells": cells,
        "notes": notes(replace(summary, damaged=damaged)),
        "pictures": drawn,
        "caption": caption,
        "made": _made(summary),
        "predictions": texts,
        "galleries": galleries or [],
        "take_home": take_home.gather(summary, rows, folder.parent),
        "tested": tested,
        "test_line": partial(test_line, registry.task_literals(summary.config["task"])["QUALITY"]),
        "ladder_words": summary.ladder and ladder_words(summary.ladder["figure"]),
        "settings": settings(tested),
        "settings_rows": [name for name, _ in tested],
        "as_published": _as_published(everything),
        "claims": claims(summary),
        "paper": paper.write(summary, cells, caption, folder),
        "peak_text": _peak_text(summary.peak),
        "counters": list(dict.fromkeys(name for _, run in tested for name in run["energy"].get("counters", ()))),
        "variance_text": _variance_text(summary.variance),
        "config_text": yaml.safe_dump(summary.config, allow_unicode=True, sort_keys=False),
    }
    write_text(folder / paths.MARKDOWN, rendering.markdown("report.md.j2", context))
    write_text(folder / paths.PAGE, rendering.page("report.html.j2", say("title"), context))


def _as_published(summary: Summary) -> dict | None:
    """The rows that make the published ones again, and their cells in the table; None without such rows."""
    rows = by_time([row for row in summary.rows if row["division"] == "published"])
    if not rows:
        return None
    return {"cells": table(rows), "rows": rows}


def claims(summary: Summary) -> list[Text]:
    """Which of the published conclusions stand here; none where the published rows were not reproduced."""
    return [_claim(claim) for claim in summary.published["claims"] if claim["again_speed"]]


def _claim(claim: dict) -> Text:
    """Whether a published ratio stands here, in a sentence."""
    speeds = {side: claim[f"{side}_speed"] for side in ("ours", "again")}
    told = {side: "–" if speed is None else f"{speed:.2f}" for side, speed in speeds.items()}
    interval = same("")
    if claim["ours_low"] is not None:
        interval = same(f" ({claim['ours_low']:.2f} – {claim['ours_high']:.2f})")
    outcome = {True: "claim_stands", False: "claim_falls", None: "claim_open"}[claim["stands"]]
    return say(
        "claim",
        name=claim["name"],
        ours=claim["ours"],
        published=f"{claim['published']:.2f}",
        honest=told["ours"],
        again=told["again"],
        interval=interval,
        outcome=say(outcome),
    )


def _caption(summary: Summary) -> Text:
    """What a picture must carry to stay true when it is copied out of the page."""
    done = summary.finished_rows
    if not done:
        return same("")
    manifest = summary.manifest or {"commit": None}
    return say(
        "caption",
        devices=headline.machine(summary.environment, done[0]["device"]),
        precision="/".join(dict.fromkeys(row["precision"] for row in done)),
        batch="/".join(dict.fromkeys(str(row["global_batch"]) for row in done)),
        n=max(row["repeats"] for row in done),
        date=" – ".join(dict.fromkeys(time[:10] for time in _made(summary))),
        commit=(manifest["commit"] or "?")[:10],
    )


def _made(summary: Summary) -> list[str]:
    """When the first and the last run in the table were started: what was asked since need not have trained any."""
    started = sorted(run["started"] for run in summary.succeeded_runs)
    return list(dict.fromkeys([*started[:1], *started[-1:]]))


def _peak_text(peak: dict | None) -> Text:
    if not peak or not peak["flops_per_second"]:  # nothing was trained on the CPU
        return same("")
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peak["flops_per_second"].items())
    return say("peak_cpu", peak=f"{peak['cores']} cores, {rates}")


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
