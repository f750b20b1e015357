"""fsdp: FSDP2 (`fully_shard`): every rank keeps a share of each parameter, its gradient and its optimizer state.

A layer's parameters are gathered just before it runs and freed after it; its gradients are averaged into shards
(Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054, stage 3).

Advantages: models larger than one device's memory, within PyTorch; checkpoints are sharded too.
Limits: parameters are sent in the forward and in the backward pass: half as much again as ddp sends.
On a CPU: works through gloo, and agrees with ddp; slower than it, so a test of function.
"""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lockstep.strategies import ddp

INHERITS = ("launcher",)
OPTIONS = {
    "reshard_after_forward": {
        "type": "boolean",
        "default": True,
        "description": "free a layer's gathered parameters after its forward pass: less memory, more sent",
    },
    "mixed_precision": {
        "enum": ["autocast", "policy"],
        "default": "autocast",
        "description": "bf16 by autocast, as in other rows, or by FSDP's policy, which gathers in bf16 too",
    },
}
REFUSED = [
    ({"precision": ["fp16"]}, "FSDP2 has no gradient scaler of its own; take precision: bf16"),
]


class Strategy(ddp.Strategy):
    def prepare(self, model, make_optimizer):
        super(ddp.Strategy, self).prepare(model, lambda _: None)
        policy = MixedPrecisionPolicy()
        if self.precision == "bf16" and self.options["mixed_precision"] == "policy":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding = {
            "mesh": init_device_mesh(self.world.device.type, (self.world.size,)),
            "mp_policy": policy,
            "reshard_after_forward": self.options["reshard_after_forward"],
        }
        for stack in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
            for layer in stack:
                fully_shard(layer, **sharding)
        fully_shard(model, **sharding)
        self.optimizer = make_optimizer(model)  # of the shards

    def autocast(self):
        if self.options["mixed_precision"] == "policy":
            return torch.autocast(self.world.device.type, enabled=False)
        return super().autocast()

    def backward(self, loss, last):
        self.model.set_requires_gradient_sync(last)
        super(ddp.Strategy, self).backward(loss, last)

    def gradient_norm(self):
        return super().gradient_norm().full_tensor()

    def live(self):
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        groups = [group for module in sharded for group in module._get_fsdp_state()._fsdp_param_groups]
        return {
            "backend": self.world.backend,
            "sharded_modules": len(sharded),
            "reshard_after_forward": all(group.post_forward_mesh_info is not None for group in groups),
        }

    def state_dict(self):
        return {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}

    def save(self, folder):
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=folder)

    @staticmethod
    def to_state_dict(folder):
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process loads it is meant
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}
