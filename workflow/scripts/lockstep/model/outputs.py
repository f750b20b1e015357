"""What a model returns, whatever kind of object that is."""

import torch


def logits(outputs) -> torch.Tensor:
    """A classifier's logits, [n, labels]: the outputs' field `logits` if there is one, otherwise the outputs."""
    return getattr(outputs, "logits", outputs)
