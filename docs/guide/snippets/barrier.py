import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
rank, file = dist.get_rank(), Path(f"prepared-{os.environ['MASTER_PORT']}")

if rank == 0:
    time.sleep(1)  # rank 0 works: it downloads, say
    file.write_text("the data")
dist.barrier()  # without it rank 1 would find no file
print(f"rank {rank} has {file.read_text()}", flush=True)

dist.barrier()  # and without this one rank 0 might remove it first
if rank == 0:
    try:  # rank 1 never comes
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        print(str(error).partition("\n")[0].partition("]: ")[2], flush=True)
    file.unlink()
else:
    while file.exists():  # rank 1 works on; if it had ended, rank 0 would see a closed connection
        time.sleep(0.1)
