"""local_sgd: ranks train independently, and average their weights every few steps (Stich 2018, arXiv:1805.09767).

In the first `local_after` steps they average gradients, as ddp does (post-local SGD: Lin et al. 2018,
arXiv:1808.07217). With `within: node` the ranks of one machine average their gradients in every step, and only the
machines train independently.

Advantages: communicates once in `every` steps, so a slow network costs little.
Limits: trains another model than ddp; the less often it communicates, the more the models differ. Each rank's optimizer
has its own state.
On a CPU: works in the same way.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from lockstep.errors import RunFailed
from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    same_state_everywhere = False

    def __init__(self, settings):
        super().__init__(settings)
        self.options = {name: option["default"] for name, option in OPTIONS.items()} | self.options

    def wrap(self):
        super().wrap()
        among, within_node = None, self.options["within"] == "node"
        if within_node:
            among, _ = dist.new_subgroups(self.hardware.processes_per_node)
        self.gradients = PostLocalSGDState(None, among, self.options["local_after"], within_node)
        self.model.register_comm_hook(self.gradients, post_localSGD_hook)

    def train(self, replay):
        self.replay = replay
        super().train(replay)

    def averaging(self, last):
        self.gradients.iter = self.replay.done  # not 0 at the beginning of a resumed run
        return super().averaging(last)

    def step(self):
        super().step()
        if self.is_due(self.replay.done + 1):
            self.meet()

    def is_due(self, done: int) -> bool:
        """Whether weights are averaged after `done` steps: every few steps, before an evaluation, and at the end."""
        local = done - self.options["local_after"]
        settings = self.replay.training.settings
        used = done == self.replay.steps or self.replay.dev_split.due(done)
        if settings.kind.profiled:  # its model is not saved, and a profile should show the usual averages only
            used = False
        return local > 0 and (used or local % self.options["every"] == 0)

    def meet(self) -> None:
        """Give every rank the mean of all ranks' weights."""
        average_parameters([weight for weight in self.module.parameters() if weight.requires_grad], None)

    @contextlib.contextmanager
    def as_kept(self):
        """The context in which each rank has the mean of all ranks' weights; it then goes on with its own."""
        done = self.replay.done
        if done <= self.options["local_after"] or self.is_due(done):  # they are equal
            yield
            return
        own = [parameter.detach().clone() for parameter in self.module.parameters()]
        self.meet()
        yield
        with torch.no_grad():
            torch._foreach_copy_(list(self.module.parameters()), own)

    def gradient_norm(self):
        """The norm of the gradients' mean over all ranks. No rank takes a step along it; the proof compares it."""
        parts = self.world.size * self.loss_scale()  # ranks may come to have different loss scales
        gradients = [parameter.grad / parts for parameter in self.module.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        return torch.nn.utils.get_total_norm(gradients)

    def load_state(self, folder):
        savers = len(list(folder.glob("state-*.pt")))
        if savers != self.world.size:
            raise RunFailed(
                f"{savers} processes saved the state in {folder.parent}, each with weights of its own, so"
                f" {self.world.size} can't go on from it. Use as many processes as saved it, or leave out --resume"
            )
        super().load_state(folder)

    def state_file(self, folder):
        return folder / f"state-{self.world.rank}.pt"


OPTIONS = {
    "every": {
        "type": "integer",
        "minimum": 1,
        "default": 8,
        "description": "number of steps from one average of the weights to the next; they are also averaged where the"
        " dev split is evaluated, and at the end",
    },
    "local_after": {
        "type": "integer",
        "minimum": 0,
        "default": 0,
        "description": "number of steps at the beginning in which gradients are averaged instead",
    },
    "within": {
        "enum": ["rank", "node"],
        "default": "rank",
        "description": "what trains independently between two averages: each rank, or the ranks of a machine together",
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
]
DIVISION = "open"
OTHER_MODEL = [
    ({}, "ranks take steps along gradients of their own"),
]
# All weights are sent at once, after every `every` steps.
SENDS = [
    ({"sync_batchnorm": [True]}, None),
    (
        {"local_after": [0], "within": ["rank"]},
        [
            {"collective": "all_reduce", "numbers": "trained", "bytes": 4, "pieces": "one", "per": "every"},
        ],
    ),
]
LOSSY = [
    ({}, "weights are averaged every few steps, in place of gradients"),
]
