"""What all strategies share whose processes form a PyTorch process group: joining it, gathering through it, leaving it.

A single process forms a group too, unless a strategy says otherwise (`joins_group`). Without a group everything is as
in `single`.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.config.hardware import Hardware, World
from lockstep.model import batch_norm
from lockstep.strategies import single

CONNECTING = 2**22  # numbers, as many as a bucket of gradients may hold: NCCL chooses its algorithm by the size


class Strategy(single.Strategy):
    def joins_group(self) -> bool:
        """Whether there is a group in this run."""
        return True

    def start(self, **rendezvous):
        if not self.joins_group():
            return super().start()
        local_rank = int(os.environ["LOCAL_RANK"])
        device = take_device(self.hardware, local_rank)
        if not dist.is_initialized():  # Ray Train has joined it already
            timeout = timedelta(seconds=self.hardware.timeout)
            dist.init_process_group(self.hardware.backend, timeout=timeout, **rendezvous)
        self.world = World(dist.get_rank(), local_rank, dist.get_world_size(), device, dist.get_backend())
        return self.world

    def synchronised(self, model):
        if not self.options.get("sync_batchnorm") or not self.joins_group():
            return model
        if self.world.device.type == "cuda" and self.ranks_per_replica == 1:  # else it counts samples once per rank
            return batch_norm.synchronised(model, torch.nn.SyncBatchNorm.convert_sync_batchnorm)
        return batch_norm.synchronised(model, batch_norm.shared(self.sum_over_replicas))

    def sum_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all replicas' tensors, on each rank; the backward pass sums gradients in the same way.

        Ranks that hold a replica together have equal tensors, and the sum over ranks counts each of them.
        """
        return sum_over_ranks(tensor) / self.ranks_per_replica

    def connect(self):
        if self.joins_group() and self.world.device.type == "cuda":  # NCCL opens its channels at the first collective
            dist.all_reduce(torch.zeros(CONNECTING, device=self.world.device))

    def all_gather(self, tensor):
        if not self.joins_group():
            return super().all_gather(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world.size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def stop(self):
        if self.joins_group():
            dist.destroy_process_group()


def take_device(hardware: Hardware, local_rank: int) -> torch.device:
    """Make this rank's device the current one, and return it.

    Frameworks read LOCAL_RANK as the number of their GPU, so it is set to that number.
    """
    if hardware.device != "cuda":
        return torch.device(hardware.device)
    device = torch.device("cuda", hardware.gpu_of(local_rank))
    os.environ["LOCAL_RANK"] = str(device.index)
    torch.cuda.set_device(device)
    return device


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, on each rank; the backward pass sums gradients in the same way."""
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(tensor)


def average(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over a group of ranks, by a single all-reduce for all of them."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
