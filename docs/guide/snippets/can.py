"""Try what each backend can do on this machine, with two processes: python can.py

Each trial has processes of its own, because a backend that can't do it may raise, wait for ever, or end its process.
"""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NO = 3  # the exit code of a process in which the trial went wrong
SECONDS = 30  # a trial that takes longer counts as one that waits for ever
AVAILABLE = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "ucc": dist.is_ucc_available()}


def send_recv(mine, rank):
    dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0)
    return mine, 1


def broadcast(mine, rank):
    dist.broadcast(mine, 0)
    return mine, 1


def reduce(mine, rank):
    dist.reduce(mine, 0)
    return (mine, 3) if rank == 0 else (mine, mine)


def all_reduce(mine, rank):
    dist.all_reduce(mine)
    return mine, 3


def all_reduce_average(mine, rank):
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    return mine, 1.5


def all_reduce_of_bfloat16(mine, rank):
    mine = mine.bfloat16()
    dist.all_reduce(mine)
    return mine, 3


def gather(mine, rank):
    everyone = [torch.zeros_like(mine) for _ in range(2)]
    dist.gather(mine, everyone if rank == 0 else None, 0)
    return (everyone[1], 2) if rank == 0 else (mine, mine)


def scatter(mine, rank):
    dist.scatter(mine, [mine + 1, mine + 2] if rank == 0 else None, 0)
    return mine, 2 + rank


def all_gather(mine, rank):
    everyone = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    return everyone[1], 2


def reduce_scatter(mine, rank):
    part = torch.zeros_like(mine)
    dist.reduce_scatter(part, [mine, mine + 10])
    return part, 3 + 20 * rank


def all_to_all(mine, rank):
    theirs = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_to_all(theirs, [mine, mine + 10])
    return theirs[1], 2 + 10 * rank


def barrier(mine, rank):
    dist.barrier()
    return mine, mine


TRIALS = (send_recv, broadcast, reduce, all_reduce, all_reduce_average, all_reduce_of_bfloat16, gather, scatter)
TRIALS += (all_gather, reduce_scatter, all_to_all, barrier)


def work(rank, trial, backend, device, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the messages of libraries
    try:
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds=2 * SECONDS))
        got, expected = trial(torch.tensor([1.0 + rank], device=device), rank)
        right = bool((got == expected).all())
    except Exception:
        right = False
    sys.exit(0 if right else NO)


def tried(trial, backend, device):
    """`yes`, or how it failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")  # safe, because CUDA has not been initialised in this process
    ranks = [context.Process(target=work, args=(rank, trial, backend, device, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(SECONDS)
    waiting = [rank for rank in ranks if rank.is_alive()]
    for rank in waiting:
        rank.kill()
        rank.join()
    if waiting:
        return "waits"
    codes = {rank.exitcode for rank in ranks}
    return "ends its process" if codes - {0, NO} else "no" if NO in codes else "yes"


if __name__ == "__main__":
    devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
    columns = [(backend, device) for backend, there in AVAILABLE.items() if there for device in devices]
    print("| |", " | ".join(f"{backend}, {device}" for backend, device in columns), "|")
    print("|---|" + "---|" * len(columns))
    for trial in TRIALS:
        answers = (tried(trial, *column) for column in columns)
        print(f"| `{trial.__name__}` |", " | ".join(answers), "|", flush=True)
