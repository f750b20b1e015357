"""How many blocks `repeats: auto` trains: until the fastest rows are known precisely enough, or the time is used up.

The first blocks contain every row. Each later block contains the rows in contention: those that no other row is shown
to be faster than. The benchmark ends when the widest 95 % interval of a ratio between two of them is PRECISE. It ends
by precision and never by significance; otherwise a difference that is significant for a moment would become the result
(Kruschke 2015, Doing Bayesian Data Analysis, section 13.3).
"""

import itertools
from pathlib import Path

from lockstep import stats
from lockstep.analysis import decision, staleness
from lockstep.config.configuration import FIRST_BLOCKS, MOST_BLOCKS, PRECISE, Config
from lockstep.config.row import Row
from lockstep.paths import decision_file
from lockstep.run import record_files
from lockstep.run.record import Record

# The significance level at which a row drops out of contention. It is lower than the report's, because it is tested
# after each block, and a row that is wrongly left out may never be trained again. With it, about 7 % of reports make a
# false claim, as the tests simulate.
DROPPED = 0.01
# With fewer degrees of freedom the estimated spread is too often small by chance. So no row is left out then, and
# precision does not end the benchmark. Otherwise one report in ten on two or three equal rows would make a false claim,
# as the tests simulate. Two blocks of twelve rows have eleven degrees; two rows have eight after nine blocks.
LEAST_FREEDOM = 8
ENOUGH_REPETITIONS = 3  # repetitions that distinguish a difference from chance


def decide(config: Config, results: Path, block: int, left_out: list[str]) -> dict:
    """What follows after `block` blocks: `rows`, the rows of the next block (none if this was the last), and why.

    left_out: the rows that are compared with no others (verdicts.not_compared): a fast one ends nobody's repetitions.
    width: the width of the widest interval between two rows in contention; None if it is unknown.
    seconds: the time that the runs of these blocks took.
    next_seconds: the time that the missing runs of the next block would take, by their rows' longest runs so far.
    """
    runs = {name: _runs(config, row, results, block) for name, row in config.rows.items()}
    seconds = {
        name: {stats.block(run): run.clock.train_seconds for run in several if not run.watch.disturbed}
        for name, several in runs.items()
    }
    compared = [name for name in config.rows if name not in left_out and runs[name]]
    closed = [name for name in compared if config.rows[name].division == "closed"]
    fit = stats.Fit({name: seconds[name] for name in closed if seconds[name]})
    enough_freedom = fit.freedom >= LEAST_FREEDOM
    fastest = contending(fit, closed) if enough_freedom else closed
    width = widest(fit, fastest)
    spent = sum(_wall_seconds(run) for several in runs.values() for run in several)
    missing = [name for name in fastest if _run(config, config.rows[name], results, block + 1) is None]
    more = sum(max(run.wall_seconds for run in runs[name]) for name in missing)
    if len(closed) < 2:
        why = "nothing to compare"
    elif len(fastest) < 2:
        why = "one row is fastest"
    elif enough_freedom and width is not None and width <= PRECISE:
        why = "precise"
    elif block >= MOST_BLOCKS:
        why = "most blocks"
    elif missing and spent + more > config.budget:
        why = "budget"
    else:
        why = ""
    return {
        "block": block,
        "rows": [] if why else fastest,
        "contending": fastest,
        "left_out": left_out,
        "why": why,
        "width": width,
        "seconds": spent,
        "next_seconds": more,
    }


def contending(fit: stats.Fit, names: list[str]) -> list[str]:
    """The rows that no other row is shown to be faster than; this includes rows whose runs were all disturbed."""
    return [
        name
        for name in names
        if name not in fit.rows or not any(fit.shown_faster(other, name, DROPPED) for other in fit.rows)
    ]


def widest(fit: stats.Fit, names: list[str]) -> float | None:
    """The width of the widest interval between two of these rows; None if any pair has no interval."""
    if not set(names) <= set(fit.rows):
        return None
    ratios = [fit.ratio(*pair) for pair in itertools.combinations(names, 2)]
    if not all(ratio and ratio.kind for ratio in ratios):
        return None
    return max((ratio.high / ratio.low - 1 for ratio in ratios), default=0.0)


def decisions(config: Config, results: Path) -> list[dict]:
    """The decisions after each block, up to the first missing one; empty without `repeats: auto`.

    Raises BadInput if a decision can't be read.
    """
    decided: list[dict] = []
    if config.repeats == "auto":
        for block in decision.AFTER:
            if not decision_file(results, block).is_file() or (decided and not decided[-1]["rows"]):
                break
            decided.append(decision.read(decision_file(results, block)))
    return decided


def last(config: Config, results: Path) -> dict | None:
    """The decision that ended the benchmark, or the newest one so far; None if there is none."""
    return next(reversed(decisions(config, results)), None)


def repetitions(config: Config, row: Row, results: Path) -> list[int]:
    """The repetitions of a row that are wanted: those of the first blocks, and of later blocks that contain the row."""
    wanted = set(config.first_repetitions)
    if config.repeats == "auto":
        after = enumerate(decisions(config, results), FIRST_BLOCKS + 1)
        wanted.update(block for block, decided in after if row.name in decided["rows"])
    return sorted(wanted)


def needed(decided: dict | None, row: str, asked: int) -> int:
    """The number of repetitions that a row needs: ENOUGH_REPETITIONS, or `asked` if later blocks left the row out."""
    return ENOUGH_REPETITIONS if decided is None or row in decided["contending"] else min(ENOUGH_REPETITIONS, asked)


def _wall_seconds(run: Record) -> float:
    """The seconds that a run took, including earlier attempts at it that were disturbed."""
    return run.wall_seconds + sum(attempt.wall_seconds for attempt in run.disturbed_before)


def _runs(config: Config, row: Row, results: Path, block: int) -> list[Record]:
    """The records of the row's successful runs in the first `block` blocks, as far as they had its present settings."""
    several = [_run(config, row, results, repeat) for repeat in range(1, block + 1)]
    return [run for run in several if run]


def _run(config: Config, row: Row, results: Path, repeat: int) -> Record | None:
    repetition = config.repetition(row, repeat)
    run = record_files.read_run(results / repetition.folder(repeat))
    return run if isinstance(run, Record) and not staleness.run(config, repetition, run, results) else None
