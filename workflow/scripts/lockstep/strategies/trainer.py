"""trainer: transformers.Trainer over DistributedDataParallel, started by torchrun. The loop is Trainer's own.

`Strategy` sets Trainer up; `asked_arguments` gives, with reasons, the arguments without which it would differ from the
other rows. Then Trainer is in control. It asks `Replaying` for the data loader, which is a `Batches`, and for the loss
of each batch; it calls `Steps` when training begins and after each step.

Advantages: training without writing a loop; logging, checkpoints and evaluation come with it.
Limits: many defaults decide what is trained; with more than one visible GPU and no launcher, Trainer silently uses
DataParallel.
On a CPU: as ddp; fp16 would silently train in float32, so it is refused.
"""

import contextlib

import torch
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import precisions, trainer_arguments
from lockstep.model import importing, lora, models, own
from lockstep.strategies import ddp

# Trainer uses `datasets` only to ask whether its data is one of that package's data sets.
with importing.without_unused(), importing.hidden("datasets"):
    import transformers
    from transformers import Trainer


class Strategy(ddp.Strategy):
    def wrap(self):
        """Do nothing: Trainer wraps the model when it trains."""

    def asked_arguments(self) -> dict:
        """The arguments without which Trainer would train differently from the other rows."""
        return {
            "use_cpu": self.world.device.type == "cpu",
            "ddp_backend": self.hardware.backend,
            "ddp_timeout": int(self.hardware.timeout),
            "ddp_bucket_cap_mb": self.options["bucket_mb"],
            "ddp_static_graph": self.options["static_graph"],
            "ddp_find_unused_parameters": self.options["find_unused_parameters"],
            "ddp_broadcast_buffers": models.has_changing_buffers(self.module),
            **precisions.switches(self.precision),  # bf16 and fp16, at most one of them true
            "max_grad_norm": self.clip,
            "gradient_accumulation_steps": self.accumulation,
            "seed": torch.initial_seed(),  # Trainer seeds again, by default every rank alike, dropout included
            "average_tokens_across_devices": False,  # it would multiply a classifier's loss by the number of ranks
            "logging_nan_inf_filter": False,  # it would wait for the device in each step, and hide an overflow
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }

    def own_arguments(self) -> dict:
        """The user's arguments that are passed on to Trainer."""
        return trainer_arguments.given(self.options.get("arguments", {}))

    @importing.hidden("deepspeed")  # importing it takes a second, only to ask whether the model is DeepSpeed's
    def train(self, replay):
        self.arguments = self.asked_arguments()
        arguments = transformers.TrainingArguments(
            output_dir=str(replay.training.folder), max_steps=replay.steps, **self.arguments, **self.own_arguments()
        )
        self.trainer = Replaying(self, replay, arguments)
        self.trainer.accelerator.ddp_handler.gradient_as_bucket_view = self.options["gradient_as_bucket_view"]
        self.trainer.pop_callback(transformers.PrinterCallback)
        self.trainer.add_callback(Steps(self.trainer))
        self.scaler = self.trainer.accelerator.scaler or self.scaler
        self.trainer.train()

    def autocast(self):
        return contextlib.nullcontext()  # the wrapped model has its own

    def averaging(self, last):
        return super().averaging(last) if isinstance(self.model, DistributedDataParallel) else contextlib.nullcontext()

    def backward(self, loss, last):
        self.trainer.accelerator.backward(loss)  # as Trainer does in its own loop

    def live(self):
        arguments = {name: getattr(self.trainer.args, name) for name in self.arguments}
        handed = {name: getattr(self.trainer.args, name) for name in self.own_arguments()}
        # Those that the row decides are not handed over: they equal the row's values (config/trainer_arguments.py),
        # which are read back as every row's, such as the learning rate from the optimizer.
        theirs = {"arguments": self.options.get("arguments", {}) | handed, "training_arguments": arguments}
        wrapped = ddp.live_options(self.model) if isinstance(self.model, DistributedDataParallel) else {}
        return {"backend": torch.distributed.get_backend()} | theirs | wrapped

    def save(self, folder):
        if lora.is_in(self.module):  # transformers' own saving does not know of its updates
            if self.world.rank == 0:
                save_file(
                    own.separate_copies(self.module.state_dict()),
                    folder / "model.safetensors",
                    metadata={"format": "pt"},
                )
        elif isinstance(self.module, transformers.PreTrainedModel):
            self.trainer.save_model(str(folder))
        elif self.world.rank == 0:  # save_model does not separate the tied weights of other models, and fails
            self.trainer._save(str(folder), own.separate_copies(self.module.state_dict()))

    @staticmethod
    def to_state_dict(folder):
        if models.is_stored(folder):  # in transformers' own files some weights have other names than in the live model
            return models.load(folder).state_dict()
        return load_file(folder / "model.safetensors")


INHERITS = (
    "launcher",
    "gradient_as_bucket_view",
    "bucket_mb",
    "static_graph",
    "find_unused_parameters",
    "sync_batchnorm",
)
OPTIONS = {
    "arguments": {
        "type": "object",
        "default": {},
        "description": "your own arguments for transformers.TrainingArguments. A row is refused where one of them"
        " contradicts it or has no effect on it",
    },
}
NEEDS = {"accelerate": ("1.15.0", "make setup")}
CHECKED = {"arguments": "trainer_arguments"}
SENDS = "ddp"  # it wraps the model in DistributedDataParallel
REFUSED = [
    ({"precision": ["fp16"], "device": ["cpu"]}, "on a CPU Trainer silently trains in fp32; use precision: bf16"),
]


class Replaying(Trainer):
    """A Trainer that trains the plan's batches, with losses computed as in every row."""

    def __init__(self, strategy, replay, arguments):
        super().__init__(strategy.module, arguments, optimizers=(strategy.optimizer, replay.schedule))
        self.strategy, self.replay = strategy, replay
        self.loss_is_scaled_for_ga = True  # our losses are parts of the global batch's mean already

    def get_train_dataloader(self):
        return Batches(self.replay)

    def autocast_smart_context_manager(self, cache_enabled=True):
        return self.strategy.autocast()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = self.replay.loss(inputs["batch"], model(**inputs["batch"].inputs))
        self.replay.trained(inputs["batch"], loss)
        return loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if inputs["batch"].last:
            self.replay.gradients_ready(inputs["batch"].step)
        return loss


class Batches:
    """All of this rank's batches, as a data loader for Trainer."""

    def __init__(self, replay):
        self.replay = replay

    def __len__(self):
        return self.replay.steps * self.replay.training.train.accumulation

    def __iter__(self):
        for step in range(self.replay.done, self.replay.steps):
            for batch in self.replay.batches(step):
                yield batch.inputs | {"batch": batch}


class Steps(transformers.TrainerCallback):
    """Times and records each step."""

    def __init__(self, trainer):
        self.trainer, self.replay = trainer, trainer.replay

    def on_train_begin(self, args, state, control, **_):
        self.trainer.strategy.model = self.trainer.model_wrapped
        self.replay.begin()
        state.global_step = self.replay.done

    def on_step_end(self, args, state, control, **_):
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.replay.schedule.step()  # Trainer does not count such a step in the schedule; the other rows do
        self.replay.step_done(state.global_step - 1)
        if state.global_step == self.replay.steps:
            self.replay.end()
