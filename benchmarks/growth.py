"""More data: whether training slows down, and what memory and planning take, at up to a hundred times the rows."""

import json
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks.common import PROJECT, SMALL, command, line, run
from lockstep.config import reading
from lockstep.data import sources
from lockstep.data.labels import Labels

SIZES = (10_000, 100_000, 1_000_000)
ROWS = 2_500  # that are repeated, each time with another mark of two characters: equal texts would be dropped
STEPS = 60


def growth(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    """The corpus again and again; speed in steps of equal widths, memory without what mapped files take."""
    keys = keys | SMALL
    peaks, results = {"prepare": [], "train": []}, []
    for size in SIZES:
        place, data = folder / str(size), {"data.path": repeated(folder, keys, size), "data.format": "jsonl"}
        peaks["prepare"].append(peak(command("prepare", place, keys | data)))
        began = time.perf_counter()
        run("plan", place, keys | data)
        seconds = time.perf_counter() - began
        few = keys | data | {"train.max_steps": STEPS}
        run("plan", place, few)
        peaks["train"].append(peak(command("launch", place, few, "--row", "single")))
        results.append(place)
    largest, smallest = f"{SIZES[-1]:,} rows", f"{SIZES[0]:,}"
    return [
        *speeds(results, rounds),
        *(
            line(f"{script} of {largest} over {smallest}, peak memory beside mapped files", [sizes[-1] / sizes[0]])
            for script, sizes in peaks.items()
        ),
        line(f"planning an epoch of {largest}, seconds", [seconds], "seconds"),
    ]


def speeds(results: list[Path], rounds: int) -> list[list[str]]:
    from benchmarks.loops import PlannedLoop, SameWidths
    from benchmarks.turns import in_turns

    smallest, *larger = PlannedLoop(results[0]), *map(SameWidths, results[1:])
    lines = []
    for size, loop in zip(SIZES[1:], larger, strict=True):
        loop.wanted = smallest.whole.widths
        name = f"single on {size:,} rows over {SIZES[0]:,}, samples/s (2 x 128)"
        lines.append(line(name, in_turns(loop, STEPS, smallest, STEPS, rounds), "0.95 to 1.05"))
    return lines


def repeated(folder: Path, keys: dict, size: int) -> Path:
    """`size` rows as JSON lines."""
    path = {"path": str(keys["data.path"])} if "data.path" in keys else {}
    data = reading.parse({"data": path | {"limit": ROWS}}).data
    rows, file = list(sources.read(data, folder, [], Labels())[1]), folder / f"{size}.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        for number in range(size):
            text, label, _ = rows[number % len(rows)]
            high, low = divmod(number // len(rows), 30)
            marked = f"{text}{chr(0x4E00 + high)}{chr(0x4E00 + low)}"
            stream.write(json.dumps({"text": marked, "label": label}, ensure_ascii=False) + "\n")
    return file


def peak(command: list[str]) -> float:
    """Run a command; return the most memory of any of its processes that was not a mapped file's, in MiB."""
    most, process = 0, psutil.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for member in (process, *children(process)):
            try:
                memory = member.memory_info()
            except psutil.Error:  # it has just ended
                continue
            most = max(most, memory.rss - memory.shared)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: failed")
    return most / 2**20


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
