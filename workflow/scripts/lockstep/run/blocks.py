"""How many blocks `repeats: auto` trains: until the fastest rows are known well enough, or the time is spent.

The first blocks hold every row. Each later one holds the rows that are still in contention, which are those that no
other is shown to be faster than. It ends when the widest 95 % interval of a ratio between two of them is PRECISE: on
precision, never on significance, or whatever looks significant for a moment would be the result (Kruschke 2015, Doing
Bayesian Data Analysis, section 13.3).
"""

import itertools
from pathlib import Path

from lockstep import stats
from lockstep.config.configuration import FIRST_BLOCKS, MOST_BLOCKS, PRECISE, Config
from lockstep.config.row import Row
from lockstep.paths import decision_file
from lockstep.run import decision, record, staleness

# The chance at which a row is out of contention. Lower than the report's, as it is looked at after each block, and what
# was left out wrongly may never be tried again: so about 7 % of reports make a false claim, as the tests simulate.
DROPPED = 0.01
# Degrees of freedom below which the estimated spread is too often small by chance: with fewer, no row is left out, and
# precision ends nothing. Else one report in ten on two or three equal rows would make a false claim, as the tests
# simulate. Two blocks of twelve rows have eleven; two rows have eight after nine blocks.
LEAST_FREEDOM = 8
ENOUGH_REPETITIONS = 3  # repetitions, to tell a difference from chance


def decide(config: Config, results: Path, block: int) -> dict:
    """What follows after `block` blocks: `rows`, those of the next one (none: it is the last), and why.

    width: of the widest interval between two rows in contention; None where nothing tells.
    seconds: what the runs of these blocks took; next_seconds: what those of the next block would take that are not made
    yet, by their rows' longest runs so far.
    """
    runs = {name: _runs(config, row, results, block) for name, row in config.rows.items()}
    seconds = {
        name: {stats.block(run): run["clock"]["train_seconds"] for run in several if not run["watch"]["disturbed"]}
        for name, several in runs.items()
    }
    closed = [name for name, row in config.rows.items() if row.division == "closed" and runs[name]]
    fit = stats.Fit({name: seconds[name] for name in closed if seconds[name]})
    enough_freedom = fit.freedom >= LEAST_FREEDOM
    fastest = contending(fit, closed) if enough_freedom else closed
    width = widest(fit, fastest)
    spent = sum(_wall_seconds(run) for several in runs.values() for run in several)
    missing = [name for name in fastest if _run(config, config.rows[name], results, block + 1) is None]
    more = sum(max(run["wall_seconds"] for run in runs[name]) for name in missing)
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
        "why": why,
        "width": width,
        "seconds": spent,
        "next_seconds": more,
    }


def contending(fit: stats.Fit, names: list[str]) -> list[str]:
    """The rows that no other is shown to be faster than; where every run was disturbed, nothing is shown."""
    return [
        name
        for name in names
        if name not in fit.rows or not any(fit.shown_faster(other, name, DROPPED) for other in fit.rows)
    ]


def widest(fit: stats.Fit, names: list[str]) -> float | None:
    """The width of the widest interval between two of these rows; None where nothing tells of some pair."""
    if not set(names) <= set(fit.rows):
        return None
    ratios = [fit.ratio(*pair) for pair in itertools.combinations(names, 2)]
    if not all(ratio and ratio.kind for ratio in ratios):
        return None
    return max((ratio.high / ratio.low - 1 for ratio in ratios), default=0.0)


def decisions(config: Config, results: Path) -> list[dict]:
    """What was decided after each block, as far as the blocks follow each other; nothing without `repeats: auto`.

    Raises BadInput where one can't be read.
    """
    decided: list[dict] = []
    if config.repeats == "auto":
        for block in decision.AFTER:
            if not decision_file(results, block).is_file() or (decided and not decided[-1]["rows"]):
                break
            decided.append(decision.read(decision_file(results, block)))
    return decided


def last(config: Config, results: Path) -> dict | None:
    """The decision that ended the benchmark, or the newest one so far; None where there is none."""
    return next(reversed(decisions(config, results)), None)


def repetitions(config: Config, row: Row, results: Path) -> list[int]:
    """Which repetitions of a row are asked for: those of the first blocks, and of the later ones that hold it."""
    wanted = set(config.first_repetitions)
    if config.repeats == "auto":
        after = enumerate(decisions(config, results), FIRST_BLOCKS + 1)
        wanted.update(block for block, decided in after if row.name in decided["rows"])
    return sorted(wanted)


def needed(decided: dict | None, row: str, asked: int) -> int:
    """How many repetitions a row needs: ENOUGH_REPETITIONS, or those `asked` for where later blocks left it out."""
    return ENOUGH_REPETITIONS if decided is None or row in decided["contending"] else min(ENOUGH_REPETITIONS, asked)


def _wall_seconds(run: dict) -> float:
    """What a run took, with the attempts before it, which others had disturbed."""
    return run["wall_seconds"] + sum(attempt.get("wall_seconds", 0) for attempt in run.get("disturbed_before", ()))


def _runs(config: Config, row: Row, results: Path, block: int) -> list[dict]:
    """The records of the row's runs in the first `block` blocks that succeeded with the settings it has now."""
    several = [_run(config, row, results, repeat) for repeat in range(1, block + 1)]
    return [run for run in several if run]


def _run(config: Config, row: Row, results: Path, repeat: int) -> dict | None:
    repetition = config.repetition(row, repeat)
    run = record.read_run(results / repetition.folder(repeat))
    return run if run and run["status"] == "ok" and not staleness.run(config, repetition, run, results) else None
