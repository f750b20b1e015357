"""The search for this machine's fastest recipe: short runs with one change at a time, which is kept if it is faster.

It is coordinate ascent over the changes that its strategy declares (TRIES), in the order of their usual benefit; one
that seems faster is tried twice. A try is judged by the time of the whole configured training: all steps at the warm
speed, plus one-time costs such as compiling, which must therefore be worth it.
"""

import time
from collections.abc import Callable
from pathlib import Path

from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.errors import BadInput, RunFailed, RunStopped
from lockstep.files import read_json
from lockstep.paths import data_file
from lockstep.run import runs

START = {"strategy": "recipe", "processes": 1}
CHANGES = registry.literals(START["strategy"])["TRIES"]
# A change is kept if it takes less than this share of the time, twice, each time compared with a run of the recipe that
# it would replace, and neither run was disturbed the second time. A change without effect seems faster in one of six
# single short runs.
BETTER = 0.95


def search(config: Config, results: Path, say: Callable[[str], None]) -> list[dict]:
    """Try recipes until all were tried or the time is up. Returns all tries in order: recipe, seconds, kept, reason.

    `disturbed` of a try says what else used the machine during the runs that decide on it.
    Raises RunFailed if not even the plain recipe can be trained.
    """
    end = time.monotonic() + config.tune.seconds
    best = _try(config, START, results, "base") | {"kept": True}
    if best["seconds"] is None:
        raise RunFailed(f"the plain recipe can't be trained: {best['reason']}")
    tries = [best]
    for number, change in enumerate(CHANGES, 1):
        if time.monotonic() > end:
            say(f"{config.tune.seconds:g} s are over; {len(CHANGES) - number + 1} changes were not tried")
            break
        attempt = _try(config, best["recipe"] | change, results, f"try{number}")
        if _pays(attempt, best):
            before = _try(config, best["recipe"], results, f"try{number}_before")
            again = _try(config, attempt["recipe"], results, f"try{number}_again")
            attempt["disturbed"] = "; ".join(dict.fromkeys(filter(None, [again["disturbed"], before["disturbed"]])))
            attempt["kept"] = _pays(again, before) and not attempt["disturbed"]
            attempt |= {key: again[key] for key in ("seconds", "samples_per_second") if attempt["kept"]}
        say(_line(attempt, change, best))
        tries.append(attempt)
        if attempt["kept"]:
            best = attempt
    return tries


def _pays(attempt: dict, best: dict) -> bool:
    return None not in (attempt["seconds"], best["seconds"]) and attempt["seconds"] < BETTER * best["seconds"]


def winner(tries: list[dict]) -> dict:
    """The recipe that was kept last, which is the fastest."""
    return [attempt for attempt in tries if attempt["kept"]][-1]["recipe"]


def _try(config: Config, recipe: dict, results: Path, name: str) -> dict:
    nothing = {"seconds": None, "samples_per_second": None, "reason": "", "kept": False, "disturbed": ""}
    attempt = {"name": name, "recipe": recipe} | nothing
    try:
        record = runs.run(config, config.tried(name, recipe), 1, results)
    except RunStopped:  # the search must end, too
        raise
    except (BadInput, RunFailed) as error:  # this machine does not support the recipe
        return attempt | {"reason": str(error)}
    clock, samples = record.clock, record.work.samples
    warm = (clock.train_seconds - clock.stall_seconds) / samples
    seconds = clock.cold_seconds + clock.stall_seconds + warm * _all_samples(config, results)
    disturbed = "; ".join(record.watch.disturbed)
    return attempt | {"seconds": seconds, "samples_per_second": 1 / warm, "disturbed": disturbed}


def _all_samples(config: Config, results: Path) -> int:
    """The number of samples in the whole configured training."""
    train, about = config.train, read_json(data_file(results))
    samples = about.get("sequences", {}).get("train", about["splits"]["train"]["texts"])  # several texts may share one
    steps = samples // train.global_batch * train.epochs
    return train.global_batch * min(steps, train.max_steps or steps)


def _line(attempt: dict, change: dict, best: dict) -> str:
    settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
    if attempt["seconds"] is None:
        return f"{settings}: not here ({attempt['reason']})"
    speed = f"{attempt['samples_per_second']:.0f} samples/s once warm"
    compared = f"{attempt['seconds'] / best['seconds']:.2f} of the time, {speed}"
    disturbed = f" (disturbed: {attempt['disturbed']})" if attempt["disturbed"] else ""
    return f"{settings}: {compared}, {'kept' if attempt['kept'] else 'not kept'}{disturbed}"
