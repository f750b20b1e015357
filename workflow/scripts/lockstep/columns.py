"""The columns of the report's table, each declared once for everything that shows or checks it.

summary.csv and summary.json have all columns, those of the configuration first. The page, the terminal and the LaTeX
table have the columns that are shown there, in this order; runs.csv has those that a single run measures. A column's
heading is the text of its key in workflow/report/words.yaml, and its explanation the text of `about_` and its key. So a
new column is an entry here and two texts; a figure of a model's quality is an entry in config/qualities.py instead.
Users script against the keys: add freely, never rename.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep import stats
from lockstep.config.hardware import device_count
from lockstep.config.qualities import QUALITIES, Quality
from lockstep.config.row import Row
from lockstep.model import metrics
from lockstep.run.progress import WARMUP_STEPS
from lockstep.run.record import Tested

AT_ONCE, ON_DEMAND = "at once", "on demand"  # where the page shows a column; LaTeX has what it shows at once


@dataclass(frozen=True)
class Column:
    """One column of the table.

    A row's value comes from one of four sources. `asked`: the configuration. `ran`: the first run that counts.
    `measure`: the median over all runs of a measured value. None of these: the report computes it
    from all runs (report/summary.py), times and places in report/ranking.py and report/scaling.py.

    A run here is a Tested (run/record.py). A value is None if a device does not report it.

    digits: after the decimal point, for display; None for a word. whole: whether files have a whole number without
    digits. factor: applied before display.
    least, most: the valid range, which `check.py` checks. ends: the columns with the ends of its interval.
    shown: where the page shows it. alike: whether to show it even if all rows have the same value. terminal: 0 if a
    terminal always shows it, otherwise its position in the order in which narrow terminals drop columns; None: never.
    best: the value with which sorting begins. former: an earlier name, under which files have it, too.
    """

    key: str
    asked: Callable[[Row], object] | None = None
    ran: Callable[[Tested], object] | None = None
    measure: Callable[[Tested], float | None] | None = None
    digits: int | None = None
    whole: bool = False
    unit: str = ""
    factor: float = 1
    least: float = 0
    most: float = math.inf
    ends: tuple[str, ...] = ()
    shown: str = ""
    alike: bool = True
    terminal: int | None = None
    best: str = "lowest"
    former: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """All names of the column in a file."""
        return (self.key, *self.ends, *filter(None, [self.former]))


def _clock(name: str) -> Callable[[Tested], float | None]:
    return lambda run: getattr(run.clock, name)


def _memory(name: str) -> Callable[[Tested], float | None]:
    return lambda run: getattr(run.memory, name)


def _evaluation(name: str) -> Callable[[Tested], float | None]:
    return lambda run: getattr(run.evaluation, name) if run.evaluation else None


def of_quality(figure: Quality) -> Column:
    """The column of a figure of a model's quality, which the tests of a row's runs measure."""
    return Column(
        figure.name,
        measure=lambda run: run.test.get(figure.name),
        digits=figure.digits,
        least=figure.least,
        most=figure.most,
        shown=AT_ONCE,
        terminal=figure.terminal,
        best="lowest" if figure.lower_is_better else "highest",
    )


def _throughput(name: str) -> Callable[[Tested], float | None]:
    return lambda run: getattr(run.throughput, name)


def _watched(name: str) -> Callable[[Tested], list]:
    return lambda run: [getattr(gpu, name) for gpu in run.watch.gpus]


def _each(values: Callable[[Tested], list], between: str) -> Callable[[Tested], str | None]:
    """The figures of all GPUs of a run as one text; None without GPUs, or if one of them does not report it."""

    def told(run: Tested) -> str | None:
        figures = values(run)
        return between.join(f"{value:.0f}" for value in figures) if figures and None not in figures else None

    return told


def _energy(run: Tested) -> float | None:
    """What GPUs and CPUs counted; None if none did, or if GPUs trained and did not: a CPU's energy is not the run's."""
    if run.memory_by_gpu and run.energy.gpu_joules is None:
        return None
    joules = [each for each in (run.energy.gpu_joules, run.energy.cpu_joules) if each is not None]
    return sum(joules) if joules else None


def _utilisation(operations: str) -> Callable[[Tested], float | None]:
    """The share of the peak; None for a run that was disturbed, or too short to measure a step's time."""

    def reached(run: Tested) -> float | None:
        if run.watch.disturbed or too_short(run.steps) or not run.peak:
            return None
        peak = run.peak
        return metrics.utilisation(
            getattr(run.work, operations), run.clock.train_seconds, peak["devices"], peak["flops_per_second"]
        )

    return reached


def too_short(steps: int) -> bool:
    """Whether there are too few steps to measure a step's time: no more steady steps than warm-up steps."""
    return steps <= 2 * WARMUP_STEPS


COLUMNS = (
    Column("row", asked=lambda row: row.name, shown=AT_ONCE, terminal=0),
    Column("place", digits=0, least=1, shown=AT_ONCE, terminal=0, former="rank"),
    Column("proof", shown=AT_ONCE, terminal=0),
    Column(
        "train_seconds",
        measure=_clock("train_seconds"),
        digits=2,
        unit="s",
        ends=("train_seconds_low", "train_seconds_high"),
        shown=AT_ONCE,
        terminal=0,
    ),
    Column(
        "speedup",
        digits=2,
        ends=("speedup_low", "speedup_high"),
        shown=AT_ONCE,
        terminal=0,
        best="highest",
    ),
    Column("efficiency", digits=2, shown=ON_DEMAND, best="highest"),
    Column("weak_efficiency", digits=2, shown=ON_DEMAND, best="highest"),  # report/scaling.py
    # The mean time of a step: multiplied by `steps` it is the training time, and its phases add up to it.
    Column(
        "step_ms",
        measure=lambda run: 1000 * run.clock.train_seconds / run.steps,
        digits=1,
        unit="ms",
        shown=ON_DEMAND,
    ),
    Column(
        "samples_per_second",
        measure=_throughput("samples_per_second"),
        digits=0,
        shown=ON_DEMAND,
        terminal=2,
        best="highest",
    ),
    Column(
        "mfu",
        measure=_utilisation("flops"),
        digits=1,
        unit="%",
        factor=100,
        most=1,
        shown=ON_DEMAND,
        best="highest",
    ),
    Column("startup_seconds", measure=_clock("first_step_seconds"), digits=1, unit="s", shown=ON_DEMAND, terminal=1),
    Column("cold_seconds", measure=_clock("cold_seconds"), digits=2, unit="s", shown=ON_DEMAND),
    Column("total_seconds", measure=_clock("total_seconds"), digits=1, unit="s", shown=ON_DEMAND),
    Column("evaluation_seconds", measure=_evaluation("seconds"), digits=2, unit="s", shown=ON_DEMAND),
    Column(
        "evaluation_samples_per_second",
        measure=_evaluation("samples_per_second"),
        digits=0,
        shown=ON_DEMAND,
        best="highest",
    ),
    Column("peak_memory_mb", measure=_memory("peak_mb"), digits=0, unit="MiB", shown=AT_ONCE, terminal=6),
    Column("proportional_memory_mb", measure=_memory("proportional_mb"), digits=0, unit="MiB", shown=ON_DEMAND),
    # Memory is a sum over GPUs; their other figures can't be added.
    Column("memory_by_gpu_mb", ran=_each(lambda run: run.memory_by_gpu, " + "), unit="MiB", shown=ON_DEMAND),
    Column(
        "reserved_by_gpu_mb",
        ran=_each(lambda run: run.reserved_by_gpu, " + "),
        unit="MiB",
        shown=ON_DEMAND,
    ),
    Column("nvml_memory_by_gpu_mb", ran=_each(_watched("memory_mb"), " + "), unit="MiB", shown=ON_DEMAND),
    Column("utilisation_by_gpu", ran=_each(_watched("utilisation"), " / "), unit="%", shown=ON_DEMAND),
    Column("sm_mhz_by_gpu", ran=_each(_watched("sm_mhz"), " / "), unit="MHz", shown=ON_DEMAND),
    Column("energy_joules", measure=_energy, digits=0, unit="J", shown=ON_DEMAND),
    *map(of_quality, QUALITIES.values()),
    Column("strategy", asked=lambda row: row.strategy),
    Column("division", asked=lambda row: row.division, shown=ON_DEMAND, alike=False),
    Column("device", asked=lambda row: row.hardware.device),
    Column("world_size", asked=lambda row: row.hardware.devices, ran=lambda run: run.world_size, whole=True, least=1),
    Column(
        "devices",
        asked=lambda row: device_count(asdict(row.hardware)),
        ran=lambda run: device_count(run.asked["hardware"]),
        digits=0,
        least=1,
        shown=ON_DEMAND,
    ),
    Column("nodes", asked=lambda row: row.hardware.nodes, whole=True, least=1),
    Column(
        "precision",
        asked=lambda row: row.precision,
        ran=lambda run: run.precision,
        shown=ON_DEMAND,
        alike=False,
        terminal=5,
    ),
    Column(
        "global_batch",
        asked=lambda row: row.train.global_batch,
        ran=lambda run: run.global_batch,
        whole=True,
        least=1,
    ),
    Column("repeats", digits=0, shown=AT_ONCE, terminal=10, best="highest"),
    Column("disturbed", digits=0, shown=AT_ONCE),
    Column("status", shown=AT_ONCE, alike=False, terminal=0),
    # Columns that only files have.
    Column("reason"),
    Column("steps", ran=lambda run: run.steps, whole=True, least=1),
    Column("median_step_ms", measure=lambda run: 1000 * run.clock.step_seconds_median),
    Column("tokens_per_second", measure=_throughput("tokens_per_second")),
    Column("final_loss", measure=lambda run: run.losses[-1], least=-math.inf),
    Column("mfu_padded", measure=_utilisation("padded_flops"), most=1),
    Column("reserved_memory_mb", measure=_memory("reserved_mb")),
    Column("memory_before_mb", measure=_memory("before_mb"), unit="MiB"),
)
BY_KEY = {column.key: column for column in COLUMNS}
# In the order of files: columns of the configuration come first.
KEYS = [key for column in sorted(COLUMNS, key=lambda column: column.asked is None) for key in column.keys]
MEASURED = [column for column in COLUMNS if column.measure]


def line(row: Row, runs: list[Tested]) -> dict:
    """A row's line by all KEYS, from the configuration and the `runs` that count; columns of other sources are None.

    Measured columns are medians, with the ends of their spread if there are columns for them.
    """
    values = dict.fromkeys(KEYS) | {column.key: column.asked(row) for column in COLUMNS if column.asked}
    if not runs:
        return values
    # Values of the run take precedence, since the configuration may have changed.
    values |= {column.key: column.ran(runs[0]) for column in COLUMNS if column.ran}
    for column in MEASURED:
        if (spread := median(column, runs)) is not None:
            ends = (spread.low, spread.high) if column.ends else ()
            values |= dict(zip((column.key, *column.ends), (spread.median, *ends), strict=True))
    return values


def median(column: Column, runs: list[Tested]) -> stats.Spread | None:
    """The median of a column over `runs`, with its spread; None if one of them has no value."""
    figures = [column.measure(run) for run in runs]
    return None if None in figures else stats.spread(figures)


def out_of_range(values: dict) -> list[str]:
    """The columns of a line whose value is outside their range, as messages."""
    told = []
    for column in COLUMNS:
        for key in (column.key, *column.ends):
            value = values.get(key)
            if isinstance(value, int | float) and not column.least <= value <= column.most:
                told.append(f"{key} {value:.6g}, which is not from {column.least:g} to {column.most:g}")
    return told
