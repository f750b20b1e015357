"""How much runs of one row differ, and why: what the report says of how long a run should be."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from lockstep import paths, stats
from lockstep.config.configuration import Config
from lockstep.report.reading import good_runs, trusted
from lockstep.run.progress import WARMUP_STEPS

MOST_STEPS = 100_000  # beyond which a window counts as one without end


def variance(config: Config, runs: dict[str, list[dict]], results: Path) -> dict | None:
    """How runs of a row differ: between `launch`es, and from `step` to step; of how many `steps` a run is, and which
    number of them would tell most in the same time (`best_steps`, None: as many as can be). None where nothing tells,
    as where every repetition has a seed of its own and so other texts in each step.
    """
    if config.vary_seed:
        return None
    rows, startup, step, counts = [], [], [], []
    for row in config.rows.values():
        good = [run for run in good_runs(runs[row.name]) if row.division == "closed" and trusted([run])]
        times = [_step_seconds(results / row.folder(run["repeat"]) / paths.STEPS) for run in good]
        if len(times) > 1 and len({len(seconds) for seconds in times}) == 1 and len(times[0]) > 1:
            rows.append(np.stack(times))
            startup += [run["wall_seconds"] - run["clock"]["train_seconds"] for run in good]
            step += [run["clock"]["step_seconds_median"] for run in good]
            counts += [run["steps"] for run in good]
    variance = stats.variance(rows)
    if variance is None:
        return None
    best = variance.best_steps(float(np.median(startup)), float(np.median(step)))
    most = round(best) if best < MOST_STEPS else None
    return asdict(variance) | {"steps": int(np.median(counts)), "best_steps": most}


def _step_seconds(file: Path) -> np.ndarray:
    """The steady steps' seconds by the clock of the rank that took longest; none where that is not known."""
    try:
        ranks = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.zeros(0)  # made before steps were kept, or damaged, which check.py tells of
    return ranks[ranks.sum(axis=1).argmax(), WARMUP_STEPS:]
