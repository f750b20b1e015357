"""zero_redundancy: ddp whose optimizer state is divided among the ranks (ZeRO stage 1, within PyTorch).

Each rank updates its share of the parameters and sends them to the others (Rajbhandari et al. 2020, arXiv:1910.02054).

Advantages: each rank keeps only its share of the optimizer's state, which for AdamW is twice the size of the model;
nothing else changes.
Limits: updated parameters are sent in each step, in addition to the gradients. In fp16 the host waits for the GPU in
each step, because the optimizer around the fused one knows nothing of loss scaling.
On a CPU: works through gloo. It saves the machine's own memory and costs time.
"""

from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.model.optimizer import wrap_optimizer
from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        self.optimizer = wrap_optimizer(self.optimizer, ZeroRedundancyOptimizer)

    def save_state(self, folder):
        self.optimizer.consolidate_state_dict(to=0)
        super().save_state(folder)


# Each weight that a rank has updated is broadcast by itself, after the optimizer's step.
SENDS = [
    ({"sync_batchnorm": [True]}, None),
    (
        {"hook": ["none"]},
        [
            {
                "collective": "all_reduce",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "bucket_mb",
                "during": "backward",
                "hidden_on": ["cpu", "cuda"],
            },
            {
                "collective": "broadcast",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "parameters",
                "in_a_row": True,
            },
        ],
    ),
]
SHARDS = [({}, ["optimizer"])]
REFUSED = [
    (
        {"optimizer": ["muon"]},
        "ZeroRedundancyOptimizer makes an optimizer of a single kind, and Muon comes with AdamW; use ddp or fsdp",
    ),
]
