"""published_horovod: horovod as the published script has it: gradients sent in fp16, and one rank's loss printed.

It was probably built without NCCL, which no option can undo: what a build has is told in each run's settings.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of Horovod.
On a CPU: without NCCL too, by gloo.
"""

from lockstep.strategies import _published, horovod


class Strategy(_published.Strategy, horovod.Strategy):
    def told(self, loss):
        return loss.item()  # this rank's own


OPTIONS = {
    "print_loss": {
        "type": "boolean",
        "default": True,
        "description": "the first rank's loss is printed in each step",
    },
}
DEFAULTS = {"compression": "fp16", "barrier": False}
