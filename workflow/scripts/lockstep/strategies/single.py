"""single: one device, no communication. The base class that every other strategy changes.

What is trained is fixed in advance: the plan, the initial weights, the optimizer and its schedule. A strategy decides
only how it is trained: how the model is wrapped, what an optimizer step does, how the model is saved. The command that
starts its processes is in launchers.py.

Advantages: nothing to set up and nothing to go wrong; the best choice where the model fits and training is fast enough.
Limits: one device.
On a CPU: one process, on one process's share of the cores, so that other rows are compared with one device and not with
the whole machine.
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
    # Added to the replica's seed; not 0 on a rank that holds a part of the replica and must drop other units than the
    # ranks with the other parts.
    draws = 0
    same_state_everywhere = True  # whether weights and optimizer are equal on all ranks between any two steps
    keeps_schedule = True  # whether a run fails if its learning rates are not the schedule's; else they are recorded

    def __init__(self, settings: Settings):
        self.options, self.hardware = settings.options, settings.hardware
        self.processes = self.hardware.processes  # the number of ranks, on all machines
        self.ranks_per_replica = settings.ranks_per_replica  # from its options (RANKS_PER_REPLICA)
        self.precision = settings.precision
        self.clip, self.accumulation = settings.train.clip, settings.train.accumulation
        self.sample: dict[str, np.ndarray] = {}  # one sample of the training split, as the split's `batch` returns it
        self.notes: list[str] = []  # what a reader of the table must know about this row
        allow_tf32(settings.options.get("tf32", False))
        self.files: dict[str, dict] = {}  # its framework's configuration, kept as JSON beside the record

    def lead(self, session) -> None:
        """Train all runs of this process. `session` (rank/session.py) hands them out and records them."""
        session.join(self.start())
        for run in session.runs():
            run.train()

    def start(self) -> World:
        """Join the other processes. Called first in each process."""
        self.world = World(rank=0, local_rank=0, size=1, device=torch.device(self.hardware.device), backend=None)
        return self.world

    def synchronised(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with batch normalisation over all ranks where that is asked for. Called before `set_up`."""
        return model

    def set_up(self, model: torch.nn.Module, make_optimizer) -> None:
        """Place the model, wrap it, and only then make the optimizer by `make_optimizer(model)`.

        The model's parameters are final only after it is wrapped. The proof calls this more than once in a process,
        each time with a copy of the model that was made after `start`.
        """
        self.module = self.model = self.place(model)
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=precisions.of(self.precision).scaled)
        self.wrap()
        self.optimizer = make_optimizer(self.module)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to where `wrap` needs it: to this rank's device."""
        return model.to(self.world.device)

    def wrap(self) -> None:
        """Turn `self.model` into what is trained, on this rank's device; `self.module` stays the plain model."""

    def train(self, replay) -> None:
        """Take all optimizer steps. `replay` (rank/replay.py) hands out this rank's batches and records the samples."""
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
        """An iterator of this rank's micro-batches of a step (rank/replay.py)."""
        return replay.batches(step)

    def scheduled(self, schedule: torch.optim.lr_scheduler.LRScheduler):
        """The learning rate's schedule, in the form in which the loop steps it."""
        return schedule

    def gathered(self, samples, size: int, results) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Evaluate a split in a framework's own way, in batches of `size`; None leaves the evaluation to Lockstep.

        `results(inputs)` are the results of one batch, [n, any]. Returns the ids of all samples, int64 [n], and their
        results.
        """
        return None

    def connect(self) -> None:
        """Communicate once, as the steps will, if the backend opens its connections only then."""

    def rehearse(self, replay, batch) -> None:
        """Run a micro-batch forward and backward as `train` does, before the first step, and forget the gradients.

        Ranks average the gradients only where the backward pass can't do without that (`rehearses_average`).
        """
        with self.averaging(self.rehearses_average):
            self.backward(replay.loss(batch, self.forward(batch.inputs)), self.rehearses_average)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Clear the gradients, as if there had been no backward pass."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def share(self) -> tuple[int, int]:
        """Which part of each global batch this rank trains, counted from 0, and the number of parts."""
        return self.world.replica, self.world.replicas

    def batch(self, samples, ids: np.ndarray, width: int) -> dict[str, torch.Tensor]:
        """Samples `ids` of a split (tasks/_task.py), padded to `width`: the model's inputs, and `labels`."""
        return self.inputs(self.collate()(samples, ids, self.padded_width(width)))

    def collate(self) -> Callable:
        """The function that puts a batch together on the host, from samples, ids and width; `inputs` takes its arrays.

        It must be a function of a module: a worker process (`workers`) gets its name only, and nothing of this object.
        """
        return padded

    def padded_width(self, width: int) -> int:
        """The width to which a batch is padded whose longest text has `width` tokens."""
        return width

    def inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays of a split's `batch`, on this rank's device and in the precision of the model's weights."""
        return self.in_precision_of_weights(self.to_device(arrays))

    def in_precision_of_weights(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in the precision of the model's weights."""
        if self.precision == "fp64":
            tensors = {
                name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
            }
        return tensors

    def to_device(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Arrays as tensors on this rank's device. They are copied to a GPU while the host goes on."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.world.device.type == "cuda":
            if self.hardware.pin_memory:
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in tensors.items()}
        return tensors

    def forward(self, inputs: dict[str, torch.Tensor]):
        """The model's outputs for a batch, in training and in evaluation; None on a rank that has none."""
        with self.autocast():
            return self.model(**inputs)

    def whole_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss that was computed from a model's outputs, as a plain tensor."""
        return loss

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of a forward pass."""
        return autocast(self.world.device, self.precision)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch's loss; `last` says whether it is the optimizer step's last one."""
        self.scaler.scale(loss).backward()

    def averaging(self, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch, after which ranks average their gradients if it is the step's `last` one.

        It includes the forward pass, in which DistributedDataParallel decides whether the backward pass communicates.
        """
        return contextlib.nullcontext()

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the whole model's gradient as `step` will use it, before clipping. Called on every rank."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) / self.loss_scale()

    def algorithm(self, optimizer: torch.optim.Optimizer) -> str:
        """The name that `train.optimizer` has for an optimizer, which a framework may have made."""
        return type(optimizer).__name__.lower()

    def loss_scale(self) -> float:
        """The factor by which the loss was multiplied so that fp16 can hold its gradients; 1.0 where there is none."""
        return self.scaler.get_scale()

    def start_loss_scale(self, scale: float) -> None:
        """Set the initial loss scale of fp16 to `scale`. Called after `set_up`, before the first step."""
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
        """Options and hardware keys as the live objects have them; they are compared with what the row asks for."""
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
        """The context in which the model, in the midst of training, is as it would be saved. Called on every rank.

        After it, training goes on as if nothing had happened.
        """
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

        That is the weights, the optimizer and the loss scale; everything else is saved in the same way for all
        strategies (rank/resumption.py).
        """
        if self.world.rank == 0 or not self.same_state_everywhere:
            state = {"weights": self.trained_module().state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state | {"scaler": self.scaler.state_dict()}, self.state_file(folder))

    def load_state(self, folder: Path) -> None:
        """Load what `save_state` wrote. Called on every rank, after `set_up` and before the timed window."""
        state = torch.load(self.state_file(folder), map_location="cpu", weights_only=True)
        self.trained_module().load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def state_file(self, folder: Path) -> Path:
        """The file of a saved state that holds this rank's state."""
        return folder / "state.pt"

    def stop(self) -> None:
        """Leave no process, port or file behind. Called last in each process."""


def padded(samples, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """Samples `ids` of a split, padded to `width`."""
    return samples.batch(ids, width)


def allow_tf32(allowed: bool) -> None:
    """Whether GPUs may multiply fp32 matrices, and compute convolutions, in TensorFloat-32, with 10 bits of precision.

    By default PyTorch does so for convolutions, and in NVIDIA's images (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE) for both.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """PyTorch's autocast for a mixed precision, else an empty context. Raises BadInput for an unknown precision."""
    declared = precisions.of(precision)
    if not declared.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, declared.dtype))
