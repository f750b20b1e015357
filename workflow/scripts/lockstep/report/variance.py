"""The variance between runs of one row, and how long runs should be because of it."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from lockstep import paths, stats
from lockstep.config.configuration import Config
from lockstep.report.reading import Run, good_runs, step_seconds, trusted

MOST_STEPS = 100_000  # from this number of steps on, a window counts as unlimited


def variance(config: Config, runs: dict[str, list[Run]], results: Path) -> dict | None:
    """The variance between runs of a row; None if it is unknown.

    `launch` and `step` are the standard deviations between launches and between steps, `steps` is the number of steps
    of a run, and `best_steps` the number with which runs would tell most in the same time (None: as many as possible).
    It is unknown if repetitions have different seeds, for example, because each step then has other texts.
    """
    if config.vary_seed:
        return None
    rows, startup, step, counts = [], [], [], []
    for row in config.rows.values():
        good = [run for run in good_runs(runs[row.name]) if row.division == "closed" and trusted([run])]
        times = [step_seconds(results / row.folder(run.repeat) / paths.STEPS) for run in good]
        if len(times) > 1 and len({len(seconds) for seconds in times}) == 1 and len(times[0]) > 1:
            rows.append(np.stack(times))
            startup += [run.wall_seconds - run.clock.train_seconds for run in good]
            step += [run.clock.step_seconds_median for run in good]
            counts += [run.steps for run in good]
    variance = stats.variance(rows)
    if variance is None:
        return None
    best = variance.best_steps(float(np.median(startup)), float(np.median(step)))
    most = round(best) if best < MOST_STEPS else None
    return asdict(variance) | {"steps": int(np.median(counts)), "best_steps": most}
