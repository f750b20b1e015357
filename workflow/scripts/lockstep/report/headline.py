"""The report's first lines, the same in the terminal, in Markdown and on the page.

1. which row to use, and how to distinguish it from rows that tie with it  2. how much faster it is  3. whether it
trains the same model  4. the conditions  5. what not to conclude
"""

import math
import shlex
from dataclasses import dataclass

from lockstep.config import registry
from lockstep.config.configuration import MOST_BLOCKS, PRECISE
from lockstep.proof.verdicts import PROVEN
from lockstep.report import cautions
from lockstep.report.choice import is_faster, recommended, slowest_comparable, tied, too_short, undecided
from lockstep.report.conditions import baseline_cores, conditions, devices_of, span_of
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import trusted
from lockstep.report.reasons import why_slowest
from lockstep.report.summary import Summary
from lockstep.report.words import MANY, Text, join, same, say, some

MUCH = 0.1  # the share of its training time from which a row's cold time is mentioned
MINUTE = 60  # seconds


@dataclass(frozen=True)
class Figure:
    """A figure beside the first sentence: its label, its value, and its range if it has one."""

    label: Text
    value: Text
    range: str = ""


def figures(summary: Summary) -> list[Figure]:
    """The main figures, four if all are known: time, speed-up, proven rows, runs that count."""
    done = summary.finished_rows
    if not done:
        return []
    best = recommended([row for row in done if trusted(summary.runs[row["row"]])] or done)
    short = too_short(done) or summary.config.get("quick")  # times that say nothing
    time = Figure(say("figure_time", row=best["row"]), say("figure_seconds", n=f"{best['train_seconds']:.3g}"))
    shown = [] if short else [time]
    if not short and best["speedup"] and best["strategy"] != BASELINE:
        limits = [best["speedup_low"], best["speedup_high"]]
        between = " – ".join(f"{limit:.2f}" for limit in limits) if None not in limits and best["repeats"] > 1 else ""
        shown.append(Figure(say("figure_speedup", row=best["row"]), same(f"{best['speedup']:.2f}"), between))
    proven = sum(row["proof"] in PROVEN for row in done)
    shown.append(Figure(say("figure_proven"), say("figure_of", n=proven, all=len(done))))
    runs = summary.succeeded_runs
    sound = sum(not run.watch.disturbed for run in runs)
    return [*shown, Figure(say("figure_runs"), say("figure_of", n=sound, all=len(runs)))]


def box(summary: Summary) -> list[Text]:
    """The lines that answer the main question: which row to use, which are not told from it, and how to learn more."""
    said = lines(summary)
    done = [row for row in summary.finished_rows if trusted(summary.runs[row["row"]])]
    if not done or too_short(done):
        return said[:1]
    best = recommended(done)
    answering = [*answer(best, done, summary), *_further(best, done, summary)]
    return [line for line in said if line in answering] or said[:1]


def lines(summary: Summary) -> list[Text]:
    done = summary.finished_rows
    if not done:
        return [say("nothing")]
    sound = [row for row in done if trusted(summary.runs[row["row"]])]
    if too_short(done):
        sentences = [say("too_short", steps=span_of([row["steps"] for row in done]))]
    elif sound:
        sentences = _times(sound, summary)
    else:
        sentences = [say("all_disturbed_quick" if summary.config.get("quick") else "all_disturbed")]
    sentences += [same_model(summary), conditions(summary)]
    wanted = sum(run.status != "unavailable" for runs in summary.runs.values() for run in runs)
    have = len(summary.succeeded_runs)
    if have < wanted:
        sentences.append(say("partial", done=have, all=wanted))
    if mind := cautions.warning(summary):
        sentences.append(mind)
    return sentences


def _times(done: list[dict], summary: Summary) -> list[Text]:
    """Which row is fastest, and by how much."""
    best = recommended(done)
    # A single closed row among open ones is only the baseline for those, so there is no fastest closed row to name.
    alone = summary.ladder and sum(row["division"] == "closed" for row in done) == 1
    sentences = []
    if not alone:
        sentences = [*answer(best, done, summary), *_further(best, done, summary), *_later(best, done, summary)]
    baseline = _baseline(done, summary.rows)
    if baseline and best is not baseline and not alone:
        ratio = summary.ratios.get(best["row"], {}).get(baseline["row"])
        sentences += [_ratio(best, baseline, ratio)] if ratio else []
    if not alone:
        sentences += why_slowest(best, done, summary)
    sentences += _cold(best, done)
    sentences += _control(done, baseline, summary.ratios)
    sentences += _cliffs(summary.scaling)
    if summary.ladder:
        sentences.append(_open(summary.ladder))
    return sentences


def _baseline(done: list[dict], rows: list[dict]) -> dict | None:
    """The baseline, if it is one of the rows that are `done`: the first in the configuration, and never another one."""
    first = next((row for row in rows if row["strategy"] == BASELINE), None)
    return first if first in done and first["speedup"] else None


def _cold(best: dict, done: list[dict]) -> list[Text]:
    """The fastest row's cold time, if that is long, and the number of steps up to which another row is faster.

    n steps take a row its cold time plus n times its step time.
    """
    cold = best["cold_seconds"]
    if not cold or cold < MUCH * best["train_seconds"]:
        return []
    equal_after = {}
    for row in done:
        seconds_more, cheaper = row["step_ms"] - best["step_ms"], cold - (row["cold_seconds"] or 0)
        if row["world_size"] == best["world_size"] and seconds_more > 0 and cheaper > 0:
            equal_after[row["row"]] = math.ceil(1000 * cheaper / seconds_more)
    if not equal_after:
        return []
    other = max(equal_after, key=equal_after.get)
    return [say("cold", row=best["row"], cold=f"{cold:.2g}", steps=f"{equal_after[other]:,}", other=other)]


def _control(done: list[dict], baseline: dict | None, ratios: dict) -> list[Text]:
    """The ratio of two rows that run the same program, such as `nn.DataParallel` on a CPU and the baseline."""
    alias = next((row for row in done if row["device"] in registry.literals(row["strategy"])["PLAIN_ON"]), None)
    ratio = ratios.get(alias["row"], {}).get(baseline["row"]) if alias and baseline else None
    if not ratio or not ratio["kind"]:
        return []
    figures = {"ratio": ratio["value"], "low": ratio["low"], "high": ratio["high"]}
    rounded = {name: f"{value:.3f}" for name, value in figures.items()}
    return [say("control", row=alias["row"], baseline=baseline["row"], **rounded)]


def _cliffs(families: list[dict]) -> list[Text]:
    """Where rows lose most of their efficiency as devices are added; the two that lose most."""
    falls = []
    for family in families:
        if family["cliff"]:
            fewer, more = (next(size for size in family["sizes"] if size["row"] == name) for name in family["cliff"])
            hop = "cliff_machines" if fewer["nodes"] == 1 < more["nodes"] else "cliff"
            shares = {name: f"{100 * size['efficiency']:.0f}" for name, size in (("before", fewer), ("after", more))}
            told = say(
                hop,
                family=family["name"],
                against=family["against"],
                fewer=fewer["devices"],
                more=more["devices"],
                **shares,
            )
            falls.append((fewer["efficiency"] - more["efficiency"], told))
    return [told for _, told in sorted(falls, key=lambda fall: fall[0], reverse=True)[:2]]


def _open(ladder: dict) -> Text:
    """Which row of the open division to use (lockstep/report/ladder.py)."""
    level = next((level for level in ladder["rungs"] if level["row"] == ladder["best"]), None)
    if level is None:
        return say("open_none", baseline=ladder["baseline"])
    figures = {
        name: f"{level[key]:.2f}" for name, key in (("gain", "gain"), ("low", "gain_low"), ("high", "gain_high"))
    }
    return say("open", row=level["row"], baseline=ladder["baseline"], **figures)


def answer(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """Which row to use, what it gains, and whether it is the same model, in at most 25 words.

    Then, in a line each, which rows the runs can't tell from it, and how much longer the slowest one takes.
    """
    alike, last = undecided(best, done, summary), slowest_comparable(best, done, summary)
    slowest = []
    if is_faster(best, last, summary):
        ratio = f"{1 / summary.ratios[best['row']][last['row']]['value']:.2f}"
        slowest = [say("slowest", row=last["row"], ratio=ratio, best=best["row"])]
    if best["repeats"] == 1 or not best["place"]:
        once = "fastest_once" if best["repeats"] == 1 else "fastest"
        most = max(done, key=lambda row: row["devices"])
        return [say(once, devices=devices_of(most), row=best["row"]), *slowest]
    names = [row["row"] for row in alike]
    ties = [say("undecided", best=best["row"], rows=some(names, 2))] if names else []
    gain = say("use_gain_none") if best["strategy"] == BASELINE else _gain(best, baseline_cores(summary))
    return [say("use", row=best["row"], gain=gain, proof=_proof(best)), *ties, *slowest]


def _later(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """Why rows that are not shown to be slower than `best` have a later place: another row is shown to be faster."""
    if not best["place"]:
        return []
    later = [row for row in undecided(best, done, summary) if row["place"] and row["place"] > best["place"]]
    faster = [row for row in done if all(is_faster(row, slow, summary) for slow in later)]
    if not later or not faster:
        return []
    first = min(faster, key=lambda row: row["train_seconds"])
    return [say("later", rows=some([row["row"] for row in later], 2), best=best["row"], faster=first["row"])]


def _further(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """How many more blocks may distinguish the rows in first place, and how long they take; empty if only one has it.

    Four times as many blocks make an interval half as wide.
    """
    decided = summary.blocks
    if not tied(best, done) or summary.config["quick"]:
        return []
    if decided:
        if decided["why"] != "budget" or not decided["width"] or not decided["next_seconds"]:
            return []
        enough = min(MOST_BLOCKS, math.ceil(decided["block"] * (decided["width"] / PRECISE) ** 2))
        seconds = (enough - decided["block"]) * decided["next_seconds"]
        setting = f"budget={MINUTE * math.ceil((decided['seconds'] + seconds) / MINUTE)}"
    else:
        each = [run.wall_seconds for run in summary.succeeded_runs]
        seconds, setting = 3 * sum(each), f"repeats={4 * max(len(runs) for runs in summary.runs.values())}"
    minutes = math.ceil(seconds / MINUTE)
    return [say("further", command=_again_with(summary, setting), minutes=minutes)] if minutes > 0 else []


def _again_with(summary: Summary, setting: str) -> str:
    """The command that requested these results, with its configuration files and one more setting."""
    asked = shlex.split((summary.manifest or {"command": ""})["command"])
    files = []
    if "--configfile" in asked:
        after = asked[asked.index("--configfile") + 1 :]
        files = ["--configfile", *after[: next((k for k, word in enumerate(after) if word[:1] == "-"), len(after))]]
    return shlex.join(["lockstep", "bench", *files, "--config", setting])


def _gain(row: dict, cores: tuple[str, int, int] | None) -> Text:
    """How many times as fast as the baseline a row is; cores: as baseline_cores returns it."""
    if row["speedup"] is None:
        return same("")
    between = same("")
    if None not in (row["speedup_low"], row["speedup_high"]):
        between = say("use_gain_between", low=f"{row['speedup_low']:.2f}", high=f"{row['speedup_high']:.2f}")
    of_cores = say("use_gain_cores", n=cores[1], cores=cores[2]) if cores else same("")
    return say("use_gain", speedup=f"{row['speedup']:.2f}", between=between, of_cores=of_cores)


def _proof(row: dict) -> Text:
    """What the first sentence says about the recommended row's model."""
    if row["strategy"] == BASELINE:
        return same("")
    return say({"equal": "use_equal", "within-tolerance": "use_within"}.get(row["proof"], "use_unproven"))


def _ratio(best: dict, baseline: dict, ratio: dict) -> Text:
    low, high = f"{ratio['low']:.3f}", f"{ratio['high']:.3f}"
    return say(
        "ratio",
        row=best["row"],
        devices=devices_of(best),
        baseline=baseline["row"],
        ratio=f"{ratio['value']:.3f}",
        interval=say(ratio["kind"], low=low, high=high) if ratio["kind"] and best["repeats"] > 1 else same(""),
        ours=f"{best['train_seconds']:.3g}",
        theirs=f"{baseline['train_seconds']:.3g}",
        n=ratio["n"],
    )


def same_model(summary: Summary) -> Text:
    """Which rows train the same model; and which rows were proven with the table's settings instead of their own."""
    rows, verdicts, counts = summary.rows, summary.verdicts, []
    for kind in ("equal", "within-tolerance", "unequal", "failed", "not-run"):
        names = [row["row"] for row in rows if row["proof"] == kind]
        if kind in PROVEN:  # a row that failed is proven by its strategy's trial, and yet has no model
            names = [row["row"] for row in rows if row["proof"] == kind and row["status"] != "failed"]
        if names:
            counts.append(say(f"count_{kind}", n=len(names), rows=some(names, MANY)))
    equal = [verdict for verdict in verdicts.values() if verdict and verdict["proof"] == "equal"]
    if equal:
        losses = max(verdict["distances"]["losses"] for verdict in equal)
        mistake = min(verdict["below_mistake"] for verdict in equal)
        counts.append(say("worst", loss=f"{losses:.1e}", mistake=f"{mistake:,.0f}"))
    joined = join(counts, say("semicolon"))
    steps = sorted({verdict["steps"] for verdict in verdicts.values() if verdict and verdict["steps"]})
    if not steps:
        return say("same_model_unknown", verdicts=joined)
    own = [row["row"] for row in rows if verdicts.get(row["row"]) and summary.not_in_trials.get(row["row"])]
    by_table = say("proven_by_table", rows=some(own, MANY)) if own else ""
    return say("same_model", steps="/".join(map(str, steps)), verdicts=joined, by_table=by_table)
