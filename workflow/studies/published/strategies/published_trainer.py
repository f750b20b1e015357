"""published_trainer: transformers.Trainer as in the published script: started by plain `python`, in fp16.

So there is one process, which drives all visible GPUs by nn.DataParallel, and does not say so anywhere.

Advantages: none; it shows what Trainer does without a launcher.
Limits: not DistributedDataParallel, whatever the table says.
On a CPU: one process on one device, in bf16.
"""

import torch

from lockstep.strategies import single, trainer

ONE_DEVICE_ON = ("cpu",)
ONE_PROCESS_ON = ("cpu", "cuda")


class Strategy(trainer.Strategy):
    def joins_group(self):
        return False

    def asked_arguments(self):
        return {key: value for key, value in super().asked_arguments().items() if not key.startswith("ddp_")}

    def autocast(self):
        # Trainer used to compute in fp16 under nn.DataParallel; today it leaves that to Accelerate, which is bypassed.
        if isinstance(self.model, torch.nn.DataParallel):
            return single.autocast(self.world.device, self.precision)
        return super().autocast()

    def live(self):
        return {"arguments": {name: getattr(self.trainer.args, name) for name in self.arguments}}


INHERITS = ()
OPTIONS = {
    "launcher": {
        "enum": ["python"],
        "default": "python",
        "description": "plain python",
    },
    "nodes": {
        "type": "integer",
        "const": 1,
        "default": 1,
        "description": "nn.DataParallel is one process, which can't span machines.",
    },
    "precision": {
        "enum": ["amp", "bf16", "fp16", "fp32"],
        "default": "amp",
        "description": "amp is fp16 on CUDA and bf16 on CPU",
    },
}
