"""diloco: local_sgd with a second optimizer that steps at each average (Douillard et al. 2023, arXiv:2311.08105).

The gradient of such an outer step is the weights with which the ranks began together, minus the mean of the weights
that they have reached. The outer optimizer is SGD with Nesterov momentum. With `outer_rate: 1` and
`outer_momentum: 0`, diloco is local_sgd.

Advantages: the time between two averages can be longer than in local_sgd.
Limits: trains another model than ddp; each rank keeps two more copies of the weights; the outer learning rate and
momentum must be tuned as well.
On a CPU: works in the same way.
"""

import contextlib
import copy

import torch

from lockstep.strategies import local_sgd


class Strategy(local_sgd.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        self.begun = [parameter.detach().clone() for parameter in self.module.parameters()]  # equal on all ranks
        rate, momentum = self.options["outer_rate"], self.options["outer_momentum"]
        self.outer = torch.optim.SGD(self.begun, lr=rate, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def meet(self):
        super().meet()
        for begun, parameter in zip(self.begun, self.module.parameters(), strict=True):
            begun.grad = begun - parameter
        self.outer.step()
        for begun, parameter in zip(self.begun, self.module.parameters(), strict=True):
            parameter.copy_(begun)

    @contextlib.contextmanager
    def as_kept(self):
        begun, outer = [parameter.clone() for parameter in self.begun], copy.deepcopy(self.outer.state_dict())
        with super().as_kept():
            yield
        torch._foreach_copy_(self.begun, begun)
        self.outer.load_state_dict(outer)

    def save_state(self, folder):
        super().save_state(folder)
        if self.world.rank == 0:  # the outer step is the same on all ranks
            torch.save({"begun": self.begun, "outer": self.outer.state_dict()}, folder / "outer.pt")

    def load_state(self, folder):
        super().load_state(folder)
        state = torch.load(folder / "outer.pt", map_location="cpu", weights_only=True)
        torch._foreach_copy_(self.begun, state["begun"])
        self.outer.load_state_dict(state["outer"])


UNCOUNTED = [({}, "its outer optimizer allocates its state only after some steps")]
OPTIONS = {
    "every": {
        "type": "integer",
        "minimum": 1,
        "default": 16,
        "description": "number of steps from one outer step to the next; outer steps are also taken where the dev split"
        " is evaluated, and at the end",
    },
    "outer_rate": {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 0.7,
        "description": "learning rate of the outer step",
    },
    "outer_momentum": {
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": 1,
        "default": 0.9,
        "description": "Nesterov momentum of the outer step",
    },
}
INHERITS = [
    "launcher",
    "rendezvous",
    "gradient_as_bucket_view",
    "bucket_mb",
    "static_graph",
    "find_unused_parameters",
    "sync_batchnorm",
    "within",
]
DIVISION = "open"
OTHER_MODEL = [
    ({}, "an outer optimizer takes steps of its own"),
]
