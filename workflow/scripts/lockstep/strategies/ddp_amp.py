"""ddp_amp: ddp_spawn in automatic mixed precision: autocast around the forward pass, a GradScaler around the rest.

float16 loses gradients below 6e-8. The scaler multiplies the loss so that gradients stay above that, divides them again
before the update, and skips an update whose gradients overflowed (Micikevicius et al. 2018, arXiv:1710.03740, section
3.2). bfloat16 has float32's range and would need no scaler; it is kept here so that the row does the same on every
device.

Advantages: tensor cores on GPUs, and half the memory for activations.
Limits: not the same numbers as float32; with fp16 some updates may be skipped.
On a CPU: bf16, because more CPUs have instructions for it than for fp16. It is faster than float32 only where the CPU
has them; with AVX2 alone a step takes 7 to 9 times as long in either (docs/performance.md).
"""

import torch

from lockstep.strategies import ddp_spawn


class Strategy(ddp_spawn.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        self.scaler = torch.amp.GradScaler(self.world.device.type)


OPTIONS = {
    "precision": {
        "enum": ["amp", "bf16", "fp16"],
        "default": "amp",
        "description": "amp is fp16 on CUDA and bf16 on CPU",
    },
}
SENDS = "ddp"
