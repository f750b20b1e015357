"""The learning-rate schedule as a function of the step; without PyTorch, as a run's supervisor asks it too."""

import bisect
import math
from collections.abc import Callable, Sequence

from lockstep.config.fixed import LAST_RATE
from lockstep.config.sections import Train


def lr_factor(train: Train, steps: int, epochs: Sequence[int] = ()) -> Callable[[int], float]:
    """`train.schedule` as a function: the factor of `train.learning_rate` in the step that comes after `step` others.

    Args:
        steps: how many optimizer steps there are.
        epochs: the epoch of each step, from 0, never falling; only schedules that count epochs ask for it.

    Warm-up rises in a line from `warmup_start`. The rest is, to the last bit, what transformers' schedules of the same
    names are; `step` is PyTorch's StepLR over epochs; `constant_then_linear` falls to 0 from its `constant_epochs` on.
    """
    warmup = round(train.warmup * steps) if train.warmup < 1 else int(train.warmup)
    left = max(1, steps - warmup)
    falls_from = bisect.bisect_left(epochs, train.constant_epochs) if len(epochs) else 0

    def epoch_of(step: int) -> int:
        if step < steps:
            return int(epochs[step])
        return step // bisect.bisect_right(epochs, epochs[0])  # where a framework takes more steps of it than there are

    def factor(step: int) -> float:
        if step < warmup:
            return train.warmup_start + (1 - train.warmup_start) * (step / warmup)
        if train.schedule == "linear":
            return max(0.0, (steps - step) / left)
        if train.schedule == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * ((step - warmup) / left))))
        if train.schedule == "polynomial":
            remaining = max(0.0, 1 - (step - warmup) / left)
            falls = train.learning_rate - LAST_RATE
            return (falls * remaining**train.power + LAST_RATE) / train.learning_rate
        if train.schedule == "step":
            return train.gamma ** (epoch_of(step) // train.step_epochs)
        if train.schedule == "constant_then_linear" and step > falls_from:
            return max(0.0, (steps - step) / (steps - falls_from)) if falls_from < steps else 1.0
        return 1.0

    return factor


def other_rates(asked: Sequence[float], used: Sequence[float]) -> str:
    """Where the learning rates that were `used`, one a step, are not those `asked` for; empty where they are."""
    other = [step for step, rate in enumerate(used) if rate != asked[step]]
    if not other:
        return ""
    first, last = other[0], other[-1]
    return (
        f"in {len(other)} of {len(used)} steps it trained at another learning rate than the schedule's: in step"
        f" {first + 1} at {used[first]:.3g} for {asked[first]:.3g}, in step {last + 1} at {used[last]:.3g} for"
        f" {asked[last]:.3g}"
    )
