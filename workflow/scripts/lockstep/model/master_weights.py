"""Master weights: the model computes in bf16, and the optimizer updates fp32 copies of its weights.

bf16 has 8 significant bits, so most updates are too small to change a weight; in fp32 they accumulate (Micikevicius et
al. 2018, arXiv:1710.03740, section 3.1).
"""

import copy

import torch

from lockstep.model import batch_norm


def in_bf16(master: torch.nn.Module) -> torch.nn.Module:
    """A copy of `master`, a model in fp32, whose weights are bf16, for the forward and backward pass.

    Batch normalisation stays in fp32 and shares its running statistics with `master`, which is what is saved. In bf16
    most of what a batch adds to them would be rounded away.
    """
    working = copy.deepcopy(master).to(torch.bfloat16)
    for name, module in master.named_modules():
        if batch_norm.depends_on_batch(module):
            twin = working.get_submodule(name).float()
            twin._buffers.update(module._buffers)
    return working


class MasterWeights(torch.optim.Optimizer):
    """Wraps the optimizer of `master`, a model in fp32, and feeds it the gradients of `working`, its copy in bf16.

    A step copies the gradients to `master`, clips them to the norm `clip` (0: no clipping), updates `master`, and
    rounds its weights into `working`. Parameter groups and state are shared with `optimizer`, so a schedule sets both.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, master: torch.nn.Module, working: torch.nn.Module, clip: float
    ):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self.optimizer, self.clip = optimizer, clip
        self.master = [weight for weight in master.parameters() if weight.requires_grad]
        self.working = [weight for weight in working.parameters() if weight.requires_grad]

    @torch.no_grad()
    def step(self) -> None:
        for master, working in zip(self.master, self.working, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
        if self.clip:  # not earlier, as the norm of gradients in bf16 would be rounded
            torch.nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Round the weights of `master` into `working`."""
        torch._foreach_copy_(self.working, self.master)

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict(state_dict)  # it replaces groups and state, so share the new ones
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        for weight in self.working:
            weight.grad = None
