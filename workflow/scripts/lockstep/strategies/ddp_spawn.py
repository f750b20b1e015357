"""ddp_spawn: DistributedDataParallel whose processes are started by a Python function, torch.multiprocessing.spawn.

The processes find each other through a shared file, or through a TCP port of the first machine (`rendezvous: tcp`).

Advantages: starts from plain Python, for example within a larger program.
Limits: on each machine the program must be told which ranks are its own; every process imports the program again; no
failed process is restarted, and the number of threads must be set by hand.
On a CPU: as ddp.
"""

import os
import runpy
import signal
import sys
from multiprocessing import resource_tracker

import torch

from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def start(self):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return super().start(init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world_size)


OPTIONS = {
    "launcher": {
        "enum": ["spawn"],
        "default": "spawn",
        "description": "torch.multiprocessing.spawn",
    },
    "rendezvous": {
        "enum": ["file", "tcp"],
        "default": "file",
        "description": "how the processes find each other: through a shared file (file://) or a TCP port (tcp://)",
    },
}
SENDS = "ddp"


def process(local_rank: int, script: str, folder: str, address: str, first: int, world_size: int) -> None:
    """Run one rank: the same script that other launchers start. `first` is the first rank on this machine."""
    os.environ |= {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    os.environ["RENDEZVOUS"] = address
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, and keep the signal mask as it is.

    multiprocessing would start the tracker by itself; that unblocks SIGTERM, which may be blocked here on purpose.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


if __name__ == "__main__":
    start_resource_tracker()
    *arguments, first, here, world_size = sys.argv[1:]
    torch.multiprocessing.spawn(process, args=(*arguments, int(first), int(world_size)), nprocs=int(here))
