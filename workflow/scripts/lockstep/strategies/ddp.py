"""ddp: DistributedDataParallel, one process per device; gradients are averaged while backward still runs.

Started by torchrun, or by its deprecated predecessor torch.distributed.launch (`launcher: launch`).
"""

import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.hardware import World, free_port
from lockstep.strategies import single

OPTIONS = {
    "launcher": {
        "enum": ["torchrun", "launch"],
        "default": "torchrun",
        "description": "torchrun, or the deprecated torch.distributed.launch",
    },
    "gradient_as_bucket_view": {
        "type": "boolean",
        "default": True,
        "description": "let gradients live in the buckets that are sent, which saves a copy of them in each step",
    },
}


class Strategy(single.Strategy):
    def launch(self, script, folder):
        module = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}[self.options["launcher"]]
        port = free_port(self.hardware["port"])
        processes = ["--nproc-per-node", str(self.hardware["processes"]), "--max-restarts", "0"]
        address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [sys.executable, "-m", module, *processes, *address, str(script), str(folder)]

    def start(self, **rendezvous):
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device(self.hardware["device"])
        if device.type == "cuda":
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=self.hardware["timeout"])
        dist.init_process_group(self.hardware["backend"], timeout=timeout, **rendezvous)
        self.world = World(dist.get_rank(), local_rank, dist.get_world_size(), device, dist.get_backend())
        return self.world

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.model = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=self.options["gradient_as_bucket_view"],
            # By default it sends all buffers in every forward pass. BERT's are position numbers, which never change.
            broadcast_buffers=any(buffer.is_floating_point() for buffer in self.model.buffers()),
        )

    def backward(self, loss, last):
        with contextlib.nullcontext() if last else self.model.no_sync():
            super().backward(loss, last)

    def all_gather(self, tensor):
        gathered = [torch.empty_like(tensor) for _ in range(self.world.size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def save(self, folder):
        if self.world.rank == 0:  # every rank holds the same weights
            super().save(folder)

    @staticmethod
    def to_state_dict(folder):
        state = single.Strategy.to_state_dict(folder)
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}

    def stop(self):
        dist.destroy_process_group()
