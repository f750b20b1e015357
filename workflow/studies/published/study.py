"""The published table, answered: its rows as they were and as they were meant, and what each flaw is worth here.

Between the two, flaws are taken away one at a time, each step a row of its own, in two orders (config/published.yaml).
A flaw's worth is the mean over both of what taking it away changes: what two flaws do together is shared between them
(Shapley's value, of two of the orders). The steps of an order add up to the whole by themselves; the last one, from the
row without flaws to its honest sibling, is the rest that no flaw explains.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import yaml
from scipy.special import stdtrit

from lockstep import stats
from lockstep.config.configuration import Config
from lockstep.config.row import times_trained
from lockstep.report.charts import COLOURS, GAP, Drawing, bars
from lockstep.report.words import Text, same, say
from lockstep.run.record import Tested

FILE = Path(__file__).with_name("table.yaml")
NEAR = 0.2  # a published ratio stands where the one measured here is as near to it, or its interval holds it
# Keys of a row that are one flaw together: by what the flaw is called.
TOGETHER = {
    "habits": {"batching", "tokenise_late", "barrier", "print_loss"},
    "precision": {"precision", "native_precision"},
}
TOLD = ("name", "minutes", "accuracy", "macro_f1", "support", "flaw", "ours", "again")  # of a published row
NOT_TRAINING = ("count_each_rank",)  # how a model is tested changes nothing of how long it trains


def answer(
    config: Config, rows: list[dict], timed: dict[str, list[dict]], verdicts: dict[str, dict | None], ratio
) -> dict:
    """Each line of both published tables, with what was measured here, and the claims made of them.

    timed: the runs whose time counts, by row. ratio: a function that returns the ratio of two rows as in the table
    (ranking.py). Values for which the configuration has no row are None.
    """
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    by_name = {row["row"]: row for row in rows}
    baseline = table["rows"][0]
    lines = [_line(line, baseline, config, by_name, timed, verdicts, ratio) for line in table["rows"]]
    by_published = {line["name"]: line for line in lines}
    return {
        "source": table["source"],
        "rows": lines,
        "claims": [_claim(claim["key"], by_published[claim["name"]]) for claim in table["claims"]],
        "ladder": [_level(level, table["ladder"][0], by_name, ratio) for level in table["ladder"]],
    }


def _line(line, baseline, config, by_name, timed, verdicts, ratio) -> dict:
    ours = _row_of(line["ours"], by_name)
    columns = {key: line.get(key) for key in TOLD}
    columns |= {"ratio": line["minutes"] / baseline["minutes"]}
    for side, row, single in (
        ("ours", ours, _row_of(baseline["ours"], by_name)),
        ("again", line["again"], baseline["again"]),
    ):
        columns[f"{side}_ratio"] = ratio(row, single)
        for name in ("accuracy", "macro_f1", "train_seconds", "steps"):
            columns[f"{side}_{name}"] = by_name[row][name] if row in by_name else None
    verdict = verdicts.get(line["again"])
    columns |= {"again_proof": verdict and verdict["proof"], "again_reason": (verdict or {}).get("by_nature", "")}
    return columns | {"worth": _worth(line, config, by_name, timed)}


def _row_of(strategy: str, by_name: dict[str, dict]) -> str | None:
    """The row with the strategy's name or, without one, the first row of that strategy."""
    if strategy in by_name:
        return strategy
    return next((name for name, row in by_name.items() if row["strategy"] == strategy), None)


def _seconds(runs: list[Tested]) -> dict[stats.Block, float]:
    return {stats.block(run): run.clock.train_seconds for run in runs}


def _worth(line: dict, config: Config, by_name: dict, timed: dict) -> dict | None:
    """The effect of each flaw of a published row on seconds, steps, samples and macro-F1.

    `whole` is the difference between the published row and the honest one; `flaws` are in the first order; `rest` is
    what no flaw explains. `again_seconds` and `ours_seconds` are the mean times of the two rows over the blocks of
    `whole`. The result is None if a row of either order has no results.
    """
    honest = line["ours"]
    needed = {name for way in line["ways"] for name in way} | {honest}
    if not all(timed.get(name) for name in needed):
        return None
    orders = [
        {flaw_between(config, before, after): (before, after) for before, after in itertools.pairwise(way)}
        for way in line["ways"]
    ]
    last = (line["ways"][0][-1], honest)
    if "last" in line:
        orders = [steps | {line["last"]: last} for steps in orders]
    flaws = [{"flaw": flaw} | _change([steps[flaw] for steps in orders], by_name, timed) for flaw in orders[0]]
    rest = None if "last" in line else _change([last], by_name, timed)
    again, ours = (_seconds(timed[name]) for name in (line["again"], honest))
    blocks = again.keys() & ours.keys()
    return {
        "again_seconds": float(np.mean([again[block] for block in blocks])) if blocks else None,
        "ours_seconds": float(np.mean([ours[block] for block in blocks])) if blocks else None,
        "whole": _change([(line["again"], honest)], by_name, timed),
        "flaws": flaws,
        "rest": rest,
        "again": line["again"],
        "ours": honest,
    }


def _change(steps: list[tuple[str, str]], by_name: dict, timed: dict) -> dict:
    """What taking a flaw away changes: the mean over `steps`, which has (row with it, row without it) for each order.

    seconds: with a 95 % interval of Student's t over the blocks that contain all rows; None if there are too few.
    by_order: the change in each order.
    """
    changes = [_paired(*step, timed) for step in steps]
    shared = sorted(set.intersection(*(set(change) for change in changes)), key=str)
    values = np.array([[change[block] for change in changes] for block in shared]).reshape(len(shared), len(steps))
    means = values.mean(axis=1)
    low = high = None
    if len(means) > 1:
        half = float(stdtrit(len(means) - 1, (1 + stats.CONFIDENCE) / 2) * means.std(ddof=1) / np.sqrt(len(means)))
        low, high = float(means.mean()) - half, float(means.mean()) + half
    changed = {
        "seconds": float(means.mean()) if len(means) else None,
        "seconds_low": low,
        "seconds_high": high,
        "n": len(means),
        "by_order": [float(column) for column in values.mean(axis=0)] if len(means) else [],
    }
    for name in ("steps", "samples", "macro_f1"):
        differences = [
            _figure(name, after, by_name, timed) - _figure(name, before, by_name, timed) for before, after in steps
        ]
        changed[name] = float(np.mean(differences))
    return changed


def _paired(before: str, after: str, timed: dict) -> dict[stats.Block, float]:
    """Seconds of `after` less those of `before`, by the blocks that hold both."""
    ours, theirs = _seconds(timed[after]), _seconds(timed[before])
    return {block: ours[block] - theirs[block] for block in ours.keys() & theirs.keys()}


def _figure(name: str, row: str, by_name: dict, timed: dict) -> float:
    if name == "samples":  # that were trained: some more than once, where no sampler shares them out
        run = timed[row][0]
        return run.work.samples * times_trained(run.strategy, run.asked["options"], run.asked["hardware"]["processes"])
    return by_name[row][name] or 0.0


def flaw_between(config: Config, before: str, after: str) -> str:
    """The name of the flaw that a row of the configuration has and the next one lacks, from the keys that differ."""
    ours, theirs = (_keys(config, name) for name in (before, after))
    changed = {key for key in ours if ours[key] != theirs.get(key)}
    if len(changed) == 1:
        return changed.pop()
    return next((name for name, keys in TOGETHER.items() if changed <= keys), " + ".join(sorted(changed)))


def _keys(config: Config, name: str) -> dict:
    row = config.rows[name]
    options = {key: value for key, value in row.options.items() if key not in NOT_TRAINING}
    return options | {
        "batching": row.train.batching,
        "global_batch": row.train.global_batch,
        "precision": row.precision,
    }


def _claim(key: str, line: dict) -> dict:
    """Whether a published ratio holds here, by the ratio of the corrected row to its single.

    stands: True or False; None if too little was measured.
    """
    speed = 1 / line["ratio"]
    figures = {"key": key, "name": line["name"], "ours": line["ours"], "published": speed, "stands": None}
    for side in ("ours", "again"):
        ratio = line[f"{side}_ratio"]
        figures[f"{side}_speed"] = 1 / ratio["value"] if ratio else None
        figures[f"{side}_low"], figures[f"{side}_high"] = (
            (1 / ratio["high"], 1 / ratio["low"]) if ratio and ratio["kind"] else (None, None)
        )
    if figures["ours_low"] is not None:
        near = abs(figures["ours_speed"] / speed - 1) <= NEAR
        figures["stands"] = near or figures["ours_low"] <= speed <= figures["ours_high"]
    return figures


def _level(level: dict, first: dict, by_name: dict, ratio) -> dict:
    ours = by_name.get(level["ours"])
    return level | {
        "ratio": level["minutes"] / first["minutes"],
        "our_ratio": ratio(level["ours"], first["ours"]),
        **{f"our_{name}": ours and ours[name] for name in ("peak_memory_mb", "macro_f1", "proof")},
    }


def drawings(answered: dict) -> Iterator[tuple[str, Callable[[], Drawing]]]:
    """(name, function) of each picture of the section."""
    for line in answered["rows"]:
        if line["worth"]:
            yield line["ours"], lambda line=line: worth(line)


def worth(line: dict) -> Drawing:
    """A waterfall from a published row to the corrected one, by how many seconds each flaw accounts for."""
    decomposition = line["worth"]
    parts = [(part["flaw"], part) for part in decomposition["flaws"]]
    if decomposition["rest"]:
        parts.append(("rest", decomposition["rest"]))
    labels = [say("axis_worth_again"), *(say(f"axis_worth_{name}") for name, _ in parts), say("axis_worth_ours")]
    figure, axes = bars(["" for _ in labels])
    axes.set_yticks(range(len(labels)), [label.en for label in labels])
    # The means that the changes are of, so that bar joins bar; medians where no block holds both rows.
    begin, end = (
        decomposition["again_seconds"] or line["again_train_seconds"],
        decomposition["ours_seconds"] or line["ours_train_seconds"],
    )
    tips, table = {}, []
    axes.barh(0, begin, height=0.66, color=COLOURS[5])
    at = begin
    for position, (_, part) in enumerate(parts, 1):
        seconds = part["seconds"] or 0.0
        (bar,) = axes.barh(position, seconds, left=at, height=0.66, color=COLOURS[1 if seconds > 0 else 2])
        bar.set_gid(f"worth-{line['ours']}-{position}")
        interval = "" if part["seconds_low"] is None else f" ({part['seconds_low']:+.3g} – {part['seconds_high']:+.3g})"
        tips[bar.get_gid()] = f"{labels[position].en}: {seconds:+.3g} s{interval}"
        axes.text(max(at, at + seconds), position, f"{GAP}{seconds:+.3g} s", va="center", fontsize=9)
        at += seconds
        orders = " / ".join(f"{value:+.3g}" for value in part["by_order"])
        changes = [f"{part['steps']:+.0f}", f"{part['samples']:+.0f}", f"{part['macro_f1']:+.3f}"]
        table.append([labels[position].en, f"{seconds:+.3g}{interval}", orders, *changes])
    axes.barh(len(labels) - 1, end, height=0.66, color=COLOURS[0])
    for position, total in ((0, begin), (len(labels) - 1, end)):
        axes.text(total, position, f"{GAP}{total:.3g} s", va="center", fontsize=9)
    axes.set_xlim(0, max(begin, end) * 1.25)
    axes.set_xlabel(say("axis_train").en)
    rest = "–"
    if decomposition["rest"] and decomposition["whole"]["seconds"]:
        share = abs(decomposition["rest"]["seconds"] / decomposition["whole"]["seconds"])
        rest = f"{decomposition['rest']['seconds']:+.2g} s, {100 * share:.0f} %"
    return Drawing(
        figure,
        say("picture_worth", name=line["name"]),
        say("picture_worth_note", again=line["again"], ours=line["ours"], rest=rest),
        [
            say(key)
            for key in ("flaw_name", "train_seconds", "flaw_order", "flaw_steps", "flaw_samples", "flaw_macro_f1")
        ],
        table,
        tips,
    )


def lines(answered: dict) -> list[Text]:
    """Which of the published conclusions hold here; no line if the published rows were not reproduced."""
    return [_told(claim) for claim in answered["claims"] if claim["again_speed"]]


def _told(claim: dict) -> Text:
    """A sentence that says whether a published ratio holds here."""
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
