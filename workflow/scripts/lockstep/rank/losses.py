"""One rank's losses, written for people to read while it trains.

On a GPU a loss is copied to the host asynchronously, and written at a later step once it has arrived, so that training
never waits for it.
"""

import math
from collections import deque

import torch

from lockstep.run.training_log import Notes


class Losses:
    """Writes the loss and the training time every `train.log_every` steps; `replay` is the rank's part of the plan.

    The loss is the mean over this rank's part of the global batch; if it has several terms, they follow it.
    """

    def __init__(self, replay):
        training = replay.training
        self.replay, self.clock = replay, training.clock
        self.every = training.train.log_every if training.strategy.world.tells else 0
        if self.every:
            self.notes = Notes(training.folder, terms=len(replay.terms))
            self.waiting: deque = deque()  # (step, seconds, losses in pinned memory, rate, event)

    def begin(self) -> None:
        if self.every:
            self.notes.write(self.replay.done, self.clock.trained(), 0)

    def step_done(self) -> None:
        step = self.replay.done
        if not self.every or step % self.every:
            return
        losses, rate = self.replay.noted_losses(step - 1), self.replay.rates[-1] if self.replay.rates else math.nan
        if losses.device.type == "cuda":
            self.hand_over()
            there = torch.empty_like(losses, device="cpu", pin_memory=True)
            there.copy_(losses, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.waiting.append((step, self.clock.trained(), there, rate, event))
        else:
            self.notes.write(step, self.clock.trained(), losses.numpy(), rate)

    def hand_over(self) -> None:
        """Write the losses that have arrived. After the window, when the device is synchronised, those are all."""
        while self.every and self.waiting and self.waiting[0][-1].query():
            step, seconds, losses, rate, _ = self.waiting.popleft()
            self.notes.write(step, seconds, losses.numpy(), rate)
