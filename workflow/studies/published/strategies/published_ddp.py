"""published_ddp: ddp as in the published script `distributed`, with the habits of published_single and a barrier.

Its row trains single's batch on each device (config/published.yaml): half as many steps, each of twice the samples.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of DistributedDataParallel.
On a CPU: the same.
"""

from lockstep.strategies import _published, ddp


class Strategy(_published.Strategy, ddp.Strategy):
    pass
