"""The open division: what each row gains over the closed one, what its cold start costs, and whether it is as good.

The gain is the ratio of warm times for the same texts, block by block: the timed window without steps that stalled, as
to compile something. Quality is macro-F1 on the test split, mIoU for segmentation, or minus the loss of a language
model (the logarithm of its perplexity), compared with the baseline row's in the same repetition, which has the same
seed. A row is as good if a one-sided t test shows that it is not worse by MARGIN or more (a test for non-inferiority:
Walker & Nowacki 2011, doi:10.1007/s11606-010-1513-8), at 5 % for all rows together. The result holds for other seeds,
but not for other texts, because all runs are tested on the same ones. A result that is not shown proves nothing about
quality, and neither does the equality of two models that have both learnt nothing.
"""

import math

import numpy as np
from scipy.special import ndtr, stdtr, stdtrit

from lockstep import stats
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.qualities import QUALITIES, Quality
from lockstep.report.ranking import BASELINE, fitted
from lockstep.report.reading import trusted
from lockstep.run.record import Tested

MARGIN = 0.02  # in macro-F1 and mIoU; for log perplexity this is 2 % of perplexity
SIGNIFICANCE = 0.05
ENOUGH_SEEDS = 5  # repetitions, each with its own seed
POWER, MOST_SEEDS = 0.8, 99


def climb(
    config: Config, rows: list[dict], runs: dict[str, list[Tested]], timed: dict[str, list[Tested]]
) -> dict | None:
    """`rungs` (the levels of the ladder), one for each open row with results; `best`, the fastest one that is as good.

    `best` is None without such a row. None if there is no open row, or no baseline to compare with.
    runs: every row's runs that succeeded; timed: those whose time counts, because they were undisturbed. Disturbed runs
    count for quality.
    """
    baseline = next((row["row"] for row in rows if row["strategy"] == BASELINE and row["division"] == "closed"), None)
    names = [row["row"] for row in rows if row["division"] == "open" and runs[row["row"]]]
    if baseline is None or not runs[baseline] or not names:
        return None
    figure = QUALITIES[registry.deciding_quality(config.task)]
    warm = {
        name: {stats.block(run): _warm(run) / run.work.samples for run in timed[name]}
        for name in [baseline, *names]
        if timed[name]
    }
    fit = stats.Fit({name: seconds for name, seconds in warm.items() if trusted(timed[name])})
    levels, learnt_something = [], learnt(runs[baseline], figure)
    for name in names:
        told = fitted(fit, warm, baseline, name) if {baseline, name} <= warm.keys() else None
        level = _level(config, name, timed[name], timed[baseline], told)
        judged = quality(*_paired(runs[name], runs[baseline], figure))
        empty = not learnt_something and judged["quality"] != "too_few"
        levels.append(level | judged | ({"quality": "untrained"} if empty else {}))
    choose(levels)
    sure = [level for level in levels if level["gain_low"] and level["gain_low"] > 1 and not level["disturbed"]]
    good = [level for level in sure if level["quality"] == "as_good"]
    best = max(good, key=lambda level: level["gain"], default=None)
    return {
        "baseline": baseline,
        "rungs": levels,
        "best": best["row"] if best else None,
        "margin": MARGIN,
        "enough_seeds": ENOUGH_SEEDS,
        "figure": figure.name,
        "figure_of": f"log_{figure.name}" if figure.compared_by else figure.name,
    }


def _level(config: Config, name: str, ours: list[Tested], theirs: list[Tested], gain: stats.Ratio | None) -> dict:
    """A row's gain: `gain` is the baseline's warm time per sample divided by the row's; None if no block tells.

    disturbed: whether all of its runs, or all of the baseline's, were disturbed; then the times are from disturbed
    runs, and the gain is not reliable.
    """
    about = {
        "row": name,
        "changes": _changes(config, name),
        "disturbed": any(all(run.watch.disturbed for run in several) for several in (ours, theirs)),
    }
    if not gain or not gain.n:
        return about | dict.fromkeys(("gain", "gain_low", "gain_high", "cold_seconds", "pays_after")) | {"n": 0}
    cold, base_cold = (float(np.median([_cold(run) for run in several])) for several in (ours, theirs))
    # The seconds that this row saves per step of the baseline.
    step = (
        theirs[0].global_batch
        * float(np.median([_warm(run) / run.work.samples for run in theirs]))
        * (1 - 1 / gain.value)
    )
    return about | {
        "gain": gain.value,
        "gain_low": gain.low if gain.kind else None,
        "gain_high": gain.high if gain.kind else None,
        "n": gain.n,
        "cold_seconds": cold,
        # Rounded first, so that a quotient of 400.0000000001 steps counts as 400.
        "pays_after": max(0, math.ceil(round((cold - base_cold) / step, 6))) if gain.kind and gain.low > 1 else None,
    }


def quality(differences: list[float], seeds: int) -> dict:
    """What a row's paired differences show: `macro_f1_difference`, its one-sided `macro_f1_bound`, and `quality`.

    For other tasks the differences are in mIoU or in minus the loss; the names are kept because users' scripts read
    them.
    """
    paired = np.array(differences)
    mean = float(paired.mean()) if differences else None
    spread = float(paired.std(ddof=1)) if len(paired) > 1 else 0.0
    known = {
        "macro_f1_difference": mean,
        "macro_f1_bound": None,
        "chance": None,
        "seeds": seeds,
        "seeds_needed": None,
    }
    if len(paired) < ENOUGH_SEEDS or seeds < ENOUGH_SEEDS:
        return known | {"quality": "too_few"}
    error = spread / np.sqrt(len(paired))
    half = float(stdtrit(len(paired) - 1, 1 - SIGNIFICANCE) * error)
    judged = "as_good" if mean - half > -MARGIN else "worse" if mean + half < -MARGIN else "not_shown"
    above = mean + MARGIN
    return known | {
        "macro_f1_bound": mean - half,
        "chance": float(stdtr(len(paired) - 1, -above / error)) if error else float(above <= 0),
        "quality": judged,
        "seeds_needed": seeds_needed(spread) if judged == "not_shown" else None,
    }


def seeds_needed(spread: float) -> int | None:
    """The number of seeds with which an equally good row is shown as good with probability POWER.

    None above MOST_SEEDS. spread: the standard deviation of the paired differences. The power is computed by the normal
    distribution, at Student's quantile.
    """
    for seeds in range(ENOUGH_SEEDS, MOST_SEEDS + 1):
        reach = MARGIN * np.sqrt(seeds) / spread if spread else np.inf
        if ndtr(reach - stdtrit(seeds - 1, 1 - SIGNIFICANCE)) >= POWER:
            return seeds
    return None


def choose(levels: list[dict]) -> None:
    """Correct `quality` for testing several rows, by Holm's method (1979, Scand. J. Statist. 6: 65)."""
    tested = sorted((level for level in levels if level["chance"] is not None), key=lambda level: level["chance"])
    shown = True
    for position, level in enumerate(tested):
        shown = shown and level["chance"] <= SIGNIFICANCE / (len(tested) - position)
        if level["quality"] == "as_good" and not shown:
            level["quality"] = "not_shown"


def _paired(ours: list[Tested], theirs: list[Tested], figure: Quality) -> tuple[list[float], int]:
    """A row's quality minus the baseline's in each repetition that both have, and the number of different seeds."""
    bases = {run.repeat: figure.score(run.test) for run in theirs}
    both = [run for run in ours if run.repeat in bases]
    differences = [figure.score(run.test) - bases[run.repeat] for run in both]
    return differences, len({run.asked["train"]["seed"] for run in both})


def learnt(runs: list[Tested], figure: Quality) -> bool:
    """Whether a row's models have learnt anything, by their median.

    They have if their macro-F1 or mIoU exceeds, by more than MARGIN, that of always naming the most frequent label, or
    if their perplexity is below a 3-gram model's.
    """
    if not figure.of_nothing:
        return True
    margin = 0 if figure.compared_by else MARGIN
    return float(np.median([figure.score(run.test) for run in runs])) > figure.of_nothing(runs[0].test) + margin


def _warm(run: Tested) -> float:
    return run.clock.train_seconds - run.clock.stall_seconds


def _cold(run: Tested) -> float:
    """The seconds of a run's set-up and stalls, which steps no longer need once they are warm."""
    clock = run.clock
    return sum(clock.setup.values()) + clock.stall_seconds


def _changes(config: Config, name: str) -> str:
    """The settings in which the row differs from the configuration's own, in a line."""
    asked, baseline = config.source["rows"][name], {"processes": 1} | config.source["train"]
    changed = {key: value for key, value in asked.items() if key != "strategy" and (key, value) not in baseline.items()}
    return ", ".join(f"{key}: {_word(value)}" for key, value in changed.items()) or asked["strategy"]


def _word(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
