import os

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

# What a script calls its batch size, and the number of batches per optimizer step.
BATCH_SIZE, ACCUMULATION = 6, 2

dist.init_process_group("gloo")
samples = range(48)
loader = DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples))
here = int(os.environ["LOCAL_WORLD_SIZE"])
if dist.get_rank() == 0:
    of_process = len(next(iter(loader)))
    print(f"at once: {of_process} on a process, {of_process * here} on this machine")
    print(f"in an optimizer step: {of_process * dist.get_world_size() * ACCUMULATION} over all")
    print(f"steps in an epoch: {len(loader) // ACCUMULATION}")
dist.destroy_process_group()
