"""copies: ddp whose ranks hold the replicas of the model together: as many as `copies` see the same samples.

Each of them holds the whole model and computes the same, and gradients are averaged over all. Nothing is gained by it:
it shows that a layout of ranks is trained, proven, resumed and profiled as any row, without a model that is divided.

Advantages: none; it is for tests.
Limits: the work is done `copies` times.
On a CPU: the same, through gloo.
"""

from dataclasses import replace

import torch

from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def start(self):
        self.world = super().start().in_replicas(self.options["copies"])
        if self.options["loss"] == "first" and not self.world.counts:
            self.world = replace(self.world, loss_parts=0)
        elif self.options["loss"] == "divided":
            self.world = replace(self.world, loss_parts=self.options["copies"])
        return self.world

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.world.loss_parts or torch.is_grad_enabled() else None

    def train(self, replay):
        if self.options["loss"] == "divided":
            number, whole = self.world.rank % self.options["copies"], replay.loss
            own = (number + 1) / sum(range(1, self.options["copies"] + 1))  # unequal parts, which make up 1
            replay.loss = lambda batch, outputs: own * whole(batch, outputs)
        super().train(replay)


OPTIONS = {
    "copies": {
        "type": "integer",
        "minimum": 1,
        "default": 2,
        "description": "how many ranks hold a replica together",
    },
    "loss": {
        "enum": ["whole", "first", "divided"],
        "default": "whole",
        "description": "who has the loss of a replica: each of its ranks; the first one alone, as the last stage of a"
        " pipeline; or each a part, as where ranks divide each sequence",
    },
    "equal_shares": {
        "type": "boolean",
        "default": False,
        "description": "take batches only that are shared evenly, as stages do whose tensors have one shape",
    },
}
RANKS_PER_REPLICA = ("copies",)
EQUAL_SHARES = [({"equal_shares": [True]}, "its tensors have one shape")]
