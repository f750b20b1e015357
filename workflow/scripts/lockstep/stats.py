"""Medians, and ratios between rows with their uncertainty, from runs in blocks.

A block contains every row once, so drift of the machine affects all rows of a block alike. Effects on time are
multiplicative, so the model uses logarithms: the log time of a run is the effect of its row, plus the effect of its
block, plus an error (randomised complete block design; Montgomery 2017, Design and Analysis of Experiments, chapter 4).
One standard deviation of errors is estimated from all runs, so that a row with a missing run still has a useful
interval. Every ratio in the report has its interval from this model. `Fit` compares rows that blocks connect, within
blocks; `unpaired_ratio` compares two results folders, which have no block in common.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
FEW = 3  # so few values have no meaningful quartiles
UNLIKE = 4  # if standard deviations of rows differ by more than this factor, one estimate does not fit all


Block = tuple[int, str | None]


def block(run) -> Block:
    """The block of a run, given its record (run/record.py): the runs of the same repetition in the same session.

    A run that is repeated hours later meets different conditions, which would favour or harm its row.
    """
    return run.repeat, run.session


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of n values; for three values or fewer, minimum and maximum instead of quartiles."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """The ratio of two rows' times, with an interval.

    kind: "interval" for a 95 % interval, "" if there are too few runs for one.
    n: the number of blocks that contain both rows.
    """

    value: float
    low: float
    high: float
    n: int
    kind: str

    @property
    def distinct(self) -> bool:
        """Whether the interval excludes 1, so that the two rows' times differ by more than chance."""
        return bool(self.kind) and not self.low <= 1 <= self.high


def spread(values: list[float]) -> Spread:
    at = [0.25, 0.5, 0.75] if len(values) > FEW else [0, 0.5, 1]
    low, median, high = np.quantile(values, at).tolist()
    return Spread(median, low, high, len(values))


class Fit:
    """The model log time = row + block + error, fitted by least squares to the seconds of each row by block.

    sigma: the standard deviation of the errors, of logarithms (0.03 is 3 %); None without degrees of freedom.
    freedom: the degrees of freedom of sigma: the number of runs minus the fitted parameters.
    """

    def __init__(self, seconds: dict[str, dict[Block, float]]):
        self.seconds, self.rows = seconds, list(seconds)
        blocks = list(dict.fromkeys(block for times in seconds.values() for block in times))
        runs = [(row, block) for row in self.rows for block in seconds[row]]
        design = np.zeros((len(runs), len(self.rows) + len(blocks)))
        for line, (row, block) in enumerate(runs):
            design[line, self.rows.index(row)] = 1
            design[line, len(self.rows) + blocks.index(block)] = 1
        logarithms = np.log([seconds[row][block] for row, block in runs])
        # Only differences of row effects are estimable, not the effects themselves; the pseudo-inverse gives those.
        self.inverse = np.linalg.pinv(design.T @ design)
        self.effects = self.inverse @ design.T @ logarithms
        self.residuals = logarithms - design @ self.effects
        self.estimable = self.inverse @ (design.T @ design)
        self.freedom = len(runs) - int(np.linalg.matrix_rank(design))
        self.sigma = float(np.sqrt(self.residuals @ self.residuals / self.freedom)) if self.freedom else None
        self.row_of = [row for row, _ in runs]

    def difference(self, ours: str, theirs: str) -> tuple[float, float] | None:
        """Our log time minus theirs, and its standard error divided by sigma; None if no blocks connect the rows."""
        contrast = np.zeros(len(self.effects))
        contrast[self.rows.index(ours)] += 1
        contrast[self.rows.index(theirs)] -= 1
        if not np.allclose(contrast @ self.estimable, contrast, atol=1e-6):
            return None  # no chain of blocks connects the two rows
        return float(contrast @ self.effects), float(np.sqrt(max(0.0, contrast @ self.inverse @ contrast)))

    def groups(self) -> list[list[str]]:
        """Groups of rows that blocks connect, so that they can be compared; usually there is one group."""
        groups: list[list[str]] = []
        for row in self.rows:
            group = next((group for group in groups if self.difference(row, group[0])), None)
            if group:
                group.append(row)
            else:
                groups.append([row])
        return groups

    def ratio(self, ours: str, theirs: str, confidence: float = CONFIDENCE) -> Ratio | None:
        """The ratio of our seconds to theirs, with Student's t interval; None if no blocks connect the rows."""
        difference = self.difference(ours, theirs)
        if difference is None:
            return None
        logarithm, error = difference
        n = len(self.seconds[ours].keys() & self.seconds[theirs].keys())
        value = float(np.exp(logarithm))
        if self.sigma is None:
            return Ratio(value, value, value, n, "")
        half = stdtrit(self.freedom, (1 + confidence) / 2) * error * self.sigma
        return Ratio(value, *np.exp(logarithm + np.array([-half, half])).tolist(), n, "interval")

    def shown_faster(self, ours: str, theirs: str, chance: float = 1 - CONFIDENCE) -> bool:
        """Whether our row is significantly faster; at most a share `chance` of reports has a false claim for any pair.

        This is Tukey's honestly significant difference, with Kramer's standard errors for unequal numbers of runs
        (Tukey 1953; Kramer 1956, Biometrics 12: 307).
        """
        difference = self.difference(ours, theirs)
        if difference is None or self.sigma is None:
            return False
        logarithm, error = difference
        return -logarithm > _studentized_range(len(self.rows), self.freedom, chance) / 2**0.5 * error * self.sigma

    def resolution(self) -> float | None:
        """By which share a row must be slower than another to be shown slower, for the median pair of rows."""
        pairs = [self.difference(a, b) for a, b in itertools.combinations(self.rows, 2)]
        errors = [pair[1] for pair in pairs if pair]
        if not errors or self.sigma is None:
            return None
        half = (
            _studentized_range(len(self.rows), self.freedom, 1 - CONFIDENCE)
            / 2**0.5
            * float(np.median(errors))
            * self.sigma
        )
        return float(np.expm1(half))

    def ranks(self) -> dict[str, int]:
        """Each row's place: one more than the number of rows shown to be faster, and never better than a faster row's.

        Rows are ordered by their medians if every row has a run in every block, otherwise by their fitted times.
        """
        rank_of = {row: 1 + sum(self.shown_faster(other, row) for other in self.rows) for row in self.rows}
        if len({frozenset(times) for times in self.seconds.values()}) == 1:
            time = {row: float(np.median(list(self.seconds[row].values()))) for row in self.rows}
        else:
            time = dict(zip(self.rows, self.effects, strict=False))
        return {row: max(rank_of[other] for other in self.rows if time[other] <= time[row]) for row in self.rows}

    def unlike_spreads(self) -> bool:
        """Whether the standard deviations of rows differ by a factor of four and by more than chance.

        A single sigma then describes none of them. The test is Levene's in the form of Brown and Forsythe, which is
        robust to heavy tails.
        """
        each = [
            np.array([r for r, of in zip(self.residuals, self.row_of, strict=True) if of == row]) for row in self.rows
        ]
        each = [residuals for residuals in each if len(residuals) > 2]
        deviations = [residuals.std(ddof=1) for residuals in each]
        if len(each) < 2 or max(deviations) <= UNLIKE * min(deviations):
            return False
        from scipy.stats import levene

        return bool(levene(*each).pvalue < 1 - CONFIDENCE)


def ratio(ours: dict[Block, float], theirs: dict[Block, float], confidence: float = CONFIDENCE) -> Ratio | None:
    """The ratio of our seconds to theirs, by block, from these two rows alone (paired t test); None without a pair."""
    return Fit({"ours": ours, "theirs": theirs}).ratio("ours", "theirs", confidence) if ours and theirs else None


Times = dict[str, dict[Block, float]]  # seconds of each row, by block


def unpaired_ratio(ours: Times, theirs: Times, row: str, confidence: float = CONFIDENCE) -> Ratio:
    """The ratio of our seconds to theirs for one `row`, if no block has runs of both sides.

    This compares two sessions or two machines. The model is Fit's, with one standard deviation for all runs of both
    sides. But block effects do not cancel here, so a run's variance is the sum of those of its block and its error: the
    variance within rows. Rows in the same blocks are correlated, and together have fewer degrees of freedom than
    independent rows. For R rows with pairwise correlation `rho`, the pooled variance has freedom / (1 + (R - 1) rho^2)
    degrees of freedom (Satterthwaite's approximation, 1946, Biometrics Bulletin 2: 110).
    """
    sides = (ours, theirs)
    value = float(np.exp(np.log(list(ours[row].values())).mean() - np.log(list(theirs[row].values())).mean()))
    counts = [len(side[row]) for side in sides]
    logarithms = [np.log(list(times.values())) for side in sides for times in side.values()]
    freedom = sum(len(each) - 1 for each in logarithms)
    if not all(any(len(times) > 1 for times in side.values()) for side in sides):
        return Ratio(value, value, value, min(counts), "")
    variance = sum(float(((each - each.mean()) ** 2).sum()) for each in logarithms) / freedom
    several = max(sum(len(times) > 1 for times in side.values()) for side in sides)
    freedom /= 1 + (several - 1) * _shared(sides, variance) ** 2
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * (variance * sum(1 / count for count in counts)) ** 0.5
    return Ratio(value, value * float(np.exp(-half)), value * float(np.exp(half)), min(counts), "interval")


def _shared(sides: tuple[Times, ...], variance: float) -> float:
    """The share of the `variance` within rows that the runs of a block have in common; 1 if it is unknown."""
    fits = [Fit(side) for side in sides if side]
    freedom = sum(fit.freedom for fit in fits)
    if not freedom or not variance:
        return 1.0
    errors = sum(float(fit.residuals @ fit.residuals) for fit in fits) / freedom
    return min(1.0, max(0.0, 1 - errors / variance))


@dataclass(frozen=True)
class Variance:
    """The components of the variance between runs of a row, as standard deviations of logarithms (0.03 is 3 %).

    launch: between launches, the same for all steps of a run.
    step: between steps with the same work; it averages out over many steps.
    """

    launch: float
    step: float

    def best_steps(self, startup: float, step: float) -> float:
        """The number of steps per run that gives the most precision for the total time; inf: as many as possible.

        startup, step: the seconds of a run before its window, and of each step (Kalibera & Jones 2013, Rigorous
        Benchmarking in Reasonable Time, equation 3).
        """
        return float(np.sqrt(startup / step) * self.step / self.launch) if self.launch else np.inf


def variance(rows: list[np.ndarray]) -> Variance | None:
    """The variance between launches and within them, pooled over rows; None if no row has two runs of several steps.

    rows: seconds [runs, steps] of each row's runs; step s does the same work in each. Log seconds are the effect of the
    step, plus that of the run, plus an error (variance components of a two-way layout; Montgomery 2017, section 13.2).
    Errors that last for several steps count partly as the launch's.
    """
    between = within = 0.0
    launches = errors = 0
    for seconds in rows:
        runs, steps = seconds.shape
        if runs < 2 or steps < 2:
            continue
        logarithms = np.log(seconds)
        of_runs = logarithms.mean(axis=1, keepdims=True)
        residuals = logarithms - of_runs - logarithms.mean(axis=0) + logarithms.mean()
        freedom = (runs - 1) * (steps - 1)
        within += float((residuals**2).sum())
        errors += freedom
        # The variance of the runs' means is that of launches, plus that of the mean of the steps' errors.
        between += float(of_runs.var(ddof=1)) * (runs - 1) - float((residuals**2).sum()) / freedom / steps * (runs - 1)
        launches += runs - 1
    if not launches:
        return None
    return Variance(launch=max(0.0, between / launches) ** 0.5, step=(within / errors) ** 0.5)


@cache
def _studentized_range(rows: int, freedom: int, chance: float) -> float:
    """The quantile of the studentised range of `rows` normal variables that only a share `chance` exceeds."""
    from scipy.stats import studentized_range  # this import takes half a second

    return float(studentized_range.ppf(1 - chance, max(2, rows), freedom))
