"""accelerate: Hugging Face Accelerate over DistributedDataParallel, started by `accelerate launch` or torchrun.

By default each rank is given its own share of the plan. With `own_loaders` Accelerate prepares a DataLoader over the
plan's order and divides its batches among the ranks, and `gather_for_metrics` gathers the results on the dev split.
With `prepared_scheduler` Accelerate steps the learning rate's schedule, too. Each rank then records which samples it
was given and the learning rate of each step; a row whose samples are not the plan's, or whose rates are not the
schedule's, is reported as another model.

Accelerate steps a prepared scheduler once per process, because its loaders use up one batch per process in each step. A
schedule that was made for the real number of steps then decays too early, by a factor of the number of processes.
`split_batches` and `step_scheduler_with_optimizer: false` prevent that. Where a loader keeps the samples that do not
fill a batch (`drop_last: false`), each epoch has one step more than the plan, and Accelerate fills its batch up with
samples from the beginning of the epoch.

Advantages: a few lines turn a plain loop into a distributed one; a configuration file chooses how it runs.
Limits: what a run does depends on that file and on the environment; for schedules and loaders, see above.
On a CPU: as ddp. `accelerate launch --cpu` would start one process only, so the launcher is told that there are GPUs,
and the Accelerator that there is a CPU.
"""

import contextlib
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import precisions
from lockstep.config.hardware import World
from lockstep.errors import RunFailed
from lockstep.model import models
from lockstep.strategies import _accelerate_loaders, ddp
from lockstep.strategies._group import take_device


class Strategy(ddp.Strategy):
    def start(self):
        names = ("gradient_as_bucket_view", "find_unused_parameters")
        options = {name: self.options[name] for name in names} | {"bucket_cap_mb": self.options["bucket_mb"]}
        local_rank = int(os.environ["LOCAL_RANK"])
        take_device(self.hardware, local_rank)
        precision = precisions.of(self.precision).frameworks
        self.accelerator = Accelerator(
            cpu=self.hardware.device == "cpu",
            mixed_precision=None if self.options["config_file"] else precision,  # None: what the file says
            kwargs_handlers=[
                DistributedDataParallelKwargs(**options),
                InitProcessGroupKwargs(self.hardware.backend, timeout=timedelta(seconds=self.hardware.timeout)),
            ],
            dataloader_config=DataLoaderConfiguration(
                split_batches=self.options["split_batches"], dispatch_batches=self.options["dispatch_batches"]
            ),
            step_scheduler_with_optimizer=self.options["step_scheduler_with_optimizer"],
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
        """Raise RunFailed if the environment or the user's configuration file gave Accelerator settings of its own."""
        accelerator = self.accelerator
        wanted = {
            "num_processes": self.processes,
            "mixed_precision": precision,
            "distributed_type": "MULTI_CPU" if self.hardware.device == "cpu" else "MULTI_GPU",
            "dynamo_backend": "NO",
            "gradient_accumulation_steps": 1,  # backward would divide the loss by it
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
                raise RunFailed(f"{key}: the row needs {value}, but Accelerate has {live[key]}, set by {source}")

    def set_up(self, model, make_optimizer):
        self.module = model.to(self.world.device)
        self.accelerator.ddp_handler.broadcast_buffers = models.has_changing_buffers(model)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model))
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)

    @property
    def keeps_schedule(self):
        return not self.options["prepared_scheduler"]

    def scheduled(self, schedule):
        self.schedule = self.accelerator.prepare(schedule) if self.options["prepared_scheduler"] else schedule
        return self.schedule

    def train(self, replay):
        if self.options["own_loaders"]:
            drop_last = self.options["drop_last"]
            self.loader = _accelerate_loaders.Training(self.accelerator, replay.samples, replay.plan, drop_last)
        super().train(replay)

    def batches(self, replay, step):
        if not self.options["own_loaders"]:
            yield from super().batches(replay, step)
            return
        replay.fetching()
        ids, tensors = self.loader.next(step)
        yield replay.brought(step, ids, self.in_precision_of_weights(tensors))

    def gathered(self, samples, size, results):
        if not self.options["own_loaders"]:
            return None
        ids_of_all, results_of_all = [], []
        for ids, tensors in _accelerate_loaders.evaluation(self.accelerator, samples, size):
            own = torch.from_numpy(ids).to(self.world.device), results(self.in_precision_of_weights(tensors))
            ids, theirs = self.accelerator.gather_for_metrics(own)
            ids_of_all.append(ids.cpu())
            results_of_all.append(theirs.cpu())
        return torch.cat(ids_of_all), torch.cat(results_of_all)

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
        wrapped = isinstance(self.model, DistributedDataParallel)  # on a single GPU it is not
        loaders = self.accelerator.dataloader_config
        own = {
            "split_batches": loaders.split_batches,
            "dispatch_batches": loaders.dispatch_batches,
            "even_batches": loaders.even_batches,
            "prepared_scheduler": isinstance(self.schedule, AcceleratedScheduler),
            "step_scheduler_with_optimizer": self.accelerator.step_scheduler_with_optimizer,
        }
        return {"backend": self.world.backend} | own | (ddp.live_options(self.model) if wrapped else {})

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
        "description": "accelerate launch, with a configuration file written for the run; torchrun; the deprecated"
        " torch.distributed.launch; or hand, as in ddp",
    },
    "config_file": {
        "type": ["string", "null"],
        "default": None,
        "description": "your own configuration file for accelerate launch, as `accelerate config` writes it. A row that"
        " it contradicts is refused. The port is always the row's",
    },
    "own_loaders": {
        "type": "boolean",
        "default": False,
        "description": "take batches from a DataLoader over the plan's order that Accelerate has prepared, and gather"
        " results on the dev split by gather_for_metrics. even_batches stays on: without it ranks that have batches"
        " left would wait for those that have none",
    },
    "split_batches": {
        "type": "boolean",
        "default": False,
        "description": "a loader's batch is the global batch, which Accelerate splits among the ranks, and a prepared"
        " scheduler is stepped once per step; if false, a loader's batch is one rank's",
    },
    "dispatch_batches": {
        "type": "boolean",
        "default": False,
        "description": "rank 0 reads all batches and sends the other ranks theirs; needs own_loaders",
    },
    "drop_last": {
        "type": "boolean",
        "default": True,
        "description": "leave out the samples at an epoch's end that do not fill a batch, as the plan does; if false,"
        " Accelerate fills the batch up. false needs own_loaders",
    },
    "prepared_scheduler": {
        "type": "boolean",
        "default": False,
        "description": "let Accelerate step the learning rate's schedule, which it does once per process",
    },
    "step_scheduler_with_optimizer": {
        "type": "boolean",
        "default": True,
        "description": "Accelerate's setting of that name; if false, a prepared scheduler is stepped once per step,"
        " whatever the number of processes",
    },
}
NEEDS = {"accelerate": ("1.15.0", "make setup")}
FILES = ("config_file",)
CHECKED = {"config_file": "accelerate_file"}
SENDS = "ddp"  # it wraps the model in DistributedDataParallel
REFUSED = [
    ({"precision": ["fp16"], "device": ["cpu"]}, "Accelerate has no fp16 on a CPU; use precision: bf16"),
    (
        {"launcher": ["torchrun", "launch", "hand"], "config_file": {"type": "string"}},
        "config_file is read by `accelerate launch` only; set launcher to accelerate",
    ),
    (
        {"dispatch_batches": [True], "own_loaders": [False]},
        "this is a setting of Accelerate's loaders; set own_loaders: true",
    ),
    (
        {"drop_last": [False], "own_loaders": [False]},
        "this is a setting of Accelerate's loaders; set own_loaders: true",
    ),
    (
        {"step_scheduler_with_optimizer": [False], "prepared_scheduler": [False]},
        "this is a setting of a scheduler that Accelerate steps; set prepared_scheduler: true",
    ),
    (
        {"own_loaders": [True], "accumulation": {"minimum": 2}},
        "a step is one batch of Accelerate's loader; set accumulation to 1, or own_loaders to false",
    ),
    (
        {"own_loaders": [True], "workers": {"minimum": 1}},
        "Accelerate's loader makes the batches in the rank itself, without worker processes; set workers to 0, or"
        " own_loaders to false",
    ),
]
EQUAL_SHARES = [
    ({"own_loaders": [True]}, "Accelerate's loaders give every rank the same number of samples"),
]
OWN_BATCHES = [({"own_loaders": [True]}, "they come from Accelerate's loaders")]
OWN_SCHEDULE = [({"prepared_scheduler": [True]}, "Accelerate steps it")]
OTHER_MODEL = [
    (
        {"prepared_scheduler": [True], "split_batches": [False], "step_scheduler_with_optimizer": [True]},
        "Accelerate steps a prepared scheduler once for each process",
    ),
    (
        {"own_loaders": [True], "drop_last": [False]},
        "Accelerate fills up the last batch of an epoch with samples from its beginning",
    ),
]
