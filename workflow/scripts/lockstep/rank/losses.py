"""One rank's losses on their way to a person's eyes, while it goes on to train.

On a GPU a loss is copied when the device comes to it, and noted at a later step, once it is there: nobody waits.
"""

import math
from collections import deque

import torch

from lockstep.run.training_log import Notes


class Losses:
    """Notes the loss, and how long was trained, every `train.log_every` steps; `replay` is the rank's part of the plan.

    The loss is the mean over what this rank has of the global batch; its terms stand behind it, where it has several.
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
        """Note the losses that have come. After the window, where the device was waited for, those are all."""
        while self.every and self.waiting and self.waiting[0][-1].query():
            step, seconds, losses, rate, _ = self.waiting.popleft()
            self.notes.write(step, seconds, losses.numpy(), rate)
