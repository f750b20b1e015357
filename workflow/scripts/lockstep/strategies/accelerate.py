"""accelerate: Hugging Face Accelerate over DistributedDataParallel, started by `accelerate launch` or torchrun.

Each rank is fed its own share of the plan. Accelerate's own data loaders repeat samples to even out ranks, or with
`split_batches` silently drop a batch of another length.

Advantages: a plain loop becomes a distributed one by a few lines; a configuration file chooses how.
Limits: what a run does depends on that file and on the environment; its data loaders change the samples, see above.
On a CPU: as ddp; `accelerate launch --cpu` would start one process only, so the launcher is told of GPUs and the
Accelerator of the CPU.
"""

import contextlib
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.hardware import World
from lockstep.errors import RunFailed
from lockstep.model import models
from lockstep.strategies import ddp
from lockstep.strategies._group import take_device


class Strategy(ddp.Strategy):
    def start(self):
        names = ("gradient_as_bucket_view", "find_unused_parameters")
        options = {name: self.options[name] for name in names} | {"bucket_cap_mb": self.options["bucket_mb"]}
        local_rank = int(os.environ["LOCAL_RANK"])
        take_device(self.hardware, local_rank)
        precision = "no" if self.precision == "fp32" else self.precision
        self.accelerator = Accelerator(
            cpu=self.hardware.device == "cpu",
            mixed_precision=None if self.options["config_file"] else precision,  # None: what the file says
            kwargs_handlers=[
                DistributedDataParallelKwargs(**options),
                InitProcessGroupKwargs(self.hardware.backend, timeout=timedelta(seconds=self.hardware.timeout)),
            ],
        )
        self._check(precision)
        self.world = World(
            self.accelerator.process_index,
            local_rank,
            self.accelerator.num_processes,
            self.accelerator.device,
            torch.distributed.get_backend(),
        )
        return self.world

    def _check(self, precision):
        """Hold what the environment and a file of the user's own have made of the Accelerator against the row."""
        accelerator = self.accelerator
        wanted = {
            "num_processes": self.processes,
            "mixed_precision": precision,
            "distributed_type": "MULTI_CPU" if self.hardware.device == "cpu" else "MULTI_GPU",
            "dynamo_backend": "NO",
            "gradient_accumulation_steps": 1,  # by which backward would divide the loss
        }
        live = {
            "num_processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "distributed_type": accelerator.distributed_type.value,
            "dynamo_backend": accelerator.state.dynamo_plugin.backend.value,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        }
        for key, value in wanted.items():
            if live[key] != value:
                source = self.options["config_file"] or "the environment"
                raise RunFailed(f"{key}: the row needs {value}, and Accelerate has {live[key]}, by {source}")

    def prepare(self, model, make_optimizer):
        self.module = model.to(self.world.device)
        self.accelerator.ddp_handler.broadcast_buffers = models.has_changing_buffers(model)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model))
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)

    def autocast(self):
        return self.accelerator.autocast()

    def backward(self, loss, last):
        self.accelerator.backward(loss)

    def averaging(self, last):
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def step(self):
        if self.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self):
        wrapped = isinstance(self.model, DistributedDataParallel)  # one GPU alone is not
        return {"backend": self.world.backend} | (ddp.live_options(self.model) if wrapped else {})

    def save(self, folder):
        self.accelerator.save_state(str(folder))

    @staticmethod
    def to_state_dict(folder):
        return load_file(folder / "model.safetensors")


INHERITS = ("gradient_as_bucket_view", "bucket_mb", "find_unused_parameters", "sync_batchnorm")
OPTIONS = {
    "launcher": {
        "enum": ["accelerate", "torchrun", "launch", "hand"],
        "default": "accelerate",
        "description": "accelerate launch with a configuration file of its own; torchrun; the deprecated"
        " torch.distributed.launch; or hand, as in ddp",
    },
    "config_file": {
        "type": ["string", "null"],
        "default": None,
        "description": "a configuration file of yours for accelerate launch, as `accelerate config` writes them; where"
        " it contradicts the row, the row is refused. The port is the row's",
    },
}
NEEDS = {"accelerate": ("1.15.0", "make setup")}
REFUSED = [
    ({"precision": ["fp16"], "device": ["cpu"]}, "Accelerate has no fp16 there; take precision: bf16"),
]
