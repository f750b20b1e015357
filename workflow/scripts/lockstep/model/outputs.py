"""What a model returns, whatever kind of object that is."""

import torch

NO_NUMBERS = (
    "the model's scores of some samples are no finite numbers, and predict nothing. Look in the model for a division by"
    " zero or an overflow"
)


def logits(outputs) -> torch.Tensor:
    """A classifier's logits, [n, labels]: the outputs' field `logits` if there is one, otherwise the outputs."""
    return getattr(outputs, "logits", outputs)
