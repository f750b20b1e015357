"""Times a process group's collectives by the size of the message: one rank, started by lockstep/network.py.

Bus bandwidth is defined as in nccl-tests: the bytes of a message divided by its time, times a factor that makes it the
load of the links for every operation and every number of ranks (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lockstep.config.hardware import Hardware
from lockstep.files import read_json, write_json
from lockstep.run.progress import Progress
from lockstep.strategies import _group

ASKED, MEASURED = "asked.json", "measured.json"
BATCHES = 5  # batches of operations, each timed as a whole; their median counts
SECONDS = 0.05  # the intended time of a batch
MOST = 200  # the most operations in a batch
COMPUTING = 0.002  # the intended seconds of computing before an operation, as before a layer's message in a step
# The factor of the bus bandwidth, by operation, for n ranks.
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}


def main(folder: Path) -> None:
    """Measure what FOLDER/asked.json asks for, as this rank; rank 0 writes FOLDER/measured.json."""
    asked = read_json(folder / ASKED)
    device = _group.take_device(Hardware(**asked["hardware"]), int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(asked["backend"], timeout=timedelta(seconds=asked["hardware"]["timeout"]))
    began = time.perf_counter()
    progress = Progress(folder)
    compute = computing(device)
    found: dict[str, list[dict]] = {}
    for name in asked["operations"]:
        found[name] = []
        for size in asked["sizes"]:
            found[name].append({"bytes": size} | measure(name, size, device, compute))
            progress.table[dist.get_rank(), 1] += 1  # so that it is not taken for hung
    if dist.get_rank() == 0:
        window = [began, time.perf_counter()]
        about = {"ranks": dist.get_world_size(), "backend": dist.get_backend(), "device": device.type, "window": window}
        write_json(folder / MEASURED, about | {"operations": found})
    dist.destroy_process_group()


def measure(name: str, size: int, device: torch.device, compute: Callable[[], None]) -> dict:
    """The seconds of one operation on `size` bytes: the median over BATCHES batches, the shortest and the longest.

    after_computing: the same for operations that ranks begin when they have computed, as in a step. It is what a batch
    takes longer than one that only computes. Ranks that compute don't end at the same moment, and the fastest waits
    for the slowest; so a small message may take twice as long there as in a row of messages.

    size: the bytes that each rank has at the end (all_gather), or at the beginning (all other operations).
    """
    work = operation(name, size, device)

    def compute_and_work() -> None:
        compute()
        work()

    for _ in range(2):
        work()
    once = _slowest(_timed(work, 1, device), device)
    batches = [_batch(work, once, device) for _ in range(BATCHES)]
    longer = [
        max(0.0, _batch(compute_and_work, COMPUTING + once, device) - _batch(compute, COMPUTING, device))
        for _ in range(BATCHES)
    ]
    repeats = BATCHES * _number(once)
    return _middle(batches) | {"repeats": repeats, "after_computing": _middle(longer)}


def _middle(seconds: list[float]) -> dict:
    return {"seconds": float(np.median(seconds)), "low": min(seconds), "high": max(seconds)}


def _batch(work: Callable[[], None], once: float, device: torch.device) -> float:
    """The seconds of one call in a batch of them, where one takes about `once` seconds."""
    return _slowest(_timed(work, _number(once), device), device) / _number(once)


def _number(once: float) -> int:
    return int(np.clip(SECONDS / once, 1, MOST))


def computing(device: torch.device) -> Callable[[], None]:
    """A function that computes for about COMPUTING seconds, the same work on every rank."""
    matrix = torch.ones(256, 256, device=device)

    def products(number: int) -> None:
        for _ in range(number):
            matrix @ matrix

    products(20)
    once = _slowest(_timed(lambda: products(100), 1, device), device) / 100
    number = max(1, round(COMPUTING / once))
    return lambda: products(number)


def operation(name: str, size: int, device: torch.device) -> Callable[[], None]:
    """The operation as a function, to be called on every rank. `send` goes from rank 0 to rank 1."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = max(ranks, size // 4 // ranks * ranks)  # float32 numbers, divisible by the number of ranks
    whole = torch.ones(numbers, device=device)
    part = torch.ones(numbers // ranks, device=device)

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": send,
    }[name]


def _timed(work: Callable[[], None], number: int, device: torch.device) -> float:
    """The seconds of `number` operations, from a barrier of all ranks until this rank has finished."""
    dist.barrier()
    _wait(device)
    began = time.perf_counter()
    for _ in range(number):
        work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    """The longest of all ranks' times, because a rank that only sends finishes before the others have received."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # as in rank/main.py: with gloo the interpreter's own exit sometimes hangs
