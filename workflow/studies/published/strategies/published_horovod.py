"""published_horovod: horovod as in the published script: gradients are sent in fp16, and one rank's loss is printed.

That Horovod was probably built without NCCL, which no option can imitate; each run's settings say what its build has.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of Horovod.
On a CPU: also without NCCL, through gloo.
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
