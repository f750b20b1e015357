"""The open division: what each row gains over the closed one, what its cold start costs, and whether it is as good.

Gain is warm time for the same texts, block by block: the timed window without steps that stalled to compile something.
Quality is macro-F1 on the test split, held against the base row's of the same repetition, which has the same seed. As
good is a row of which it is shown, by a one-sided t test at 5 %, that it is not worse by MARGIN or more (a test for
non-inferiority: Walker & Nowacki 2011, doi:10.1007/s11606-010-1513-8). That nothing was shown is no proof of quality,
nor is it one that two models are alike which have both learnt nothing.
"""

import math

import numpy as np
from scipy.special import stdtrit

from lockstep import stats
from lockstep.config import Config

BASE = "single"  # the strategy of the row that all others are held against
MARGIN = 0.02  # of macro-F1
LEVEL = 0.05
ENOUGH = 5  # repetitions, each with a seed of its own


def climb(config: Config, rows: list[dict], runs: dict[str, list[dict]], timed: dict[str, list[dict]]) -> dict | None:
    """`rungs`, one for each open row that has results; `best`, the fastest of them that is as good (or None).

    None where there is no open row, or nothing to hold it against. runs: every row's runs that succeeded; timed: those
    of them whose time counts, as nothing disturbed them, which does no harm to quality.
    """
    base = next((row["row"] for row in rows if row["strategy"] == BASE and row["division"] == "closed"), None)
    names = [row["row"] for row in rows if row["division"] == "open" and runs[row["row"]]]
    if base is None or not runs[base] or not names:
        return None
    rungs, learnt = [], _learnt(runs[base])
    for name in names:
        if rung := _rung(config, name, timed[name], timed[base]):
            judged = quality(*_paired(runs[name], runs[base]))
            empty = not learnt and judged["quality"] != "too_few"
            rungs.append(rung | judged | ({"quality": "untrained"} if empty else {}))
    good = [rung for rung in rungs if rung["quality"] == "as_good" and rung["gain_low"] and rung["gain_low"] > 1]
    best = max(good, key=lambda rung: rung["gain"], default=None)
    return {"base": base, "rungs": rungs, "best": best["row"] if best else None, "margin": MARGIN}


def _rung(config: Config, name: str, ours: list[dict], theirs: list[dict]) -> dict | None:
    warm = [{stats.block(run): _warm(run) / run["work"]["samples"] for run in several} for several in (theirs, ours)]
    if not (gain := stats.ratio(*warm)):
        return None
    cold, base_cold = (float(np.median([_cold(run) for run in several])) for several in (ours, theirs))
    # Of the base's steps: so many fewer seconds each takes in this row.
    step = theirs[0]["global_batch"] * float(np.median(list(warm[0].values()))) * (1 - 1 / gain.value)
    return {
        "row": name,
        "changes": _changes(config, name),
        "gain": gain.value,
        "gain_low": gain.low if gain.kind else None,
        "gain_high": gain.high if gain.kind else None,
        "n": gain.n,
        "cold_seconds": cold,
        # Rounded first: a quotient of 400.0000000001 steps is one of 400.
        "pays_after": max(0, math.ceil(round((cold - base_cold) / step, 6))) if gain.kind and gain.low > 1 else None,
    }


def quality(differences: list[float], seeds: int) -> dict:
    """`macro_f1_difference`, its one-sided `macro_f1_bound`, and the verdict on a row's paired differences."""
    found = np.array(differences)
    verdict = {"macro_f1_difference": float(found.mean()), "macro_f1_bound": None}
    if len(found) < ENOUGH or seeds < ENOUGH:
        return verdict | {"quality": "too_few"}
    half = float(stdtrit(len(found) - 1, 1 - LEVEL) * found.std(ddof=1) / np.sqrt(len(found)))
    low, high = found.mean() - half, found.mean() + half
    return verdict | {
        "macro_f1_bound": float(low),
        "quality": "as_good" if low > -MARGIN else "worse" if high < -MARGIN else "not_shown",
    }


def _paired(ours: list[dict], theirs: list[dict]) -> tuple[list[float], int]:
    """What a row's macro-F1 is above the base's in each repetition that both have, and over how many seeds that is."""
    bases = {run["repeat"]: run["test"]["macro_f1"] for run in theirs}
    both = [run for run in ours if run["repeat"] in bases]
    differences = [run["test"]["macro_f1"] - bases[run["repeat"]] for run in both]
    return differences, len({run["asked"]["train"]["seed"] for run in both})


def _learnt(runs: list[dict]) -> bool:
    """Whether macro-F1 is above what a model has that always names the most frequent label, by more than MARGIN."""
    truths = np.array(runs[0]["test"]["confusion_matrix"]).sum(axis=1)
    most = truths.max() / truths.sum()
    guessed = 2 * most / (1 + most) / len(truths)
    return float(np.median([run["test"]["macro_f1"] for run in runs])) > guessed + MARGIN


def _warm(run: dict) -> float:
    return run["clock"]["train_seconds"] - run["clock"]["stall_seconds"]


def _cold(run: dict) -> float:
    """Seconds from the launch that no step needs once it is warm."""
    clock = run["clock"]
    return sum(clock["setup"].values()) + clock["stall_seconds"]


def _changes(config: Config, name: str) -> str:
    """What the row asks for that the configuration's own rows do not."""
    asked, base = config.source["rows"][name], {"processes": 1} | config.source["train"]
    changed = {key: value for key, value in asked.items() if key != "strategy" and (key, value) not in base.items()}
    return ", ".join(f"{key}: {_word(value)}" for key, value in changed.items()) or asked["strategy"]


def _word(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
