"""The interface for a training script of your own that is a row of the table: `rows: {mine: {strategy: script}}`.

    from lockstep import session

    for run in session.join():
        model = DistributedDataParallel(run.model.to(run.device))
        optimizer = run.optimizer(model)
        for step in run.steps(model, optimizer):
            for batch in step.batches():
                with run.autocast():
                    outputs = model(**batch.inputs)
                run.loss(batch, outputs).backward()
            step.update()

The loop, the wrapping and the process group are yours; the initial weights, the batches, the mean over the global batch
and the clock are those of all rows. config/my_script.py is a whole one.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lockstep.config.hardware import World
from lockstep.errors import RunFailed
from lockstep.model.optimizer import make_optimizer
from lockstep.rank import session
from lockstep.rank.replay import Batch
from lockstep.strategies._group import take_device


def join(device: torch.device | None = None) -> Iterator["Run"]:
    """The runs of this process, one after the other: a single one, and in the proof further ones with other settings.

    Joins the process group by the variables that torchrun sets, unless the script has made one. `device` is this
    rank's; without it, it is the one that Lockstep gives each rank. Raises RunFailed outside a run of Lockstep's, and
    where the script has joined before.
    """
    current = session.current()
    if current is None or current.settings.strategy != "script":
        raise RunFailed(
            "session.join: this script was not started by Lockstep. Name it in a row, as rows: {mine: {strategy:"
            " script, script: this_file.py}}, and train that row."
        )
    if current.progress:
        raise RunFailed("session.join: it was called before in this process. Call it once, and go through its runs.")
    hardware = current.settings.hardware
    device = device or take_device(hardware, int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(hardware.backend, timeout=timedelta(seconds=hardware.timeout))
    world = World(
        dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size(), torch.device(device), dist.get_backend()
    )
    current.strategy.world = world
    current.join(world)
    return map(partial(Run, current), current.runs())


class Run:
    """One training of the plan, from the initial weights."""

    def __init__(self, current: session.Session, run: session.Run):
        self._session, self._run = current, run
        self._strategy, train = run.training.strategy, run.training.train
        self.device = self._strategy.world.device  # of this rank
        self.accumulation = train.accumulation  # micro-batches in a step
        self.clip = train.clip  # the largest norm that the gradient is to have; 0: any
        self._noted: tuple[Batch | None, torch.Tensor | None] = None, None  # the last batch that has a loss, and it
        self.model = run.model()  # plain, on the host, in the run's precision where that is fp64

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The row's optimizer over the parameters of `model`, which is wrapped and on its device."""
        return make_optimizer(model, self._run.training.train)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of a forward pass, in the row's precision."""
        return self._strategy.autocast()

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """What scales the loss in fp16, and does nothing otherwise; `loss` and `Step.update` use it already."""
        return self._strategy.scaler

    def steps(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator["Step"]:
        """Iterate over the plan's steps, to the last one; the timed window opens with the first one.

        model: `self.model`, wrapped. Raises RunFailed where a step leaves out what belongs to it.
        """
        strategy = self._strategy
        strategy.take(self.model, model, optimizer)
        replay = self._run.begin()
        with self._run.computing():
            replay.begin()
            for number in range(replay.done, replay.steps):
                step = Step(self, replay, number)
                yield step
                step.end()
                replay.schedule.step()
                replay.step_done(number)
            replay.end()
        self._run.finish()
        self._session.trained += 1

    def loss(self, batch: Batch, outputs) -> torch.Tensor:
        """The batch's part of the mean loss over the global batch, to call `backward` of.

        outputs: what the model returned. The script must add up the gradients of a step's micro-batches and average
        them over ranks, as DistributedDataParallel does; the loss allows for unequal shares. In fp16 it is scaled.
        """
        loss = self._run.replay.loss(batch, outputs)
        self._noted = batch, loss.detach()
        return self.scaler.scale(loss)


class Step:
    """One step of the plan: iterate over its batches, then call `update`, which changes the weights."""

    def __init__(self, run: Run, replay, number: int):
        self._run, self._replay, self.number = run, replay, number  # from 0
        self._through = self._ready = False

    def batches(self) -> Iterator[Batch]:
        """This rank's share of the step, in micro-batches: `inputs`, `labels`, and whether it is the `last` one."""
        for batch in self._replay.batches(self.number):
            yield batch
            with_loss, loss = self._run._noted
            if with_loss is not batch:
                raise self._left_out("Run.loss was not called for a batch")
            self._replay.trained(batch, loss)
        self._through = True

    def gradients_ready(self) -> None:
        """The gradients are averaged over all ranks, and not clipped yet. `update` calls it, else the script does."""
        if not self._ready:
            self._replay.gradients_ready(self.number)
        self._ready = True

    def update(self) -> None:
        """Clip the gradients, change the weights, clear the gradients: as `single` does it."""
        self.gradients_ready()
        self._run._strategy.step()

    def end(self) -> None:
        if not self._through:
            raise self._left_out("its batches were not all gone through")
        if not self._ready:
            raise self._left_out("neither update nor gradients_ready was called")

    def _left_out(self, what: str) -> RunFailed:
        return RunFailed(f"the script, step {self.number + 1}: {what}")
