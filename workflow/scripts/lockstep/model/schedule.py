"""The learning-rate schedule as a function of the step; without PyTorch, since a run's supervisor uses it too."""

import bisect
import math
from collections.abc import Callable, Sequence

from lockstep.config.fixed import LAST_RATE
from lockstep.config.sections import Train


def lr_factor(train: Train, steps: int, epochs: Sequence[int] = ()) -> Callable[[int], float]:
    """`train.schedule` as a function from the step, counted from 0, to the factor of `train.learning_rate`.

    Args:
        steps: the number of optimizer steps.
        epochs: the epoch of each step, from 0, in ascending order; only schedules that count epochs need it.

    Warm-up rises linearly from `warmup_start`. The other schedules equal transformers' schedules of the same names bit
    for bit; `step` is PyTorch's StepLR over epochs; `constant_then_linear` falls to 0 after `constant_epochs`.
    """
    warmup = round(train.warmup * steps) if train.warmup < 1 else int(train.warmup)
    left = max(1, steps - warmup)
    falls_from = bisect.bisect_left(epochs, train.constant_epochs) if len(epochs) else 0

    def epoch_of(step: int) -> int:
        if step < steps:
            return int(epochs[step])
        return step // bisect.bisect_right(epochs, epochs[0])  # a framework may call the schedule after the last step

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
    """A message about the steps whose learning rate `used` differs from the one `asked` for; empty if none does."""
    other = [step for step, rate in enumerate(used) if rate != asked[step]]
    if not other:
        return ""
    first, last = other[0], other[-1]
    return (
        f"in {len(other)} of {len(used)} steps it trained at another learning rate than the schedule's: in step"
        f" {first + 1} at {used[first]:.3g} for {asked[first]:.3g}, in step {last + 1} at {used[last]:.3g} for"
        f" {asked[last]:.3g}"
    )
