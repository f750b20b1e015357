"""Train the rows of config/claims.yaml in blocks, and compare their times and their quality."""

import json
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import PROJECT, command, prepared
from lockstep import paths, stats
from lockstep.config import reading
from lockstep.report import ladder
from lockstep.run import record_files
from lockstep.run.record import Record

CONFIGS = [PROJECT / "config" / "config.yaml", PROJECT / "config" / "claims.yaml"]


@dataclass(frozen=True)
class Runs:
    """Records and test reports, by row and repetition; a row that can't run here has the reason instead."""

    records: dict[str, dict[int, Record]]
    tests: dict[str, dict[int, dict]]
    folders: dict[str, Path]  # of each row's first repetition
    unavailable: dict[str, str]

    def ratio(self, ours: str, theirs: str) -> stats.Ratio | None:
        """The ratio of two rows' training times, paired by block; None if one of them has no run."""
        seconds = [
            {(repeat, None): record.clock.train_seconds for repeat, record in self.records[row].items()}
            for row in (ours, theirs)
        ]
        return stats.ratio(*seconds)

    def quality(self, ours: str, theirs: str) -> dict:
        """Whether a row is as good as another, as the report judges it (report/ladder.py)."""
        both = sorted(self.tests[ours].keys() & self.tests[theirs].keys())
        differences = [self.tests[ours][k]["macro_f1"] - self.tests[theirs][k]["macro_f1"] for k in both]
        return ladder.quality(differences, len(both))


def train(folder: Path, data: Path | None, repeats: int) -> Runs:
    """Train every row `repeats` times, in blocks whose order is shuffled, and test it."""
    keys = {"hardware.device": "auto", "retries": 0} | ({"data.path": data} if data else {})
    config = reading.read(CONFIGS, [f"{key}={value}" for key, value in keys.items()])
    results = prepared(folder, keys, tuple(map(str, CONFIGS)))
    unavailable = {name: row.unavailable for name, row in config.rows.items() if row.unavailable}
    able = sorted(config.rows.keys() - unavailable.keys())
    records, tests = {name: {} for name in config.rows}, {name: {} for name in config.rows}
    for repeat in range(1, repeats + 1):
        for name in random.Random(repeat).sample(able, len(able)):
            run = results / config.rows[name].folder(repeat)
            words = ["--row", name, "--repeat", str(repeat), *(f"--config={file}" for file in CONFIGS)]
            subprocess.run(command("launch", results, keys, *words), cwd=PROJECT, check=True)
            evaluate = [*command("evaluate", results, {})[:2], str(run)]
            subprocess.run(evaluate, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
            records[name][repeat] = record_files.read_run(run)
            tests[name][repeat] = json.loads((run / paths.TEST_REPORT).read_text())
    folders = {name: results / config.rows[name].folder(1) for name in able}
    return Runs(records, tests, folders, unavailable)


def by_workers(folder: Path, numbers: tuple[int, ...], turns: int) -> dict[int, list[float]]:
    """Images a second that one device trains, of MNIST's size, by the number of its worker processes; in turns."""
    from benchmarks.images import write_images

    files = (str(CONFIGS[0]), str(PROJECT / "config" / "mnist.yaml"))
    keys = {"data.path": write_images(folder / "images"), "hardware.device": "auto", "retries": 0}
    results = prepared(folder / "results", keys, files)
    speeds = {number: [] for number in numbers}
    for turn in range(turns):
        for number in numbers if turn % 2 else reversed(numbers):
            words = ["--row", "single", f"--set=hardware.workers={number}", *(f"--config={file}" for file in files)]
            subprocess.run(command("launch", results, keys, *words), cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
            (record,) = paths.run_files(results, paths.RECORD, row="single")
            speeds[number].append(record_files.read_run(record.parent).throughput.samples_per_second)
    return speeds


def proof(folder: Path, row: str, options: dict, model: str) -> str:
    """The proof's verdict on a row over images."""
    keys = {"model.name": model, "hardware.processes": 2, "hardware.oversubscribe": "true"}
    keys |= {f"rows.{row}.{key}": value for key, value in options.items()}
    files = (str(CONFIGS[0]), str(PROJECT / "config" / "digits.yaml"))
    results = prepared(folder, keys, files)
    words = [*(f"--config={file}" for file in files), "--exit-zero", "--row", "reference", "--row", row]
    subprocess.run(command("parity", results, keys, *words), cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    (verdict,) = paths.run_files(results, paths.VERDICT, paths.PARITY, row)
    return json.loads(verdict.read_text())["proof"]
