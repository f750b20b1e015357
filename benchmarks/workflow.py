"""The default benchmark as a user runs it, and how much of its time is the workflow's own."""

import base64
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import PROJECT, line
from lockstep.files import read_json
from lockstep.run import record_files

PARTS = ("Snakefile", "workflow", "config", "resources", "docker", "requirements.txt")


def workflow(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    """`snakemake --cores all`, once: the share of its time in which no job runs, or a training one has no processes."""
    place = folder / "workflow"
    for part in PARTS:
        copy = shutil.copytree if (PROJECT / part).is_dir() else shutil.copy
        place.mkdir(exist_ok=True)
        copy(PROJECT / part, place / part)
    binaries = Path(sys.executable).parent
    began = time.time()
    subprocess.run(
        [binaries / "snakemake", "--cores", "all", "--quiet", "all"],
        cwd=place,
        env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"},
        check=True,
        stderr=subprocess.DEVNULL,
    )
    ended = time.time()
    name = "share of the default benchmark's time that is Snakemake's and rules'"
    return [line(name, [own_share(place, began, ended)], "at most 0.10")]


def own_share(place: Path, began: float, ended: float) -> float:
    """The workflow's own share of a benchmark that ran in `place` between two moments, in seconds since 1970."""
    jobs = {output(file): read_json(file) for file in (place / ".snakemake" / "metadata").iterdir()}
    spans = {path: (job["starttime"], job["endtime"]) for path, job in jobs.items()}
    around = sum(
        last - first - record_files.read_run((place / path).parent).wall_seconds
        for path, (first, last) in spans.items()
        if path.startswith("results/runs/") and path.endswith("/record.json") and (place / path).is_file()
    )
    return (ended - began - covered(set(spans.values())) + around) / (ended - began)


def output(file: Path) -> str:
    """What Snakemake keeps notes of in this file, which is named for it."""
    return base64.urlsafe_b64decode(file.name).decode()


def covered(intervals: set[tuple[float, float]]) -> float:
    """Seconds in which at least one of them goes on."""
    seconds, reached = 0.0, 0.0
    for first, last in sorted(intervals):
        seconds += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return seconds
