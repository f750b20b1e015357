"""published_deepspeed: deepspeed as in the published script: without a sampler, so all ranks train the same batches.

Each rank trains the whole of every batch, in half precision throughout and with ZeRO stage 3. The test counts every
sample once for each rank.

Advantages: none; it shows what a missing sampler costs.
Limits: with two ranks all work is done twice.
On a CPU: bf16 in place of fp16.
"""

from lockstep.strategies import _published, deepspeed


class Strategy(_published.Strategy, deepspeed.Strategy):
    def share(self):
        return (0, 1) if self.options["no_sampler"] else super().share()


OPTIONS = {
    "no_sampler": {
        "type": "boolean",
        "default": True,
        "description": "every rank trains the whole of each batch",
    },
    "count_each_rank": {
        "type": "boolean",
        "default": True,
        "description": "the test counts every sample once for each rank",
    },
    "precision": {
        "enum": ["amp", "bf16", "fp16", "fp32"],
        "default": "amp",
        "description": "amp is fp16 on CUDA and bf16 on CPU",
    },
}
DEFAULTS = {"native_precision": True}
OTHER_MODEL = [
    ({"no_sampler": [True]}, "every rank trains the whole of each batch"),
]
WHOLE_BATCH = [
    ({"no_sampler": [True]}, "no sampler divides the batches"),
]
