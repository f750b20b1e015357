"""fabric: Lightning Fabric over DistributedDataParallel. Fabric wraps model and optimizer; the loop stays ours.

Each rank is given its own share of the plan, because Fabric's own data loaders would give every rank the whole batches.
The package used here, `lightning_fabric`, is Fabric alone. `lightning.fabric` is the same code within the whole of
Lightning, and takes twice as long to import.

Advantages: one program for many strategies, precisions and devices, without giving up the loop.
Limits: its defaults must be known (on a CPU, `16-mixed` becomes bf16 with no more than a warning).
On a CPU: as ddp.
"""

import contextlib
from datetime import timedelta

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

from lockstep.config import precisions
from lockstep.config.hardware import World
from lockstep.model import models
from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def start(self):
        options = {name: self.options[name] for name in ("gradient_as_bucket_view", "find_unused_parameters")}
        options |= {"bucket_cap_mb": self.options["bucket_mb"]}
        hardware = self.hardware
        if gpus := hardware.gpu_count:  # each rank's GPU by name; given a number, Fabric wants one GPU per rank
            ranks = range(hardware.devices_per_node)
            options["parallel_devices"] = [torch.device("cuda", hardware.gpu_of(rank)) for rank in ranks]
        timeout = timedelta(seconds=hardware.timeout)
        self.fabric = Fabric(
            accelerator=hardware.device,
            devices=gpus or hardware.devices_per_node,
            num_nodes=hardware.nodes,
            strategy=DDPStrategy(process_group_backend=hardware.backend, timeout=timeout, **options),
            precision=precisions.of(self.precision).fabric,  # such as bf16-mixed
        )
        self.fabric.launch()
        backend = torch.distributed.get_backend()
        fabric = self.fabric
        self.world = World(fabric.global_rank, fabric.local_rank, fabric.world_size, fabric.device, backend)
        return self.world

    def set_up(self, model, make_optimizer):
        self.module = model
        self.fabric.strategy._ddp_kwargs["broadcast_buffers"] = models.has_changing_buffers(model)
        self.model, self.optimizer = self.fabric.setup(model, make_optimizer(model))
        self.scaler = getattr(self.fabric.strategy.precision, "scaler", None) or torch.amp.GradScaler(enabled=False)

    def autocast(self):
        return contextlib.nullcontext()  # the wrapped model has its own

    def backward(self, loss, last):
        self.fabric.backward(loss)

    def averaging(self, last):
        return self.fabric.no_backward_sync(self.model, enabled=not last)

    def step(self):
        if self.clip and self.scaler.is_enabled():
            # In fp16 Fabric's own clip refuses fused optimizers.
            self.scaler.unscale_(self.optimizer.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        elif self.clip:
            # By default Fabric checks that the norm is finite, and so waits for the GPU in each step.
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self):
        return {"backend": self.world.backend} | ddp.live_options(self.model._forward_module)

    def save(self, folder):
        self.fabric.save(folder / "checkpoint.pt", {"model": self.model})

    @staticmethod
    def to_state_dict(folder):
        return torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)["model"]


INHERITS = ("launcher", "gradient_as_bucket_view", "bucket_mb", "find_unused_parameters", "sync_batchnorm")
NEEDS = {"lightning-fabric": ("2.6.6", "make setup")}
SENDS = "ddp"  # it wraps the model in DistributedDataParallel
REFUSED = [
    ({"precision": ["fp16"], "device": ["cpu"]}, "on a CPU Fabric trains in bf16 instead; use precision: bf16"),
]
