"""dataparallel: nn.DataParallel, one process that scatters each batch over all GPUs and gathers what they compute.

Advantages: one line around the model; no launcher, no process group.
Limits: one Python process for all GPUs, whose weights it copies to the others in each step; one machine only. PyTorch
advises DistributedDataParallel instead.
On a CPU: without a GPU, nn.DataParallel passes the batch on to the model (torch/nn/parallel/data_parallel.py): this is
single with a wrapper, and the report says so.
"""

import torch

from lockstep.strategies import single

ONE_DEVICE_ON = ("cpu",)
OPTIONS = {
    "nodes": {
        "type": "integer",
        "const": 1,
        "default": 1,
        "description": "nn.DataParallel is one process, and can't span machines.",
    },
}


class Strategy(single.Strategy):
    def __init__(self, settings):
        super().__init__(settings)
        self.processes = 1  # for all devices

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        if self.world.device.type == "cuda":
            self.model = torch.nn.DataParallel(model, device_ids=list(range(self.hardware["processes"])))
        else:
            self.model = torch.nn.DataParallel(model)
            self.notes.append("nn.DataParallel passes through on a CPU: this is single with a wrapper")

    def live(self):
        return {"processes": max(1, len(self.model.device_ids))}

    @staticmethod
    def to_state_dict(folder):
        state = single.Strategy.to_state_dict(folder)
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}
