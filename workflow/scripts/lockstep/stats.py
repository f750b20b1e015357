"""Medians, and ratios between rows with their uncertainty, from runs that are paired by block.

A block holds every row once, so what a machine's drift does to one row's time it does to its neighbours' as well: rows
are compared block by block, and only those ratios are summarised.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
ENOUGH = 5  # ratios, from which on a bootstrap has something to draw from
RESAMPLES, SEED = 9999, 0


@dataclass(frozen=True)
class Spread:
    median: float
    low: float  # lower quartile
    high: float  # upper quartile
    n: int


@dataclass(frozen=True)
class Ratio:
    """One row's time over another's: the median over blocks, and an interval around it.

    kind: "interval" for a 95 % interval, "" where one ratio is all there is.
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
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return Spread(median, low, high, len(values))


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> Ratio | None:
    """Our seconds over theirs, each by block; None where no block has both.

    The interval is a percentile bootstrap over blocks (Efron & Tibshirani 1993, An Introduction to the Bootstrap,
    chapter 13), of the median of the paired ratios' logarithms, so that it is the same seen from the other row. Fewer
    than five blocks leave a bootstrap no more than their range, which misses the truth in one case of four at three
    blocks: there it is Student's t interval of the logarithms, wide as it must be.
    """
    blocks = sorted(ours.keys() & theirs.keys())
    if not blocks:
        return None
    logarithms = np.log([ours[block] / theirs[block] for block in blocks])
    value, n = float(np.exp(np.median(logarithms))), len(blocks)
    if n == 1:
        return Ratio(value, value, value, 1, "")
    if n < ENOUGH or np.ptp(logarithms) == 0:
        half = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * logarithms.std(ddof=1) / np.sqrt(n)
        return Ratio(value, *np.exp(logarithms.mean() + np.array([-half, half])).tolist(), n, "interval")
    from scipy.stats import bootstrap  # takes half a second to import

    found = bootstrap(
        (logarithms,), np.median, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=SEED
    ).confidence_interval
    return Ratio(value, float(np.exp(found.low)), float(np.exp(found.high)), n, "interval")


def ranks(seconds: dict[str, dict[int, float]]) -> dict[str, int]:
    """Each row's place, from its seconds by block: one more than the rows that are faster by more than chance.

    So of two rows that can't be told apart, one may have a later place: where a third is faster than that one only.
    """
    return {
        name: 1
        + sum(
            other != name and (found := ratio(seconds[other], mine)) is not None and found.value < 1 and found.distinct
            for other in seconds
        )
        for name, mine in seconds.items()
    }
