"""Batch normalisation over the samples of all ranks, so that several ranks train the same model as one process.

Batch normalisation uses the statistics of the batch (Ioffe and Szegedy 2015, arXiv:1502.03167), so each rank would
normalise by its own share only. PyTorch's SyncBatchNorm combines the statistics of all ranks, on GPUs only.
`SharedBatchNorm` uses any differentiable sum over ranks, and so runs on a CPU, too.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import RunFailed

KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Sum = Callable[[torch.Tensor], torch.Tensor]  # sums over all ranks, forward and backward


class SharedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d with statistics over the samples of all ranks; shares may differ in size."""

    sum_over_ranks: Sum

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        wide = input if input.dtype == torch.float64 else input.float()  # statistics in bf16 would be rounded
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() / input.shape[1])
        sums = self.sum_over_ranks(torch.cat([wide.sum(others), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = wide - mean.view(shape)
        variance = self.sum_over_ranks(centred.square().sum(others)) / total
        if self.training and self.running_mean is not None:
            self._remember(mean.detach(), variance.detach(), total)
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        """Update the running statistics as nn.BatchNorm does, with the unbiased variance."""
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), weight)


def synchronised(model: nn.Module, convert: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """Replace every batch normalisation of `model` by `convert` of it, in place; parameters and their names stay.

    Raises RunFailed if the model has a normalisation that may depend on the batch and is not one of PyTorch's.
    """
    for name, module in model.named_modules():
        if depends_on_batch(module) and type(module) not in KNOWN:
            raise RunFailed(
                f"sync_batchnorm: {name or 'the model'} is a {type(module).__name__}, which Lockstep can't synchronise;"
                f" it knows {', '.join(kind.__name__ for kind in KNOWN)}"
            )
    if type(model) in KNOWN:
        return convert(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in KNOWN:
                setattr(parent, name, convert(child))
    return model


def take_over(old: _BatchNorm, new: _BatchNorm) -> _BatchNorm:
    """Give `new` the parameters, buffers and mode of `old`; the tensors are shared, not copied."""
    for name, parameter in old._parameters.items():
        new._parameters[name] = parameter
    for name, buffer in old._buffers.items():
        new._buffers[name] = buffer
    return new.train(old.training)


def shared(sum_over_ranks: Sum) -> Callable[[_BatchNorm], nn.Module]:
    """A function for `synchronised` that converts a module into a SharedBatchNorm."""

    def convert(old: _BatchNorm) -> nn.Module:
        new = SharedBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        new.sum_over_ranks = sum_over_ranks
        return take_over(old, new)

    return convert


def depends_on_batch(module: nn.Module) -> bool:
    """Whether a module's output for a sample may depend on the other samples of the batch.

    Such modules keep running statistics for evaluation. Instance normalisation is excluded, as its statistics are those
    of each sample; frozen normalisation, as its statistics never change.
    """
    if isinstance(module, _BatchNorm):
        return True
    has_statistics = "running_mean" in module._buffers and module._buffers["running_mean"] is not None
    kind = type(module).__name__
    return has_statistics and "InstanceNorm" not in kind and "Frozen" not in kind


def is_synchronised(model: nn.Module) -> bool:
    """Whether every batch normalisation of a live model uses the statistics of all ranks."""
    norms = [module for module in model.modules() if depends_on_batch(module)]
    return all(not isinstance(module, KNOWN) for module in norms)
