"""Muon: the matrices of hidden layers take steps whose singular values are all about one; AdamW trains the rest.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). The steps of matrices are scaled so that the learning rate and
weight decay of AdamW suit both (Liu et al. 2025, arXiv:2502.16982).
"""

import torch

# Muon's settings besides the learning rate and weight decay.
SETTINGS = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon for the groups `matrices` and its AdamW for the groups `others`, as one optimizer.

    `step` recognises the kind of a group by the settings in it. So code that divides groups, or restores a saved state,
    need not know that there are two kinds.
    """

    def __init__(self, matrices: list[dict], others: list[dict], lr: float, **adamw):
        self.kinds = (torch.optim.Muon(matrices, lr=lr, **SETTINGS), torch.optim.AdamW(others, lr=lr, **adamw))
        super().__init__([group for kind in self.kinds for group in kind.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        gather(
            [weight for group in self.param_groups if is_of_matrices(group) for weight in group["params"]], self.state
        )
        for kind in self.kinds:
            kind.state = self.state
            kind.param_groups = [group for group in self.param_groups if group.keys() >= kind.defaults.keys()]
            kind.step()


def is_of_matrices(group: dict) -> bool:
    """Whether a group, of whichever optimizer, is one that Muon trains."""
    return "ns_steps" in group


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained matrices that Muon takes: all but embeddings and the layer that makes the outputs."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    output = getattr(model, "get_output_embeddings", lambda: None)()  # of a language model
    outer = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outer += layers[-1:] if output is None else [output]
    without = {id(module.weight) for module in outer}
    return [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in without]


def gather(matrices: list[torch.Tensor], state: dict) -> None:
    """Bring whole gradients and momenta of matrices that are sharded (DTensor) to each rank.

    The step of a shard is none of the matrix's. Its weights stay sharded; of the whole step they take their shard.
    """
    for weight in matrices:
        if weight.grad is not None and hasattr(weight.grad, "full_tensor"):
            weight.grad = whole(weight.grad)
            if "momentum_buffer" in state[weight]:
                state[weight]["momentum_buffer"] = whole(state[weight]["momentum_buffer"])


def whole(tensor):
    """A sharded tensor (DTensor) as one that every rank has all of."""
    from torch.distributed.tensor import Replicate  # which takes a while, and most rows do without

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
