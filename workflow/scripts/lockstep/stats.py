"""Medians, and ratios between rows with their uncertainty, from runs in blocks.

A block holds every row once, so what a machine's drift does to one row's time it does to its neighbours' as well. Time
multiplies, so the model is of logarithms: the log time of a run is a row's effect, plus a block's, plus an error (the
randomised complete block design; Montgomery 2017, Design and Analysis of Experiments, chapter 4). One spread of the
errors is estimated from all runs: a row that lost a run is known less well than the others, but not as badly as two
runs alone would tell. Every ratio of the report has its interval from this model: of rows that blocks connect by
`Fit`, which compares within blocks; of two results folders, which have no block in common, by `apart`.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
FEW = 3  # values that have no quartiles
UNLIKE = 4  # times: rows' own spreads that differ by more are not one spread


Block = tuple[int, str | None]


def block(run: dict) -> Block:
    """Which runs a run (its record) is paired with: those of its repetition that the same session made.

    One that is repeated hours later meets another machine, in a way, and its row would gain or lose by that.
    """
    return run["repeat"], run.get("session")


@dataclass(frozen=True)
class Spread:
    """The median of n values between their quartiles; of three values or fewer, between the least and the greatest."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """One row's time over another's, and an interval around it.

    kind: "interval" for a 95 % interval, "" where the runs do not tell how much they vary.
    n: the blocks that hold both.
    """

    value: float
    low: float
    high: float
    n: int
    kind: str

    @property
    def distinct(self) -> bool:
        """Whether the two rows' times differ by more than chance, as far as these runs can tell."""
        return bool(self.kind) and not self.low <= 1 <= self.high


def spread(values: list[float]) -> Spread:
    shares = [0.25, 0.5, 0.75] if len(values) > FEW else [0, 0.5, 1]
    low, median, high = np.quantile(values, shares).tolist()
    return Spread(median, low, high, len(values))


class Fit:
    """Log time = row + block + error, fitted by least squares to the seconds of each row by block.

    sigma: the errors' standard deviation, of logarithms (so .03 is 3 %); None without degrees of freedom.
    freedom: degrees of freedom of sigma: runs less what was fitted.
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
        # Row effects alone can't be told from the blocks'; their differences can, and the pseudo-inverse has those.
        self.inverse = np.linalg.pinv(design.T @ design)
        self.effects = self.inverse @ design.T @ logarithms
        self.residuals = logarithms - design @ self.effects
        self.estimable = self.inverse @ (design.T @ design)
        self.freedom = len(runs) - int(np.linalg.matrix_rank(design))
        self.sigma = float(np.sqrt(self.residuals @ self.residuals / self.freedom)) if self.freedom else None
        self.row_of = [row for row, _ in runs]

    def difference(self, ours: str, theirs: str) -> tuple[float, float] | None:
        """Our log time less theirs, and that difference's standard error over sigma; None where no blocks tell."""
        contrast = np.zeros(len(self.effects))
        contrast[self.rows.index(ours)] += 1
        contrast[self.rows.index(theirs)] -= 1
        if not np.allclose(contrast @ self.estimable, contrast, atol=1e-6):
            return None  # no chain of blocks leads from one row to the other
        return float(contrast @ self.effects), float(np.sqrt(max(0.0, contrast @ self.inverse @ contrast)))

    def groups(self) -> list[list[str]]:
        """The rows that blocks connect with each other, and so can be compared; most often all are one group."""
        groups: list[list[str]] = []
        for row in self.rows:
            group = next((group for group in groups if self.difference(row, group[0])), None)
            if group:
                group.append(row)
            else:
                groups.append([row])
        return groups

    def ratio(self, ours: str, theirs: str) -> Ratio | None:
        """Our seconds over theirs, with Student's t interval; None where no blocks tell."""
        difference = self.difference(ours, theirs)
        if difference is None:
            return None
        logarithm, error = difference
        n = len(self.seconds[ours].keys() & self.seconds[theirs].keys())
        value = float(np.exp(logarithm))
        if self.sigma is None:
            return Ratio(value, value, value, n, "")
        half = stdtrit(self.freedom, (1 + CONFIDENCE) / 2) * error * self.sigma
        return Ratio(value, *np.exp(logarithm + np.array([-half, half])).tolist(), n, "interval")

    def shown_faster(self, ours: str, theirs: str, chance: float = 1 - CONFIDENCE) -> bool:
        """Whether ours is shown to be faster, with a false claim about any pair of rows in `chance` of reports at most.

        Tukey's honestly significant difference, with Kramer's standard errors where rows have unlike numbers of runs
        (Tukey 1953; Kramer 1956, Biometrics 12: 307).
        """
        difference = self.difference(ours, theirs)
        if difference is None or self.sigma is None:
            return False
        logarithm, error = difference
        return -logarithm > _studentized_range(len(self.rows), self.freedom, chance) / 2**0.5 * error * self.sigma

    def resolution(self) -> float | None:
        """How much longer a row must take than another to be shown slower, as a share: that of the median pair."""
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
        """Each row's place: one more than the rows that are shown faster, and no better than a faster row's.

        Faster is, where every row has a run in every block, whose median is shorter; else whose fitted time is.
        """
        rank_of = {row: 1 + sum(self.shown_faster(other, row) for other in self.rows) for row in self.rows}
        if len({frozenset(times) for times in self.seconds.values()}) == 1:
            time = {row: float(np.median(list(self.seconds[row].values()))) for row in self.rows}
        else:
            time = dict(zip(self.rows, self.effects, strict=False))
        return {row: max(rank_of[other] for other in self.rows if time[other] <= time[row]) for row in self.rows}

    def unlike_spreads(self) -> bool:
        """Whether rows' own spreads differ fourfold and by more than chance, so that one spread stands for none.

        By Levene's test in Brown and Forsythe's form, which forgives heavy tails.
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


def ratio(ours: dict[Block, float], theirs: dict[Block, float]) -> Ratio | None:
    """Our seconds over theirs, each by block, from these two alone: a paired t test. None without a block of both."""
    return Fit({"ours": ours, "theirs": theirs}).ratio("ours", "theirs") if ours and theirs else None


Times = dict[str, dict[Block, float]]  # seconds of each row, by block


def apart(ours: Times, theirs: Times, row: str, confidence: float = CONFIDENCE) -> Ratio:
    """Our seconds over theirs of one `row`, where no block holds runs of both, as of two sessions or two machines.

    The model is Fit's, with one spread for all runs of both sides. But here nothing takes the blocks out of the
    difference, so a run's variance is that of its block and of its error: the variance within rows. Rows that ran in
    the same blocks moved together, and tell less of it than as many that did not: for R rows of which each two share
    `rho` of their variance, the pooled variance has freedom / (1 + (R - 1) rho^2) degrees of freedom, which is
    Satterthwaite's approximation (1946, Biometrics Bulletin 2: 110).
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
    """Which share of the `variance` within rows the runs of a block have in common; 1 where nothing tells."""
    fits = [Fit(side) for side in sides if side]
    freedom = sum(fit.freedom for fit in fits)
    if not freedom or not variance:
        return 1.0
    errors = sum(float(fit.residuals @ fit.residuals) for fit in fits) / freedom
    return min(1.0, max(0.0, 1 - errors / variance))


@dataclass(frozen=True)
class Variance:
    """Why runs of one row take unlike times. Both are standard deviations of logarithms, so .03 is 3 %.

    launch: from one launch to another, the same for all steps of a run.
    step: from step to step, around what its work takes; over a window it averages out.
    """

    launch: float
    step: float

    def best_steps(self, startup: float, step: float) -> float:
        """How many steps a run should have, so that what all runs take together tells most; inf: as many as can be.

        startup, step: the seconds that a run takes before its window, and for each step in it (Kalibera & Jones 2013,
        Rigorous Benchmarking in Reasonable Time, equation 3).
        """
        return float(np.sqrt(startup / step) * self.step / self.launch) if self.launch else np.inf


def variance(rows: list[np.ndarray]) -> Variance | None:
    """The variance between launches and within, pooled over rows; None where no row has two runs of several steps.

    rows: seconds [runs, steps] of each row's runs, in which step s does the same work. Log seconds are a step's effect
    plus a run's, plus an error (variance components of a two-way layout; Montgomery 2017, section 13.2). Errors that
    last for several steps count partly as the launch's.
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
        # The means of runs vary by their launches, and by what is left of the steps' errors.
        between += float(of_runs.var(ddof=1)) * (runs - 1) - float((residuals**2).sum()) / freedom / steps * (runs - 1)
        launches += runs - 1
    if not launches:
        return None
    return Variance(launch=max(0.0, between / launches) ** 0.5, step=(within / errors) ** 0.5)


@cache
def _studentized_range(rows: int, freedom: int, chance: float) -> float:
    """The range of as many independent normals over their pooled spread that only `chance` of experiments exceed."""
    from scipy.stats import studentized_range  # takes half a second to import

    return float(studentized_range.ppf(1 - chance, max(2, rows), freedom))
