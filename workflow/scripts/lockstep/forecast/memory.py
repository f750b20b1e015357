"""The GPU memory that a row needs, counted by its own strategy on GPUs that compute nothing (rank/sizing.py)."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.config import reading
from lockstep.config.configuration import NOTHING_BESIDES, Config
from lockstep.config.launchers import rank_variables
from lockstep.config.machine import cpu_cores
from lockstep.config.row import Row
from lockstep.config.sections import Profile
from lockstep.config.settings import Settings
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, write_json
from lockstep.forecast.alone import plan_of
from lockstep.forecast.clusters import MEMORY
from lockstep.forecast.model import Model
from lockstep.forecast.model import read as read_model
from lockstep.run.progress import Progress
from lockstep.script import pretended

TIMEOUT = 900.0  # seconds for the steps of one rank
SMALL = [1, 2, 4, 16]  # micro-batches that show how memory grows
WORKSPACE = 32 * 2**20  # bytes that cuBLAS takes on Hopper, for each thread that multiplies matrices
MOST = 2**14  # the largest micro-batch that is tried
MOST_GPUS = 16  # the most GPUs that a pretended machine can have
FARTHEST = 4  # a size is at most this many times the largest one before it, since small sizes may show no growth
# Bytes that PyTorch's allocator takes at once for tensors of 1 to 10 MiB. Ranks that wait for each other free tensors
# in another order than the single rank that is counted, and may then need one more such segment.
SEGMENT = 20 * 2**20
RESERVE = "1.5GB"  # kept free for the CUDA context, NCCL and kernels, which are not counted
# Options of local_sgd with which it averages weights in each of the few steps that are counted, since averaging copies
# all weights.
AT_ONCE = {"every": 1, "local_after": 0}
PROGRAM = """import sys
from pathlib import Path
from lockstep.rank import main, sizing
main.main(Path(sys.argv[1]), sizing.SizedSession)"""


@dataclass(frozen=True)
class Peak:
    """The peak memory of one GPU, in bytes, in a step with micro-batches of `samples` on each replica.

    allocated: the memory of tensors (torch.cuda.max_memory_allocated); reserved: that of the segments that hold them.
    """

    samples: int
    allocated: int
    reserved: int
    parameters: int = 0  # of the model


def free(memory: str, reserve: str) -> int:
    """The bytes of a GPU that a row may use: its memory (24GB), less a reserve (1.5GB) and one segment.

    Raises BadInput if one of the two can't be read, or if nothing is left.
    """
    left = int(MEMORY.read(memory, "--memory")) - int(replace(MEMORY, least=0).read(reserve, "--reserve")) - SEGMENT
    if left <= 0:
        raise BadInput(f"--reserve {reserve}: nothing of {memory} would be left. Lower it.")
    return left


def machine(gpus: int) -> dict[str, str]:
    """The keys of `hardware` for one machine with this many GPUs, which this machine need not have."""
    keys = {"device": "cuda", "node_gpus": str(gpus), "processes": str(gpus), "nodes": "1", "node_cores": str(2 * gpus)}
    return keys | {"threads": "1", "gpus": "null", "oversubscribe": "false"}


def on_gpus(config: Config, gpus: int) -> Config:
    """The configuration with the hardware of one machine with this many GPUs."""
    elsewhere = {"hosts": None, "interface": None, "endpoint": None}
    return reading.parse(config.source | {"hardware": config.source["hardware"] | elsewhere | machine(gpus)})


def countable(row: Row) -> Row:
    """The row with a global batch of its own: one sample for each replica and micro-batch.

    Raises BadInput if its memory can't be counted.
    """
    train = replace(row.train, global_batch=row.replicas * row.train.accumulation, device_batch=None)
    row = replace(row, train=train)
    row.refuse()
    why = row.uncounted
    if row.hardware.processes_per_node > row.hardware.gpu_count:
        why = "several of its ranks share a GPU"
    elif row.train.attention == "cudnn":
        why = "how much cuDNN's attention needs is not known"
    if why:
        raise BadInput(why)
    return row


def peaks(
    row: Row, model: Model, sizes: list[int], capacity: int | None = None, workspace: int = WORKSPACE
) -> list[Peak]:
    """Count the memory of a row's first rank for each of these sizes of a micro-batch, in turn.

    It ends before the first size that needs more than `capacity` bytes. workspace: the bytes that cuBLAS takes for each
    thread. Raises RunFailed with the rank's message if it fails for another reason.
    """
    settings = replace(_settings(row), dropout=model.dropout)
    replicas = row.replicas * row.train.accumulation
    with _prepared(settings, model, [size * replicas for size in sizes]) as folder:
        failed = _run(settings, folder, capacity, workspace)
        result = folder / paths.PEAKS
        counted = read_json(result) if result.is_file() else {"steps": []}
    if failed and "out of memory" not in failed:
        raise RunFailed(failed)
    return [
        Peak(step["samples"] // replicas, step["allocated"], step["reserved"], counted["parameters"])
        for step in counted["steps"]
    ]


def of_batch(row: Row, model: Model, samples: int, capacity: int | None) -> tuple[Peak, bool]:
    """The memory that a micro-batch of this many samples needs, and whether it fits into `capacity` bytes.

    PyTorch's allocator may manage with fewer segments than it takes where there is room. So if only its tensors fit,
    the micro-batch is run again with that capacity.
    """
    (peak,) = peaks(row, model, [samples])
    if capacity is None or peak.reserved <= capacity:
        return peak, True
    return peak, peak.allocated <= capacity and bool(peaks(row, model, [samples], capacity))


def of_rows(config: Config, rows: list[Row], results: Path, capacity: int | None) -> dict[str, dict]:
    """The memory that the widest micro-batch of each row's plan needs on a GPU, by the row's name.

    fits: whether that is within `capacity` bytes. why: the reason if the memory can't be counted, otherwise empty.
    """
    try:
        pretended.variables(1)  # compiled here, once
    except BadInput as error:
        return {row.name: {"why": str(error)} for row in rows}
    there = on_gpus(config, max(row.hardware.devices for row in rows)).rows
    weights = paths.data_folder(results) / paths.WEIGHTS

    def count(row: Row) -> dict:
        try:
            # The row keeps its own number of devices, on which sharded memory depends; `there` has enough for any row.
            asked = there[row.name]
            own = replace(asked.asked, processes=row.hardware.devices, nodes=1)
            asked = countable(replace(asked, asked=own))
            plan = plan_of(config, row, results)
            shape = read_model(weights, config.task, int(plan.widths.max()), config.data.image_size)
            samples = math.ceil(int(np.diff(plan.starts).max()) / (row.replicas * row.train.accumulation))
            peak, fits = of_batch(asked, replace(shape, dropout=config.model.dropout), samples, capacity)
        except (BadInput, RunFailed) as error:
            return {"why": str(error)}
        return {"why": "", "samples": samples, "allocated": peak.allocated, "reserved": peak.reserved, "fits": fits}

    with ThreadPoolExecutor(max(1, cpu_cores() // 2)) as pool:
        return dict(zip([row.name for row in rows], pool.map(count, rows), strict=True))


def largest(row: Row, model: Model, capacity: int) -> tuple[int, list[Peak]]:
    """The largest micro-batch that fits into `capacity` bytes on a row's rank (0: none does), and what was counted.

    Sizes are tried, each in a process of its own, until one fits and the next does not, since fragmented memory may be
    too little although its sum is enough. A straight line through the sizes that were counted says which to try.
    """
    counted = peaks(row, model, SMALL)
    fits = max((peak.samples for peak in counted if peak.reserved <= capacity), default=0)
    does_not = MOST + 1
    while does_not - fits > 1:
        size = _next(counted, capacity, fits, does_not)
        if tried := peaks(row, model, [size], capacity):
            fits = size
            counted += tried
        else:
            does_not = size
    return fits, counted


def _next(counted: list[Peak], capacity: int, fits: int, does_not: int) -> int:
    """The size to try next, between one that fits and one that does not."""
    fixed, each = line(counted)
    most = FARTHEST * max(peak.samples for peak in counted)
    size = min(most, int((capacity - fixed) / each)) if each > 0 else most
    if size >= does_not:  # the line was wrong, or memory was fragmented
        size = max(does_not - max(1, does_not // 20), (fits + does_not) // 2)
    return min(max(size, fits + 1), does_not - 1)


def line(counted: list[Peak]) -> tuple[float, float]:
    """The bytes that do not depend on the batch, and the bytes for each of its samples.

    They are those of a line through the largest size and the next one that is at most half as large, since rounded
    blocks would distort a line through neighbours.
    """
    larger = max(counted, key=lambda peak: peak.samples)
    smaller = max((peak for peak in counted if 2 * peak.samples <= larger.samples), key=lambda peak: peak.samples)
    each = (larger.allocated - smaller.allocated) / (larger.samples - smaller.samples)
    return larger.allocated - each * larger.samples, each


def _settings(row: Row) -> Settings:
    """A row's settings for training steps alone, without anything that is done between or after them."""
    train = replace(row.train, device_batch=None, epochs=1, max_steps=None, **NOTHING_BESIDES)
    hardware = replace(row.hardware, workers=0, pin_memory=False, threads=1)
    profile = Profile(steps=0, trace=False)
    options = row.options | {name: value for name, value in AT_ONCE.items() if name in row.options}
    return replace(row.settings(), options=options, train=train, hardware=hardware, profile=profile, warm=False)


@contextmanager
def _prepared(settings: Settings, model: Model, sizes: list[int]) -> Iterator[Path]:
    """A temporary folder with everything that a rank reads. sizes: the size of the global batch in each step."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        folder = Path(temporary)
        (folder / paths.WEIGHTS).mkdir()
        (folder / paths.RANKS).mkdir()
        write_json(folder / paths.WEIGHTS / "config.json", model.config)
        write_json(folder / paths.SIZES, {"sizes": sizes, "length": model.length})
        write_json(folder / paths.SETTINGS, asdict(replace(settings, data=str(folder))))
        paths.node_folder(folder, 0).mkdir(parents=True, exist_ok=True)
        Progress(folder, 0, settings.hardware.processes)
        yield folder


def _run(settings: Settings, folder: Path, capacity: int | None, workspace: int) -> str:
    """Run the rank. Returns the reason if it failed, otherwise an empty text."""
    gpus = min(settings.hardware.gpu_count, MOST_GPUS)  # it uses the first, or all in one process
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_PRETENDED", "CUDA_"))
    }
    variables |= pretended.variables(gpus) | {"LOCKSTEP_PRETENDED_SIZES": "1"}
    variables["LOCKSTEP_PRETENDED_WORKSPACE"] = str(workspace)
    if capacity is not None:
        variables["LOCKSTEP_PRETENDED_MEMORY"] = str(capacity)
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (pretended.PARTS, paths.SCRIPTS)))
    # No process listens at this address, since a single rank waits for no other.
    variables |= rank_variables(0, settings.hardware.processes, "127.0.0.1", 29500) | {"RENDEZVOUS": "env://"}
    program = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(
        program, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, said = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RunFailed(f"it was not done after {TIMEOUT:.0f} seconds") from None
        except BaseException:
            process.kill()
            raise
    if not process.returncode:
        return ""
    reason = paths.rank_error(folder, 0)
    return read_json(reason)["message"] if reason.is_file() else said.strip()[-2000:] or "it ended without a word"
