"""What communication costs on this machine: each collective by bytes, and a latency and a bandwidth fitted to it."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from lockstep import paths
from lockstep.config.configuration import Config
from lockstep.config.hardware import busy_cores
from lockstep.config.machine import cpu_cores
from lockstep.config.row import Row, read_row
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, write_json
from lockstep.rank.network import ASKED, BUS, MEASURED
from lockstep.run import addresses, lifetime, node, record_files, watcher
from lockstep.run.processes import Interrupted

PROGRAM = paths.SCRIPTS / "lockstep" / "rank" / "network.py"
RANKS = (2, 4)  # the numbers of ranks that are measured, if there are that many devices
SMALLEST, LARGEST, FACTOR = 2**10, 2**28, 4  # bytes: 1 KiB to 256 MiB
NEGLIGIBLE = 1e-6  # of the shortest time


def sizes(largest: int = LARGEST) -> list[int]:
    """Bytes of the messages, up to `largest`."""
    below = [SMALLEST * FACTOR**k for k in range(math.ceil(math.log(largest / SMALLEST, FACTOR)))]
    return [*(size for size in below if size < largest), largest]


def rows(config: Config, ranks: list[int] | None, backend: str | None) -> list[Row]:
    """A row for each number of ranks, by default those of RANKS that this machine has devices for.

    Raises BadInput where it has none, or fewer than were asked for.
    """
    asked = {"strategy": "ddp", "nodes": 1} | ({"backend": backend} if backend else {})
    found, why = [], None
    for number in sorted(set(ranks or RANKS)):
        own = {"processes": number, "device_batch": None, "global_batch": number}
        try:
            row = read_row("collectives", asked | own, config.shared, "--ranks")
            row.hardware  # noqa: B018 - it is resolved when it is asked for
        except BadInput as error:
            said = str(error).replace("rows.collectives.processes", "--ranks")
            why = why or BadInput(said.replace("rows.collectives.backend", "--backend"))
            if ranks:
                raise why from None
        else:
            found.append(row)
    if not found:
        raise why
    return found


def measure(row: Row, folder: Path, asked: list[int], operations: list[str]) -> dict:
    """Have the row's ranks measure these operations on messages of the `asked` sizes, in bytes, and fit them.

    Raises RunFailed if a rank fails.
    """
    hardware = row.hardware
    with lifetime.hold(folder):
        for name in (ASKED, MEASURED):
            (folder / name).unlink(missing_ok=True)
        write_json(
            folder / ASKED,
            {"sizes": asked, "operations": operations, "backend": hardware.backend, "hardware": asdict(hardware)},
        )
        rendezvous = addresses.alone(row)
        command = row.command(folder, rendezvous, PROGRAM)
        try:
            outcome = node.train(row, folder, command, rendezvous, steps=1)
        except Interrupted as error:
            raise RunFailed(str(error)) from None
        if outcome.reason or outcome.exit_code or not (folder / MEASURED).is_file():
            why = outcome.reason or f"the ranks ended with exit code {outcome.exit_code}"
            raise RunFailed(f"{why}{record_files.first_error(folder / paths.LOG)}")
        measured = read_json(folder / MEASURED)
    watched = watcher.judge(watcher.read(folder), measured.pop("window"), cpu_cores(), busy_cores(asdict(hardware)))
    fitted = {
        name: {"points": points} | fit(points, BUS[name](measured["ranks"]))
        for name, points in measured.pop("operations").items()
    }
    about = {"interface": rendezvous.interface, "disturbed": watched.disturbed}
    return measured | about | {"operations": fitted}


def fit(points: list[dict], factor: float) -> dict:
    """seconds = latency + bytes * factor / bandwidth, by least squares of the logarithms' errors.

    So twice too fast is as wrong as twice too slow; relative errors would follow the fastest points.

    Adds to each point its bus bandwidth. latency in seconds; bandwidth in bytes per second, as nccl-tests' bus
    bandwidth, None if no point takes longer for its bytes; worst: by which share the slower of fitted and measured
    takes longer, at the worst point.
    """
    for point in points:
        point["bus_bandwidth"] = factor * point["bytes"] / point["seconds"]
    size, seconds = (np.array([point[name] for point in points], dtype=float) for name in ("bytes", "seconds"))

    def errors(unknown: np.ndarray) -> np.ndarray:
        return np.log((unknown[0] + unknown[1] * size) / seconds)

    start = np.array([seconds.min(), seconds[size.argmax()] / size.max()])
    latency, per_byte = least_squares(errors, start, bounds=(0, np.inf), x_scale=start, xtol=1e-12, ftol=1e-12).x
    seen = per_byte * size.max() > NEGLIGIBLE * seconds.min()
    return {
        "latency": float(latency),
        "bandwidth": factor / float(per_byte) if seen else None,
        "worst": float(np.exp(np.abs(errors(np.array([latency, per_byte]))).max()) - 1),
    }


def save(results: Path, measured: list[dict]) -> Path:
    """Write what was measured into a results folder; returns the file."""
    file = paths.network_file(results)
    write_json(file, {"measured": measured})
    return file


def all_of(config: Config, results: Path, ranks, backend, largest: int, say: Callable[[str], None]) -> list[dict]:
    """Measure every operation with each number of ranks, and write it into the results folder."""
    measured = []
    for row in rows(config, ranks, backend):
        number = row.hardware.processes
        say(f"{number} ranks, {row.hardware.backend}, {row.hardware.device}: {', '.join(BUS)}")
        folder = paths.network_file(results).parent / f"n{number}"
        measured.append(measure(row, folder, sizes(largest), list(BUS)))
    save(results, measured)
    return measured
