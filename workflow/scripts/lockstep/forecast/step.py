"""A row's step time by the size of its batch, from the steps that were measured, and what follows for other batches.

Steps of one run have batches of different widths. So a straight line through their times, seconds = fixed + each *
tokens, tells what a step costs whatever its batch, and what each token costs. Where two rows' lines cross, the faster
row changes.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import theilslopes

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.errors import BadInput
from lockstep.frames import Results
from lockstep.report.reading import good_runs, step_seconds
from lockstep.run.progress import WARMUP_STEPS

DRAWS, CONFIDENCE, SEED = 1000, 0.95, 0
FEWEST_STEPS, FEWEST_SIZES = 20, 4  # below which there is no line; sizes are numbers of tokens


@dataclass(frozen=True)
class Estimate:
    """A number and its interval, from a bootstrap over steps (Efron 1979)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """seconds = fixed + each * tokens of a step. draws: the same two for resampled steps, [draws, 2]."""

    fixed: float
    each: float
    draws: np.ndarray
    tokens: tuple[int, int]  # the smallest and the largest number of tokens that was measured
    mean: float  # tokens of a step of the whole plan
    steps: int

    def at(self, tokens: float) -> Estimate:
        """The seconds of a step with this number of tokens."""
        return _estimate(self.fixed + self.each * tokens, self.draws @ [1, tokens])


def line(results: Results, row: str) -> Line:
    """The line through the medians of a row's steps over its undisturbed runs. Raises BadInput if there is none."""
    runs = good_runs(results.report["runs"].get(row, ()))
    if not runs:
        raise BadInput(f"{row}: no run of it has succeeded in {results.folder}.")
    asked = runs[0].asked
    plan = Plan.load(paths.require(paths.plan_file(results.folder, asked["plan"]), "plan.py"))
    planned = plan.widths * np.diff(plan.starts)
    tokens = planned[WARMUP_STEPS:]
    folder = results.folder / paths.RUNS / paths.run_name(row, runs[0].world_size, 1)
    same = [run for run in runs if run.asked["plan"] == asked["plan"]]  # with vary_seed each has another one
    files = [folder.with_name(f"rep{run.repeat}") / paths.STEPS for run in same]
    seconds = [each for each in map(step_seconds, files) if len(each) == len(tokens)]
    if not seconds:
        raise BadInput(f"{row}: its runs' steps are not in {results.folder}.")
    # The first steps are no part of the line, but of what a batch has in the mean: a plan may begin with its widest.
    return replace(fit(tokens, np.median(seconds, axis=0)), mean=float(np.mean(planned)))


def fit(tokens: np.ndarray, seconds: np.ndarray) -> Line:
    """The line whose slope is the median over all pairs of steps (Theil 1950, Sen 1968), which is robust to outliers.

    A step costs nothing less than zero, whatever its batch, and neither does a token. Raises BadInput if there are too
    few steps, or too few sizes.
    """
    if len(tokens) < FEWEST_STEPS:
        raise BadInput(f"{len(tokens)} steps were measured; at least {FEWEST_STEPS} are needed. Raise train.max_steps.")
    if len(np.unique(tokens)) < FEWEST_SIZES:
        raise BadInput(
            "all steps have batches of the same few sizes, so their times say nothing about others. Measure with"
            " train.batching: bucketed or plain."
        )
    resampled = np.random.default_rng(SEED).integers(len(tokens), size=(DRAWS, len(tokens)))
    draws = np.array([_theil_sen(tokens[chosen], seconds[chosen]) for chosen in resampled])
    fixed, each = _theil_sen(tokens, seconds)
    sizes = int(tokens.min()), int(tokens.max())
    return Line(fixed, each, draws, sizes, float(np.mean(tokens)), len(tokens))


def _theil_sen(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    if tokens.min() == tokens.max():  # of a draw, by chance
        return float(np.median(seconds)), 0.0
    with np.errstate(invalid="ignore"):  # in its own interval, which is not used
        each = max(0.0, float(theilslopes(seconds, tokens).slope))
    return max(0.0, float(np.median(seconds - each * tokens))), each


def times_as_fast(row: Line, against: Line, tokens: float) -> Estimate:
    """How many times as fast as `against` a row trains a step with this number of tokens."""
    size = [1, tokens]
    return _estimate(against.at(tokens).value / row.at(tokens).value, (against.draws @ size) / (row.draws @ size))


def break_even(row: Line, against: Line) -> Estimate | None:
    """The number of tokens in a step from which on a row is faster than `against`, by these lines; None if it never is.

    It is 0 if the row always is. The upper end of the interval is infinite if the row may never be. If a row is faster
    in small steps only, there is no such number.
    """
    value = _crossing(row.fixed - against.fixed, against.each - row.each)
    draws = _crossing(row.draws[:, 0] - against.draws[:, 0], against.draws[:, 1] - row.draws[:, 1])
    estimate = _estimate(float(value), draws)
    return None if np.isinf(estimate.value) else estimate


def _crossing(more, less):
    """From where on a line that begins `more` higher, and rises `less` steeply, is the lower one: 0 at least."""
    more, less = np.asarray(more, float), np.asarray(less, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(less > 0, np.maximum(more / less, 0), np.where((less == 0) & (more < 0), 0, np.inf))


def _estimate(value: float, draws: np.ndarray) -> Estimate:
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return Estimate(float(value), float(low), float(high))
