"""What a model returns, whatever kind of object that is."""

import torch


def logits(outputs) -> torch.Tensor:
    """A classifier's logits, [n, labels]: the field of that name of what it returned, or else what it returned."""
    return getattr(outputs, "logits", outputs)
