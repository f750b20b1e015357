import os

import torch

rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
# 1. The environment, before CUDA starts: CUDA_VISIBLE_DEVICES=6,7 torchrun ..., and cuda:0 is the machine's 6.
print(f"rank {rank} sees {gpus} GPUs")
if gpus:
    print(f"rank {rank}, nothing chosen: {torch.ones(1, device='cuda').device}")
    # 2. By name, wherever something is made or moved.
    print(f"rank {rank}, by name: {torch.ones(1).to(f'cuda:{rank % gpus}').device}")
    # 3. For this process, once, before anything is on a GPU.
    torch.cuda.set_device(rank % gpus)
    print(f"rank {rank}, set_device: {torch.ones(1, device='cuda').device}")
else:
    print(f"rank {rank}: no GPU; it would take cuda:{rank}, and without a choice cuda:0 as all others")
