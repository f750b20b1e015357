"""ddp: DistributedDataParallel, one process per device; gradients are averaged while the backward pass still runs.

Each process holds the whole model. Gradients travel in buckets, each sent as soon as it is full (Li et al. 2020,
arXiv:2006.15704). The processes are started by torchrun, by its deprecated predecessor torch.distributed.launch
(`launcher: launch`), or by you: with `launcher: hand` a run prints a command for each rank, with the four environment
variables that `env://` reads.

Advantages: the standard; little code, hardly any overhead, and communication is hidden behind the backward pass.
Limits: model, gradients and optimizer state must fit on each device.
On a CPU: gloo takes the place of NCCL. It needs cycles of the cores that compute, so little of it can be hidden.
"""

import contextlib

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.model import models
from lockstep.strategies import _group, single

HOOKS = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


class Strategy(_group.Strategy):
    def __init__(self, settings):
        super().__init__(settings)
        # An option that a strategy extending this one does not inherit (INHERITS) has its default.
        self.options = {name: option["default"] for name, option in OPTIONS.items()} | self.options

    @property
    def rehearses_average(self):
        return self.options["static_graph"]  # DDP learns the graph from the first gradients that it averages

    def wrap(self):
        self.model = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=self.options["gradient_as_bucket_view"],
            bucket_cap_mb=self.options["bucket_mb"],
            static_graph=self.options["static_graph"],
            find_unused_parameters=self.options["find_unused_parameters"],
            broadcast_buffers=models.has_changing_buffers(self.model),
        )
        if self.options["hook"] != "none":
            state, rank = None, self.options["powersgd_rank"]
            if self.options["hook"] == "powersgd":
                # By default PowerSGD does not compress its first 1000 steps; 2 is the least that it accepts.
                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, HOOKS[self.options["hook"]])

    def train(self, replay):
        with self.model.join() if self.options["join"] else contextlib.nullcontext():
            super().train(replay)

    def averaging(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def live(self):
        return {"backend": dist.get_backend()} | live_options(self.model)

    @staticmethod
    def to_state_dict(folder):
        state = single.Strategy.to_state_dict(folder)
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}


OPTIONS = {
    "launcher": {
        "enum": ["torchrun", "launch", "hand", "ray"],
        "default": "torchrun",
        "description": "torchrun; the deprecated torch.distributed.launch; or hand: the run prints a command for each"
        " rank, and waits until you have started them all in terminals of your own; or ray: Ray Train's TorchTrainer,"
        " on a Ray cluster that lasts as long as the run",
    },
    "rendezvous": {
        "enum": ["static", "c10d"],
        "default": "static",
        "description": "how torchrun's agents on several machines find each other: with `static` each machine has a"
        " fixed number; with `c10d` a store numbers them in the order in which they arrive",
    },
    "gradient_as_bucket_view": {
        "type": "boolean",
        "default": True,
        "description": "let gradients live in the buckets that are sent, which saves a copy of them in each step",
    },
    "bucket_mb": {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 25,
        "description": "gradients are sent in buckets of this many MiB, each as soon as backward has filled it",
    },
    "static_graph": {
        "type": "boolean",
        "default": False,
        "description": "promise that every step uses the same parameters, which lets DDP plan ahead",
    },
    "find_unused_parameters": {
        "type": "boolean",
        "default": False,
        "description": "look for parameters without a gradient in every step; needed only where there are some",
    },
    "hook": {
        "enum": ["none", "fp16", "bf16", "powersgd"],
        "default": "none",
        "description": "compress gradients before they are sent (torch.distributed.algorithms.ddp_comm_hooks)",
    },
    "powersgd_rank": {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "rank of PowerSGD's approximation (Vogels et al. 2019, arXiv:1905.13727)",
    },
    "join": {
        "type": "boolean",
        "default": False,
        "description": "let a rank that has run out of batches take part in the others' collectives. The plan gives all"
        " ranks the same number of batches, so here the option only shows what it costs",
    },
    "sync_batchnorm": {
        "type": "boolean",
        "default": False,
        "description": "batch normalisation takes its statistics over all ranks: PyTorch's SyncBatchNorm on GPUs,"
        " Lockstep's own on a CPU",
    },
}
# A bucket of gradients is sent when backward has filled it; PowerSGD sends two factors of each of its matrices in turn.
SENDS = [
    ({"sync_batchnorm": [True]}, None),
    ({"join": [True]}, None),
    (
        {"hook": ["fp16", "bf16"]},
        [
            {
                "collective": "all_reduce",
                "numbers": "trained",
                "bytes": 2,
                "pieces": "bucket_mb",
                "during": "backward",
                "hidden_on": ["cpu", "cuda"],
            },
        ],
    ),
    (
        {"hook": ["powersgd"]},
        [
            {"collective": "all_reduce", "numbers": "powersgd", "bytes": 4, "pieces": "bucket_mb"},
        ],
    ),
    (
        {},
        [
            {
                "collective": "all_reduce",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "bucket_mb",
                "during": "backward",
                "hidden_on": ["cpu", "cuda"],
            },
        ],
    ),
]
AWAITS_GRADIENTS = [
    # With LoRA the model's own weights are frozen.
    (
        {"find_unused_parameters": [False], "processes": {"minimum": 2}, "lora": [0]},
        "Set find_unused_parameters: true in the row",
    ),
]
SYNCS_BATCH_NORM = ["sync_batchnorm"]
UNCOUNTED = [({"hook": ["powersgd"]}, "PowerSGD allocates what it carries over between steps only after some steps")]
LOSSY = [
    ({"hook": ["fp16", "bf16", "powersgd"]}, "gradients are compressed before they are sent"),
]
OTHER_MODEL = [
    ({"hook": ["powersgd"]}, "steps are taken along an approximation of a low rank of each matrix's gradient"),
]
REFUSED = [
    ({"hook": ["bf16"], "device": ["cpu"]}, "PyTorch has this hook for CUDA and NCCL only; set hook to fp16"),
    (
        {"join": [True], "static_graph": [True]},
        "a rank that has no batch left changes the graph; set join or static_graph to false",
    ),
    (
        {"static_graph": [True], "accumulation": {"minimum": 2}},
        "with accumulation DistributedDataParallel does not see the first backward pass, on which its static graph is"
        " based; set static_graph to false, or accumulation to 1",
    ),
    (
        {"hook": ["powersgd"], "checkpoint_every": {"minimum": 1}},
        "what powersgd carries over from step to step can't be saved; use another hook, or set checkpoint_every to 0",
    ),
]


def live_options(model: DistributedDataParallel) -> dict:
    """The options that are in effect on a wrapped model."""
    hooks = {function: name for name, function in HOOKS.items()}
    return {
        "bucket_mb": model.bucket_bytes_cap / 2**20,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "find_unused_parameters": model.find_unused_parameters,
        "broadcast_buffers": model.broadcast_buffers,
        "hook": next((hooks[function] for function, _ in model._comm_hooks if function in hooks), "none"),
    }
