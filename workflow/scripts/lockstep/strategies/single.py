"""single: one device, no communication. The base class that every other strategy changes.

What is trained is fixed before: the plan, the initial weights, the optimizer and its schedule. A strategy says only
how it is done: how the model is wrapped, what one optimizer step is, how it is saved. The command that starts its
processes is in launchers.py.

Advantages: nothing to set up, nothing to go wrong; the fastest where one device is enough for the model and the time.
Limits: one device.
On a CPU: one process on one process's share of the cores, so that other rows are compared with one device, not all.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lockstep.config import precisions
from lockstep.config.hardware import World
from lockstep.config.settings import Settings

ONE_DEVICE_ON = ("cpu", "cuda")


class Strategy:
    rehearses_average = False
    same_state_everywhere = True  # weights and optimizer, on all ranks between any two steps
    keeps_schedule = True  # a run fails whose rate is not the schedule's; else the rates that it had are noted

    def __init__(self, settings: Settings):
        self.options, self.hardware = settings.options, settings.hardware
        self.processes = self.hardware.processes  # how many there are
        self.ranks_per_replica = settings.ranks_per_replica  # by its options (RANKS_PER_REPLICA)
        self.precision = settings.precision
        self.clip, self.accumulation = settings.train.clip, settings.train.accumulation
        self.sample: dict[str, np.ndarray] = {}  # one of the training split, as its `batch` returns it
        self.notes: list[str] = []  # what a reader of the table must know about this row
        # By default cuDNN's convolutions in fp32 have 10 bits of precision.
        torch.backends.cudnn.allow_tf32 = settings.options.get("tf32", False)
        self.files: dict[str, dict] = {}  # what its framework was configured with, kept as JSON beside the record

    def lead(self, session) -> None:
        """Train all that this process is to train, which `session` (rank/session.py) hands out and writes down."""
        session.join(self.start())
        for run in session.runs():
            run.train()

    def start(self) -> World:
        """Called first in each process: join the others."""
        self.world = World(rank=0, local_rank=0, size=1, device=torch.device(self.hardware.device), backend=None)
        return self.world

    def synchronised(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, before it is prepared, with batch normalisation over all ranks where that is asked for."""
        return model

    def prepare(self, model: torch.nn.Module, make_optimizer) -> None:
        """Move the model, wrap it, and make the optimizer by `make_optimizer(model)`, as its parameters are final then.

        The proof calls it more than once in a process, each time on a copy that was made after `start`.
        """
        self.module = self.model = model.to(self.world.device)
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=precisions.of(self.precision).scaled)
        self.wrap()
        self.optimizer = make_optimizer(self.module)

    def wrap(self) -> None:
        """Turn `self.model`, which is on its device, into what is trained; `self.module` stays the plain model."""

    def train(self, replay) -> None:
        """Every optimizer step: `replay` (rank/replay.py) hands out this rank's batches, and notes what was trained."""
        replay.begin()
        for step in range(replay.done, replay.steps):
            for batch in self.batches(replay, step):
                with self.averaging(batch.last):
                    loss = replay.loss(batch, self.forward(batch.inputs))
                    self.backward(loss, batch.last)
                replay.trained(batch, loss)
            replay.gradients_ready(step)
            self.step()
            replay.schedule.step()
            replay.step_done(step)
        replay.end()

    def batches(self, replay, step: int):
        """This rank's micro-batches of a step: an iterator of them (rank/replay.py)."""
        return replay.batches(step)

    def scheduled(self, schedule: torch.optim.lr_scheduler.LRScheduler):
        """The learning rate's schedule as the loop is to step it."""
        return schedule

    def gathered(self, samples, size: int, results) -> tuple[torch.Tensor, torch.Tensor] | None:
        """How a framework of its own evaluates a split, in batches of `size`; None where it leaves that to Lockstep.

        `results(inputs)` are those of a batch, [n, any]. Returns the samples' ids, int64 [n], and the results of all.
        """
        return None

    def connect(self) -> None:
        """Communicate once as the steps will, where a backend opens connections only then."""

    def rehearse(self, replay, batch) -> None:
        """Compute forward and backward of a micro-batch as `train` does, before the first step, and forget it.

        Ranks average the gradients only where the backward pass can't do without (`rehearses_average`).
        """
        with self.averaging(self.rehearses_average):
            self.backward(replay.loss(batch, self.forward(batch.inputs)), self.rehearses_average)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """As if no backward pass had been."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def share(self) -> tuple[int, int]:
        """Which part of each global batch this rank trains, from 0, and of how many."""
        return self.world.replica, self.world.replicas

    def batch(self, samples, ids: np.ndarray, width: int) -> dict[str, torch.Tensor]:
        """Samples `ids` of a split (tasks/_task.py), padded to `width`: what the model takes, and `labels`."""
        return self.inputs(self.collate()(samples, ids, self.padded_width(width)))

    def collate(self) -> Callable:
        """What puts a batch together on the host: a function of samples, ids and width, whose arrays `inputs` takes.

        It is one of a module, as a worker process (`workers`) is told its name and has nothing of this object.
        """
        return padded

    def padded_width(self, width: int) -> int:
        """How wide a batch is padded whose longest text has `width` tokens."""
        return width

    def inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """What a split's `batch` returned, on this rank's device, and in the precision of the model's weights."""
        return self.widened(self.to_device(arrays))

    def widened(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in the precision of the model's weights."""
        if self.precision == "fp64":
            tensors = {
                name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
            }
        return tensors

    def to_device(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Arrays as tensors on this rank's device. A GPU copies them while the host goes on."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.world.device.type == "cuda":
            if self.hardware.pin_memory:
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in tensors.items()}
        return tensors

    def forward(self, inputs: dict[str, torch.Tensor]):
        """What the model returns of a batch, in training and in evaluation; None on a rank that has no outputs."""
        with self.autocast():
            return self.model(**inputs)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of a forward pass."""
        return autocast(self.world.device, self.precision)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of one micro-batch's loss; `last` of the optimizer step's micro-batches or not."""
        self.scaler.scale(loss).backward()

    def averaging(self, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch, after which ranks average their gradients if it is the step's `last` one.

        Its forward pass is in it too: DistributedDataParallel decides there whether the backward pass will communicate.
        """
        return contextlib.nullcontext()

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the whole model's gradient as `step` will use it, before clipping. Called on every rank."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) / self.loss_scale()

    def algorithm(self, optimizer: torch.optim.Optimizer) -> str:
        """The word of `train.optimizer` for an optimizer that a framework may have made."""
        return type(optimizer).__name__.lower()

    def loss_scale(self) -> float:
        """What the loss was multiplied by, so that fp16 can hold its gradients; 1.0 where it was not."""
        return self.scaler.get_scale()

    def start_loss_scale(self, scale: float) -> None:
        """Let the loss scale of fp16 begin with `scale`; called after `prepare`, before the first step."""
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale})

    def step(self) -> None:
        """Clip, update the weights, clear the gradients."""
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def live(self) -> dict:
        """Options and hardware keys as the live objects have them, which are checked against what the row asks for."""
        return {}

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, of the same shape on every rank, from all of them: shape [world size, *tensor.shape]."""
        return tensor[None]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live model's full weights under their plain names. Called on every rank."""
        return self.module.state_dict()

    def save(self, folder: Path) -> None:
        """Write the framework's own checkpoint into the empty `folder`. Called on every rank."""
        if self.world.rank == 0:  # every rank holds the same weights
            torch.save(self.model.state_dict(), folder / "checkpoint.pt")

    def as_kept(self) -> contextlib.AbstractContextManager:
        """The context in which the model, in the midst of training, is as it would be kept; then training goes on as if
        nothing had been. Called on every rank."""
        return contextlib.nullcontext()

    @staticmethod
    def to_state_dict(folder: Path) -> dict[str, torch.Tensor]:
        """What `save` wrote, under the model's plain parameter names, as full tensors."""
        return torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)

    def trained_module(self) -> torch.nn.Module:
        """The module whose parameters the optimizer updates."""
        return self.module

    def save_state(self, folder: Path) -> None:
        """Write into `folder` what `load_state` needs to go on as if nothing had happened. Called on every rank.

        That is the weights, the optimizer and the loss scale; the rest is saved for all strategies alike
        (rank/resumption.py).
        """
        if self.world.rank == 0 or not self.same_state_everywhere:
            state = {"weights": self.trained_module().state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state | {"scaler": self.scaler.state_dict()}, self.state_file(folder))

    def load_state(self, folder: Path) -> None:
        """Take over what `save_state` wrote, after `prepare`. Called on every rank, before the timed window."""
        state = torch.load(self.state_file(folder), map_location="cpu", weights_only=True)
        self.trained_module().load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def state_file(self, folder: Path) -> Path:
        """Where this rank's state lies in a saved one."""
        return folder / "state.pt"

    def stop(self) -> None:
        """Called last in each process: leave no process, port or file behind."""


def padded(samples, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """Samples `ids` of a split, padded to `width`."""
    return samples.batch(ids, width)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """PyTorch's own mixed precision where that is asked for, else nothing. Raises BadInput for an unknown precision."""
    declared = precisions.of(precision)
    if not declared.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, declared.dtype))
