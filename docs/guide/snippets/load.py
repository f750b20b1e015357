import os
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, file, mib = dist.get_rank(), Path(f"weights-{os.environ['MASTER_PORT']}.pt"), 2**20
if rank == 0:
    torch.save(torch.ones(50 * mib), file)  # 200 MiB


def broadcast():
    weights = torch.load(file) if rank == 0 else torch.empty(50 * mib)
    dist.broadcast(weights, src=0)
    return weights


def measure(name, load):
    dist.barrier()
    time.sleep(0.2)  # a thread of gloo's gives back what was received before
    process, began = psutil.Process(), time.perf_counter()
    read, held = process.io_counters().read_chars, process.memory_full_info().uss
    weights = load()
    right = bool(weights[-1] == 1)
    seconds = time.perf_counter() - began
    read, held = process.io_counters().read_chars - read, process.memory_full_info().uss - held
    size = f"reads {read / mib:.0f} MiB, holds {50 * round(held / mib / 50)} MiB of its own"
    print(f"{name}, rank {rank}: {right}; {size}; {seconds:.2f} s", flush=True)


measure("rank 0 loads and broadcasts", broadcast)
measure("each loads", lambda: torch.load(file))
measure("each maps", lambda: torch.load(file, mmap=True))
dist.barrier()
if rank == 0:
    file.unlink()
dist.destroy_process_group()
