import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    time.sleep(1)  # it is late

gradient = torch.tensor([1.0 + rank])
work = dist.all_reduce(gradient, async_op=True)  # returns at once
done = work.is_completed()
# Meanwhile, compute with anything but `gradient`.
other = torch.ones(100, 100) @ torch.ones(100, 100)
work.wait()
if rank == 0:
    print(f"done at once: {done}; after wait: {work.is_completed()}, {gradient.item()}")
dist.destroy_process_group()
