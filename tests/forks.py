"""Starts programs as torchrun would, as forks of one process that has imported PyTorch: a second for what takes ten.

python forks.py PROCESSES PROGRAM PORT ...: one after the other; each prints into PROGRAM.txt, with ".py" in its name.
"""

import os
import runpy
import sys

import psutil  # noqa: F401  (for what is started)
import torch.distributed
import torch.nn.parallel


def rank(number: int, processes: str, program: str, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "LOCAL_RANK": str(number)}
    os.environ |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.dup2(os.open(f"{program}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    fork = torch.multiprocessing.get_context("fork").Process
    for processes, program, port in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        ranks = [fork(target=rank, args=(number, processes, program, port)) for number in range(int(processes))]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
            if one.exitcode != 0:
                sys.exit(f"{program}: a rank ended with {one.exitcode}")
