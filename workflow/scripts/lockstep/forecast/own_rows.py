"""`lockstep which` for one's own rows: foretells each of them, and prints, draws and seals what was foretold."""

import argparse
import statistics
import sys
from pathlib import Path

from lockstep import paths
from lockstep.analysis import staleness
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.forecast import clusters, foretelling, memory
from lockstep.forecast.clusters import MOST_GPUS
from lockstep.run import record_files, seals
from lockstep.terminal import print_table, short, within

OF_MEMORY = (
    "Memory is counted for a row's widest micro-batch on GPUs, as lockstep fits does; with --memory, "
    f"{memory.RESERVE} of it stay free for CUDA, NCCL and kernels."
)
SPARED = ("of it communication, ms", "ranks")  # columns that a narrow terminal does without
NO_MEMORY = "Whether it fits into memory was not looked at: --memory 24GB counts it."


def tell(config: Config, arguments: argparse.Namespace) -> int:
    """Print what is foretold of a configuration's rows. arguments: those of `lockstep which`.

    Returns the exit code, 1 if nothing could be foretold of a row that was named. Raises BadInput.
    """
    results = arguments.results
    if arguments.gpus and (len(arguments.gpus) > 1 or not 1 <= arguments.gpus[0] <= MOST_GPUS):
        raise BadInput(f"--gpus {' '.join(map(str, arguments.gpus))}: name one number, from 1 to {MOST_GPUS:,}.")
    for name in arguments.rows or ():
        config.require_row(name, f"--rows {name}")
    if not paths.ready_file(results, config.data_key).is_file():
        raise BadInput(
            f"{results} has no data that was prepared for this configuration. Prepare it: lockstep bench --until plan"
        )
    names = list(dict.fromkeys(arguments.rows or config.rows))
    number = arguments.gpus[0] if arguments.gpus else None
    if arguments.seal:
        seals.refuse(results, names)
    rows = _possible([foretelling.on(config.rows[name], number) for name in names], bool(arguments.rows))
    link = None if arguments.network is None else clusters.NETWORK.read(arguments.network, "--network")
    capacity = None if arguments.memory is None else memory.free(arguments.memory, memory.RESERVE)
    counted = memory.of_rows(config, rows, results, capacity) if arguments.memory or arguments.picture else {}
    on_one_machine = [row.name for row in rows if row.hardware.processes > 1 and row.hardware.nodes == 1]
    if link and on_one_machine:
        print(f"--network is between machines, and not used for {', '.join(on_one_machine)}: all its ranks are on one.")
    found = [_tell_one(foretelling.foretell(config, row, results, link)) for row in rows]
    _tell_rows(found, {row.name: _measured(config, row, results) for row in rows}, counted, arguments.price)
    if arguments.json:
        about = {"price": arguments.price} | ({"memory": counted, "capacity": capacity} if counted else {})
        write_json(arguments.json, {"rows": found} | about)
    if arguments.picture:
        _draw(arguments.picture, found, counted, capacity)
    if arguments.seal:
        print(f"sealed in {paths.foretold_file(results)}, sha256 {seals.seal(results, found)}")
        print("Share this number before the rows run, with whoever is to trust the forecast.")
    without = [each for each in found if not each["seconds"]]
    return int(bool(without) if arguments.rows else len(without) == len(found))


def _possible(rows: list[Row], named: bool) -> list[Row]:
    """The rows that can have their devices. It prints why others can't, or raises BadInput if these were named."""
    kept = []
    for row in rows:
        try:
            row.refuse()
        except BadInput as error:
            if named:
                raise
            print(f"{row.name}: not foretold: {error}")
        else:
            kept.append(row)
    return kept


def _tell_one(found: dict) -> dict:
    """Print that a row has been looked at, since each takes some seconds."""
    said = f"{short(1000 * found['seconds']['value'])} ms" if found["seconds"] else found["known"]
    print(f"{found['row']}: {said}", file=sys.stderr, flush=True)
    return found


def _measured(config: Config, row: Row, results: Path) -> float | None:
    """The milliseconds of a row's step in existing runs; None if no run has these settings and data."""
    runs = [record_files.read_run(file.parent) for file in paths.run_files(results, paths.RECORD, row=row.name)]
    own = [run for run in runs if not staleness.run(config, config.repetition(row, run.repeat), run, results)]
    steps = [1000 * run.clock.train_seconds / run.steps for run in own]
    return statistics.median(steps) if steps else None


def _tell_rows(
    found: list[dict], measured: dict[str, float | None], counted: dict[str, dict], price: float | None
) -> None:
    """Print what is foretold of rows, the fastest first, and why nothing is of others.

    counted: memory.of_rows, or nothing; price: of a device for an hour.
    """
    done = sorted((each for each in found if each["seconds"]), key=_per_sample)
    single = next((each for each in found if each["row"] == "single"), None)
    header = ["row", "ranks", "a step, ms", "of it communication, ms", "times as fast as single", "how it is known"]
    lines = [[*_row_cells(each, single), each["known"]] for each in done]
    if there := any(measured.values()):
        header.insert(3, "measured, ms")
        lines = [[*line[:3], short(measured[line[0]]) if measured[line[0]] else "", *line[3:]] for line in lines]
    header[-1:-1] = ["an epoch"] if price is None else ["an epoch", "cost of it"]
    lines = [[*line[:-1], *_epoch_cells(each, price), line[-1]] for line, each in zip(lines, done, strict=True)]
    if counted:
        header.insert(-1, "a GPU, GiB")
        lines = [[*line[:-1], _gib(counted[line[0]]), line[-1]] for line in lines]
    if lines:
        print_table(header, lines, SPARED)
    for each in found:
        if each["why"]:
            print(f"{each['row']}: {each['known']}: {'; '.join(each['why'])}")
    for name, each in counted.items():
        if each["why"]:
            print(f"{name}: memory not counted: {each['why']}")
        elif name not in {line[0] for line in lines}:
            print(f"{name}: a GPU, GiB: {_gib(each)}")
    disturbed = [f"{each['row']} ({'; '.join(each['disturbed'])})" for each in found if each["disturbed"]]
    if disturbed:
        print(f"Disturbed, so foretold as too slow: {', '.join(disturbed)}.")
    if there:
        print("Measured is the median of the runs that are there; nothing of it went into what is foretold.")
    if done:
        print(
            "Foretold from each row's own code, run alone on this machine, what was measured of messages, and what each"
            f" strategy sends. An epoch is all its steps, without evaluation and saving."
            f" {OF_MEMORY if counted else NO_MEMORY}"
        )


def _gib(counted: dict) -> str:
    if counted["why"]:
        return ""
    return short(counted["allocated"] / 2**30) + ("" if counted["fits"] else ", does not fit")


def _draw(file: Path, found: list[dict], counted: dict[str, dict], capacity: int | None) -> None:
    """Draw the rows whose time and memory are both known, and write why the others are missing."""
    from lockstep.forecast import picture  # matplotlib takes a while

    without = {each["row"]: "; ".join(each["why"]) for each in found if not each["seconds"]}
    without |= {name: each["why"] for name, each in counted.items() if each["why"] and name not in without}
    marks = [
        picture.Mark(
            each["row"],
            *(None if end is None else 1000 * end for end in map(each["seconds"].get, ("value", "low", "high"))),
            counted[each["row"]]["allocated"] / 2**30,
            counted[each["row"]]["fits"],
        )
        for each in found
        if each["row"] not in without
    ]
    usual = found[0]["global_batch"] if found else None
    others = {each["row"]: each["global_batch"] for each in found if each["global_batch"] != usual}
    notes = {name: f"has {batch} samples in a step, and the first row {usual}" for name, batch in others.items()}
    if not marks:
        print(f"{file}: not drawn: of no row are both time and memory known")
        return
    picture.draw(file, marks, None if capacity is None else capacity / 2**30, notes | without)
    print(f"drawn: {file}")


def _per_sample(found: dict) -> float:
    return found["seconds"]["value"] / found["global_batch"]


def _row_cells(found: dict, single: dict | None) -> list[str]:
    seconds, faster = found["seconds"], foretelling.speedup(found, single)
    cells = [short(1000 * part["value"]) for part in (seconds, found["parts"]["communication"])]
    if seconds["low"] is not None:
        cells[0] = within(*(1000 * seconds[end] for end in ("value", "low", "high")))
    return [found["row"], str(found["ranks"]), *cells, "" if faster is None else f"{faster:.2f}"]


def _epoch_cells(found: dict, price: float | None) -> list[str]:
    """How long an epoch of a row takes, and what it costs if there is a price."""
    seconds, steps = found["seconds"], found["epoch_steps"]
    low, high = (seconds["value"] if seconds[end] is None else seconds[end] for end in ("low", "high"))
    epoch = [steps * each for each in (seconds["value"], low, high)]
    cells = [_duration(*epoch)]
    if price is not None:
        cells.append(within(*(each / 3600 * found["devices"] * price for each in epoch)))
    return cells


def _duration(value: float, low: float, high: float) -> str:
    """Seconds and the ends of their interval, in hours or minutes if they are more than one and a half of these."""
    unit, seconds = ("h", 3600) if value >= 5400 else ("min", 60) if value >= 90 else ("s", 1)
    return f"{within(value / seconds, low / seconds, high / seconds)} {unit}"
