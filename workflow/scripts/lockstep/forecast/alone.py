"""What one rank of a row takes alone: a short profiled run of the row's own strategy with one process.

It trains what the row's first rank would train of each batch, at steps whose widths represent those of the whole plan.
So the work of the framework itself counts, such as hooks, copies and compression. Where several ranks compute on the
cores of one machine, as many copies run at the same time without communicating: they share cores, caches and memory as
ranks do, and a step ends with its slowest copy.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

from lockstep import paths
from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.config.machine import cpu_cores
from lockstep.config.row import Row
from lockstep.data import plan as planning
from lockstep.data.plan import Plan
from lockstep.errors import RunFailed
from lockstep.files import read_json, write_json
from lockstep.forecast.ranks import Alone
from lockstep.run import record_files
from lockstep.run.progress import WARMUP_STEPS

STEPS = 32  # that are timed, and then recorded by phase
LAUNCH = paths.SCRIPTS / "launch.py"


def measure(config: Config, row: Row, results: Path, copies: int) -> Alone:
    """Run `copies` of one rank of a row at the same time, with the data and the plan of a results folder.

    Raises RunFailed with the message of a copy that failed.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        folders = [Path(temporary) / str(number) for number in range(copies)]
        alone = [_prepared(config, row, results, folder) for folder in folders]
        words = [sys.executable, LAUNCH, "--profile", "--row", row.name]
        commands = [[*words, "--results", folder, "--config", paths.config_file(folder)] for folder in folders]
        # Into files, as nobody would read a pipe of one while waiting for another.
        logs = [(folder / "said").open("w+", encoding="utf-8") for folder in folders]
        processes = [
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            for command, log in zip(commands, logs, strict=True)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:  # where this was interrupted
                process.terminate()
                process.wait()
            said = [_last_words(log) for log in logs]
        if failed := [words for code, words in zip(codes, said, strict=True) if code]:
            raise RunFailed(failed[0])
        runs = [folder / one.folder(1) for folder, one in zip(folders, alone, strict=True)]
        return _read(runs, row.hardware.threads)


def _prepared(config: Config, row: Row, results: Path, folder: Path) -> Row:
    """Make a results folder for one rank alone, with links to the data, and return the row as it runs there."""
    data = paths.data_folder(folder)
    (data / paths.PLANS).mkdir(parents=True)
    for part in paths.data_folder(results).iterdir():
        if part.name != paths.PLANS:
            (data / part.name).symlink_to(part.resolve())
    plan = share(plan_of(config, row, results), row)
    one = {"processes": 1, "threads": row.hardware.threads, "nodes": 1}
    batch = {"device_batch": None, "global_batch": int(np.diff(plan.starts).max())}
    asked = config.source["rows"][row.name] | one | batch
    source = config.source | {
        "hardware": config.source["hardware"] | one | {"hosts": None, "interface": None, "oversubscribe": True},
        "profile": {"steps": STEPS, "trace": False},
        "rows": dict.fromkeys(config.source["rows"]) | {row.name: asked},
    }
    file = paths.config_file(folder)
    file.write_text(yaml.safe_dump(source, allow_unicode=True, sort_keys=False), encoding="utf-8")
    alone_config = reading.read([file])
    alone = alone_config.profiled(alone_config.rows[row.name])
    plan.save(paths.plan_file(folder, alone.plan_name))
    write_json(paths.plan_summary_file(folder, alone.plan_name), {"name": alone.plan_name, "hash": plan.hash})
    return alone


def plan_of(config: Config, row: Row, results: Path) -> Plan:
    """A row's plan. It is made anew if the benchmark has none for the row's global batch."""
    file = paths.plan_file(results, row.plan_name)
    if file.is_file():
        return Plan.load(file)
    lengths = planning.load_lengths(paths.data_folder(results))
    return planning.of_training(row.train, lengths, config.data.max_length)


def share(plan: Plan, row: Row) -> Plan:
    """The plan of a row's first rank for a few representative steps, with that rank's part of each micro-batch."""
    excerpt = plan.excerpt(WARMUP_STEPS, STEPS)
    steps = [
        np.concatenate(excerpt.micro_batches(step, 0, row.replicas, row.train.accumulation))
        for step in range(excerpt.steps)
    ]
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in steps])])
    return Plan(np.concatenate(steps), starts, excerpt.widths, excerpt.epochs, excerpt.dropped)


def _read(folders: list[Path], threads: int) -> Alone:
    """The time of a step, and its parts. It is the mean over steps, each of which lasts as long as in its slowest copy.

    threads: the number of each copy's threads.
    """
    timed = np.array([np.load(folder / paths.STEPS)[0, WARMUP_STEPS : WARMUP_STEPS + STEPS] for folder in folders])
    profiles = [read_json(folder / paths.PROFILE)["seconds"] for folder in folders]
    step = float(timed.max(axis=0).mean())
    shares = {name: np.mean([each[name] / sum(each.values()) for each in profiles]) for name in profiles[0]}
    seconds = {name: step * float(shares[name]) for name in ("forward", "backward", "optimizer")}
    means = timed.mean(axis=1)
    spread = float((means.max() - means.min()) / means.mean())
    # Each copy's watcher takes the other copies for other programs, which may use the cores that no copy does.
    seen = np.mean([record_files.read_run(folder).watch.others_cores for folder in folders])
    free = max(0, cpu_cores() - threads * len(folders))
    others = max(0.0, float(seen) - threads * (len(folders) - 1) - free)
    return Alone(**seconds, rest=step - sum(seconds.values()), spread=spread, others=others)


def _last_words(log) -> str:
    with log:
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it ended without a word"
