"""The report's first lines, the same in the terminal, in Markdown and on the page.

1. which row to use, and how to distinguish it from rows that tie with it  2. how much faster it is  3. whether it
trains the same model  4. the conditions  5. what not to conclude
"""

import math
import shlex
from dataclasses import dataclass

from lockstep import columns
from lockstep.config import registry
from lockstep.config.configuration import MOST_BLOCKS, PRECISE
from lockstep.config.hardware import busy_cores, shares_gpus
from lockstep.config.qualities import QUALITIES
from lockstep.proof.fairness import alike, other_versions
from lockstep.proof.verdicts import PROVEN
from lockstep.report import ladder
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import good_runs, trusted
from lockstep.report.summary import Summary
from lockstep.report.words import Text, join, listing, same, say
from lockstep.run import blocks

MUCH = 0.1  # the share of its training time from which a row's cold time is mentioned
LISTED, MANY = 4, 12  # the most names in a sentence, and in a long list
AGREE = 2  # the factor by which a value found in two ways may differ
MINUTE = 60  # seconds
HARDLY = 0.5  # from this share on, the smallest difference that runs can show is no figure to plan by
SAME = ("cpu", "cores", "gpus", "python", "commit")


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
    short = too_short(done)
    time = Figure(say("figure_time", row=best["row"]), say("figure_seconds", n=f"{best['train_seconds']:.3g}"))
    shown = [] if short else [time]
    if not short and best["speedup"] and best["strategy"] != BASELINE:
        limits = [best["speedup_low"], best["speedup_high"]]
        between = " – ".join(f"{limit:.2f}" for limit in limits) if None not in limits and best["repeats"] > 1 else ""
        shown.append(Figure(say("figure_speedup", row=best["row"]), same(f"{best['speedup']:.2f}"), between))
    proven = sum(row["proof"] in PROVEN for row in done)
    shown.append(Figure(say("figure_proven"), say("figure_of", n=proven, all=len(done))))
    runs = summary.succeeded_runs
    sound = sum(not run["watch"]["disturbed"] for run in runs)
    return [*shown, Figure(say("figure_runs"), say("figure_of", n=sound, all=len(runs)))]


def box(summary: Summary) -> list[Text]:
    """The lines that answer the main question: which row to use, and how to learn more."""
    said = lines(summary)
    done = [row for row in summary.finished_rows if trusted(summary.runs[row["row"]])]
    further = [] if not done or too_short(done) else _further(recommended(done), done, summary)
    return [line for line in said[:2] if line in (said[0], *further)]


def lines(summary: Summary) -> list[Text]:
    done = summary.finished_rows
    if not done:
        return [say("nothing")]
    sound = [row for row in done if trusted(summary.runs[row["row"]])]
    if too_short(done):
        sentences = [say("too_short", steps=_span_of([row["steps"] for row in done]))]
    elif sound:
        sentences = _times(sound, summary)
    else:
        sentences = [say("all_disturbed_quick" if summary.config.get("quick") else "all_disturbed")]
    sentences += [same_model(summary), conditions(summary)]
    wanted = sum(run["status"] != "unavailable" for runs in summary.runs.values() for run in runs)
    have = len(summary.succeeded_runs)
    if have < wanted:
        sentences.append(say("partial", done=have, all=wanted))
    if mind := warning(summary):
        sentences.append(mind)
    return sentences


def too_short(done: list[dict]) -> bool:
    """Whether no row trained for enough steps to tell which is faster."""
    return all(columns.too_short(row["steps"]) for row in done)


def _times(done: list[dict], summary: Summary) -> list[Text]:
    """Which row is fastest, and by how much."""
    best = recommended(done)
    # A single closed row among open ones is only the baseline for those, so there is no fastest closed row to name.
    alone = summary.ladder and sum(row["division"] == "closed" for row in done) == 1
    sentences = []
    if not alone:
        sentences = [answer(best, done, summary), *_further(best, done, summary), *_later(best, done, summary)]
    baseline = next((row for row in done if row["strategy"] == BASELINE and row["speedup"]), None)
    if baseline and best is not baseline and not alone:
        ratio = summary.ratios.get(best["row"], {}).get(baseline["row"])
        sentences += [_ratio(best, baseline, ratio)] if ratio else []
    if not alone:
        sentences += _why_slowest(best, done, summary)
    sentences += _cold(best, done)
    sentences += _control(done, baseline, summary.ratios)
    sentences += _cliffs(summary.scaling)
    if summary.ladder:
        sentences.append(_open(summary.ladder))
    return sentences


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
    """The ratio of two rows that run the same program: on a CPU `nn.DataParallel` only calls the plain model."""
    alias = next((row for row in done if row["strategy"] == "dataparallel" and row["device"] == "cpu"), None)
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


def warning(summary: Summary) -> Text | None:
    """The last line: what not to conclude from the other lines."""
    warnings = _warnings(summary) if summary.finished_rows else []
    return say("mind", warnings=join(warnings, say("semicolon"))) if warnings else None


def name(summary: Summary) -> str:
    """The name of the row to use; empty if none is recommended."""
    done = [row for row in summary.finished_rows if trusted(summary.runs[row["row"]])]
    return recommended(done)["row"] if done and not too_short(done) else ""


def count_warnings(summary: Summary) -> int:
    return len(_warnings(summary)) if summary.finished_rows else 0


def fastest(done: list[dict]) -> dict:
    """The row with the shortest median time among ranked rows or, without any, in the closed division.

    Other rows with one device are left out if possible: they do the same as the baseline under another name, so that
    only chance would decide between them.
    """
    ranked = [row for row in done if row["place"]]
    several = [row for row in ranked if row["world_size"] > 1 or row["strategy"] == BASELINE]
    closed = [row for row in done if row["division"] == "closed"]
    return min(several or ranked or closed or done, key=lambda row: row["train_seconds"])


def recommended(done: list[dict]) -> dict:
    """The row to use: of the fastest row and those that tie with it, the first in the configuration's order.

    Configurations list the simplest strategies first, as the default one does.
    """
    best = fastest(done)
    tied = [best, *_tied(best, done)]
    return next(row for row in done if row in tied)


def _tied(best: dict, done: list[dict]) -> list[dict]:
    """The other rows that share the first place with `best`, if each has more than one run."""
    several = [row for row in done if row["world_size"] > 1 or row["strategy"] == BASELINE]
    return [
        row
        for row in several
        if row is not best and row["place"] == best["place"] == 1 and min(row["repeats"], best["repeats"]) > 1
    ]


def answer(best: dict, done: list[dict], summary: Summary) -> Text:
    """The first sentences: which row to use, what it gains, whether it is the same model, and from which rows the runs
    can't tell it apart."""
    alike, last = undecided(best, done, summary), _last(best, done, summary)
    slowest = same("")
    if _is_faster(best, last, summary):
        ratio = f"{1 / summary.ratios[best['row']][last['row']]['value']:.2f}"
        slowest = say("slowest", row=last["row"], ratio=ratio, best=best["row"])
    if best["repeats"] == 1 or not best["place"]:
        once = "fastest_once" if best["repeats"] == 1 else "fastest"
        most = max(done, key=lambda row: row["devices"])
        return say(once, devices=_devices(most), row=best["row"], slowest=slowest)
    ties = say("undecided", rows=some([row["row"] for row in alike], 2)) if alike else same("")
    gain = say("use_gain_none") if best["strategy"] == BASELINE else _gain(best, _baseline_share(summary))
    return say("use", row=best["row"], gain=gain, proof=_proof(best), ties=ties, slowest=slowest)


def undecided(best: dict, done: list[dict], summary: Summary) -> list[dict]:
    """The rows of which it is shown neither that they are faster than `best` nor that they are slower, fastest first.

    It is unknown of rows with a single run.
    """
    ratios = summary.ratios.get(best["row"], {})
    alike = [
        row
        for row in done
        if row is not best
        and ratios.get(row["row"], {}).get("shown") is False
        and min(row["repeats"], best["repeats"]) > 1
    ]
    return sorted(alike, key=lambda row: row["train_seconds"])


def _is_faster(row: dict, other: dict, summary: Summary) -> bool:
    """Whether a row is shown to be faster than another one."""
    ratio = summary.ratios.get(row["row"], {}).get(other["row"])
    return bool(ratio and ratio["shown"] and ratio["value"] < 1)


def _later(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """Why rows that are not shown to be slower than `best` have a later place: another row is shown to be faster."""
    if not best["place"]:
        return []
    later = [row for row in undecided(best, done, summary) if row["place"] and row["place"] > best["place"]]
    faster = [row for row in done if all(_is_faster(row, slow, summary) for slow in later)]
    if not later or not faster:
        return []
    first = min(faster, key=lambda row: row["train_seconds"])
    return [say("later", rows=some([row["row"] for row in later], 2), best=best["row"], faster=first["row"])]


def _further(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """How many more blocks may distinguish the rows in first place, and how long they take; empty if only one has it.

    Four times as many blocks make an interval half as wide.
    """
    decided = summary.blocks
    if not _tied(best, done) or summary.config["quick"]:
        return []
    if decided:
        if decided["why"] != "budget" or not decided["width"] or not decided["next_seconds"]:
            return []
        enough = min(MOST_BLOCKS, math.ceil(decided["block"] * (decided["width"] / PRECISE) ** 2))
        seconds = (enough - decided["block"]) * decided["next_seconds"]
        setting = f"budget={MINUTE * math.ceil((decided['seconds'] + seconds) / MINUTE)}"
    else:
        each = [run["wall_seconds"] for run in summary.succeeded_runs]
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


def _gain(row: dict, share: tuple[str, int, int] | None) -> Text:
    """How many times as fast as the baseline a row is; share: as _baseline_share returns it."""
    if row["speedup"] is None:
        return same("")
    between = same("")
    if None not in (row["speedup_low"], row["speedup_high"]):
        between = say("use_gain_between", low=f"{row['speedup_low']:.2f}", high=f"{row['speedup_high']:.2f}")
    of_cores = say("use_gain_cores", n=share[1], cores=share[2]) if share else same("")
    return say("use_gain", speedup=f"{row['speedup']:.2f}", between=between, of_cores=of_cores)


def _baseline_share(summary: Summary) -> tuple[str, int, int] | None:
    """The baseline's row on a CPU, its number of cores, and the machine's, if these are more; otherwise None."""
    rows = [row["row"] for row in summary.finished_rows if row["strategy"] == BASELINE and row["device"] == "cpu"]
    if not rows:
        return None
    busy = busy_cores(good_runs(summary.runs[rows[0]])[0]["asked"]["hardware"])
    cores = summary.environment["cores"]
    return (rows[0], busy, cores) if busy < cores else None


def _proof(row: dict) -> Text:
    """What the first sentence says about the recommended row's model."""
    if row["strategy"] == BASELINE:
        return same("")
    return say({"equal": "use_equal", "within-tolerance": "use_within"}.get(row["proof"], "use_unproven"))


def _last(best: dict, done: list[dict], summary: Summary) -> dict:
    """The slowest row that can be compared with `best`, on equally many devices; `best` if there is none."""
    ratios = summary.ratios.get(best["row"], {})
    slower = [row for row in done if row["place"] and row["row"] in ratios and row["world_size"] == best["world_size"]]
    return max(slower, key=lambda row: row["train_seconds"], default=best)


def _devices(row: dict) -> Text:
    kind = "gpu" if row["device"] == "cuda" else "cpu"
    return say(f"{kind}_devices" if row["devices"] > 1 else f"{kind}_device", n=row["devices"])


def _hardware(row: dict, summary: Summary) -> dict:
    """The hardware that a row asked for (config/hardware.py)."""
    return good_runs(summary.runs[row["row"]])[0]["asked"]["hardware"]


def of_step(profile: dict, seconds: float) -> dict:
    """A profile scaled to the row's step time, `seconds`, so that its phases add up to it.

    The profile is from another run, whose steps recording has made longer, so only its proportions are used.
    """
    recorded = seconds / sum(profile["seconds"].values())
    exposed = profile["exposed_by_difference"]  # None if no single device does the row's work alone
    return {
        "step_seconds": seconds,
        "seconds": {phase: recorded * part for phase, part in profile["seconds"].items()},
        "exposed_by_difference": None if exposed is None else exposed * seconds / profile["step_seconds"],
    }


def because(slower: str, faster: str, profiles: dict[str, dict | None], steps: dict[str, float]) -> Text:
    """In which phase two rows differ, by one profile of each; empty if two ways of finding it disagree.

    A step's duration is known from the recording and from timing. Exposed communication is known from the recording,
    and as the time by which a step is longer than the same work done alone; the error of this difference shows in rows
    that do not communicate. The sentence is in terms of `steps`, the rows' step times in seconds.
    """
    ours, theirs = profiles[slower], profiles[faster]
    if not ours or not theirs:
        return same("")
    recorded = sum(ours["seconds"].values()) - sum(theirs["seconds"].values())
    totals = [recorded, ours["step_seconds"] - theirs["step_seconds"], steps[slower] - steps[faster]]
    ours, theirs = of_step(ours, steps[slower]), of_step(theirs, steps[faster])
    more = {phase: ours["seconds"][phase] - theirs["seconds"][phase] for phase in ours["seconds"]}
    phase = max(more, key=more.get)
    part, error = [more[phase]] * 2, 0.0
    if phase == "communication":
        exposed = [profile["exposed_by_difference"] for profile in (ours, theirs)]
        if None in exposed:
            return same("")
        part[1] = exposed[0] - exposed[1]
        silent = [profile for profile in profiles.values() if profile and not profile["seconds"]["communication"]]
        error = max((abs(profile["exposed_by_difference"]) for profile in silent), default=0.0)
    if min(totals) <= 0 or min(part) <= error or any(max(found) > AGREE * min(found) for found in (totals, part)):
        return same("")
    total = totals[-1]
    spans = {"total": [total] * 2, "part": [min(seconds, total) for seconds in part]}
    took = {name: milliseconds(values) for name, values in spans.items()}
    return say("because", slow=slower, best=faster, phase=say(f"phase_{phase}"), **took)


def milliseconds(seconds: list[float]) -> Text:
    """Two values in milliseconds, or one if they agree to two digits."""
    low, high = (f"{1000 * value:.2g}" for value in sorted(seconds))
    return same(low) if low == high else say("span", low=low, high=high)


def _why_slowest(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """Where the slowest row's time goes, if profiles tell, and its precision, if that differs from the best row's."""
    last = _last(best, done, summary)
    if last is best or last in undecided(best, done, summary):
        return []
    steps = {row["row"]: row["step_ms"] / 1000 for row in (last, best)}
    sentences = [because(last["row"], best["row"], summary.profiles, steps)]
    if last["precision"] != best["precision"]:
        names = {"slow": last["row"], "best": best["row"], "ours": last["precision"], "theirs": best["precision"]}
        sentences.append(say("other_precision", **names))
    return [sentence for sentence in sentences if sentence.en]


def _ratio(best: dict, baseline: dict, ratio: dict) -> Text:
    low, high = f"{ratio['low']:.3f}", f"{ratio['high']:.3f}"
    return say(
        "ratio",
        row=best["row"],
        devices=_devices(best),
        baseline=baseline["row"],
        ratio=f"{ratio['value']:.3f}",
        interval=say(ratio["kind"], low=low, high=high) if ratio["kind"] and best["repeats"] > 1 else same(""),
        ours=f"{best['train_seconds']:.3g}",
        theirs=f"{baseline['train_seconds']:.3g}",
        n=ratio["n"],
    )


def resolution(share: float) -> Text:
    """The smallest difference that the runs can show, in per cent with two significant digits."""
    if share >= HARDLY:
        return say("resolution_none")
    return say("resolution", percent=f"{float(f'{100 * share:.2g}'):g}")


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


def machine(environment: dict, device: str) -> Text:
    if device == "cuda":
        return same(f"{len(environment['gpus'])} x {environment['gpus'][0]}")
    return say("cpu_machine", cores=environment["cores"], cpu=environment["cpu"])


def conditions(summary: Summary) -> Text:
    """On what, in which precision, and how much work was measured."""
    done, statistics = summary.finished_rows, summary.statistics

    def each(key):
        return "/".join(dict.fromkeys(str(row[key]) for row in done))

    share = _baseline_share(summary)
    idle = say("one_share", row=share[0], n=share[1], cores=share[2]) if share else same("")
    without = [row["row"] for row in done if _without_nccl(summary.runs[row["row"]])]
    shown = resolution(statistics["resolution"]) if statistics else same("")
    return say(
        "conditions",
        quick=say("quick") if summary.config["quick"] else same(""),
        idle=idle,
        without_nccl=say("without_nccl", rows=some(without)) if without else same(""),
        resolution=shown,
        blocks=_blocks(summary.blocks),
        machine=machine(summary.environment, done[0]["device"]),
        precision=each("precision"),
        batch=each("global_batch"),
        steps=each("steps"),
        repeats=_span_of([len(runs) for runs in summary.runs.values()]),
        texts=summary.data["splits"]["train"]["texts"],
    )


def _without_nccl(runs: list[dict]) -> bool:
    """Whether a row ran on GPUs with a framework that was built without NCCL, as Horovod may be."""
    lives = [run["settings"] for run in good_runs(runs)]
    return any(live["device"] != "cpu" and live["options"].get("nccl_built") is False for live in lives)


def _blocks(decided: dict | None) -> Text:
    """Why no further block of runs followed, with `repeats: auto`."""
    kinds = {
        "one row is fastest": "blocks_one",
        "precise": "blocks_precise",
        "budget": "blocks_budget",
        "most blocks": "blocks_most",
    }
    if not decided or decided["why"] not in kinds:
        return same("")
    precision = say("blocks_unknown")
    if decided["width"] is not None:
        precision = say("blocks_known", width=f"{100 * decided['width']:.2g} %")
    return say(kinds[decided["why"]], known=precision)


def _span_of(numbers: list[int]) -> Text:
    low, high = min(numbers), max(numbers)
    return same(str(low)) if low == high else say("span", low=low, high=high)


def _warnings(summary: Summary) -> list[Text]:
    rows, done = summary.rows, summary.finished_rows

    def named(key: str, names: list[str], **figures: int) -> list[Text]:
        return [say(key, rows=some(names), **figures)] if names else []

    lost = [row["row"] for row in done if not trusted(summary.runs[row["row"]])]
    disturbed = sum(row["disturbed"] for row in done if row["row"] not in lost)
    runs = summary.succeeded_runs
    warnings = [say("warn_quick")] if summary.config["quick"] else []
    warnings += named("warn_unequal", [row["row"] for row in done if row["proof"] == "unequal"])
    warnings += named("warn_proof_failed", [row["row"] for row in done if row["proof"] == "failed"])
    warnings += named("warn_not_run", [row["row"] for row in done if row["proof"] == "not-run"])
    blunt = [name for name, verdict in summary.verdicts.items() if verdict and _is_blunt(verdict)]
    warnings += named("warn_blunt", blunt)
    warnings += named("warn_failed", [row["row"] for row in rows if row["status"] == "failed"])
    warnings += named("warn_stale", [row["row"] for row in rows if row["status"] == "stale"])
    warnings += named("warn_unavailable", [row["row"] for row in rows if row["status"] == "unavailable"])
    warnings += named("warn_only_disturbed", lost)
    warnings += named("warn_apart", summary.apart)
    used = {row["row"]: _hardware(row, summary) for row in done}
    warnings += named("warn_shared", [name for name, asked in used.items() if shares_gpus(asked)])
    if summary.statistics and summary.statistics["unlike_spreads"]:
        warnings.append(say("warn_spreads"))
    if disturbed:
        warnings.append(say("warn_disturbed", n=disturbed, all=len(runs)))
    if mixed := mixed_conditions(runs):
        warnings.append(say("warn_mixed", what=", ".join(mixed)))
    figure = QUALITIES[registry.deciding_quality(summary.config["task"])]
    if not any(ladder.learnt(good_runs(summary.runs[row["row"]]), figure) for row in done):
        warnings.append(say("warn_nothing_learnt"))
    if summary.data["synthetic"]:
        warnings.append(say(f"warn_synthetic{of_images(summary)}"))
    if all(row["device"] == "cpu" for row in done):
        warnings.append(say("warn_cpu"))
    if len(done) > 1 and not summary.config["vary_seed"]:
        warnings.append(say("warn_seed"))
    asked = {name: len(several) for name, several in summary.runs.items()}
    needed = {name: blocks.needed(summary.blocks, name, count) for name, count in asked.items()}
    few = [row["row"] for row in done if row["repeats"] < needed[row["row"]]]
    key = "warn_repeats"
    if few and all(row["repeats"] < blocks.ENOUGH_REPETITIONS for row in done):
        key = "warn_repeats_all"
    elif summary.blocks:
        key = "warn_repeats_contending"
    warnings += named(key, few, enough=blocks.ENOUGH_REPETITIONS)
    if len(precisions := list(dict.fromkeys(row["precision"] for row in done))) > 1:
        warnings.append(say("warn_precision", precisions=", ".join(precisions)))
    if any(row["division"] == "open" for row in done):
        warnings.append(say("warn_open"))
    return warnings


def _is_blunt(verdict: dict) -> bool:
    """Whether a row was proven within limits that are so wide that the milder deliberate mistake would pass, too."""
    return verdict["proof"] in PROVEN and (verdict.get("mistake_of_limit") or math.inf) <= 1


def mixed_conditions(runs: list[dict]) -> list[str]:
    """What differs between runs though it should not: machine, commit, versions, data or initial weights."""
    same = (*SAME, "in_container")
    environments = [
        {name: run["environment"].get(name) for name in same} | run["hashes"] | {"plan": ""} for run in runs
    ]
    mixed = [
        name
        for name in environments[0]
        if not all(alike(name, environment, environments[0]) for environment in environments)
    ]
    first = runs[0]["environment"]
    mixed += sorted({name for run in runs for name in other_versions(run["environment"], first)})
    builds = {(run["environment"].get("image"), run["environment"].get("image_digest")) for run in runs}
    return mixed + ["build of an image"] * (len(builds) > len({image for image, _ in builds}))


def some(names: list[str], most: int = LISTED) -> Text:
    if len(names) <= most + 1:
        return listing(names)
    first = join([same(name) for name in names[:most]], say("comma"))
    return say("some", rows=first, n=len(names) - most)


def of_images(summary: Summary) -> str:
    """The ending of the keys of sentences that have a variant for images."""
    return "_images" if summary.data.get("unit") == "images" else ""
