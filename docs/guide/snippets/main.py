import os

import torch.distributed as dist
from accelerate import PartialState

state = PartialState(cpu=True)
where = f"rank {os.environ['RANK']}, machine {os.environ['GROUP_RANK']}, local rank {os.environ['LOCAL_RANK']}"
print(f"{where}: is_main_process {state.is_main_process}, is_local_main_process {state.is_local_main_process}")
dist.destroy_process_group()
