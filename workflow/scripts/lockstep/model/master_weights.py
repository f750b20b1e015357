"""Master weights: the model computes in bf16, and the optimizer trains copies of its weights in fp32.

Most updates are too small to change a number of bf16's 8 bits; in fp32 they add up (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.1).
"""

import torch


class MasterWeights(torch.optim.Optimizer):
    """Around the `optimizer` of the model `master`, in fp32: trains it by the gradients of `working`, its copy in bf16.

    A step takes the gradients over, clips them to the norm `clip` (0: not at all), updates the weights of `master`, and
    rounds them into `working`. Groups and state are those of `optimizer`, not copies, so a schedule sets both.
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
        if self.clip:  # here, and not before: the norm of gradients in bf16 would be rounded
            torch.nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Round the weights of `master` into `working`."""
        torch._foreach_copy_(self.working, self.master)

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict(state_dict)  # which makes groups and state anew
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        for weight in self.working:
            weight.grad = None
