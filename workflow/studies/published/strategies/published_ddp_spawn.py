"""published_ddp_spawn: ddp_spawn as in the published script `distributed-multiprocess`, with published_ddp's habits.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of torch.multiprocessing.spawn.
On a CPU: the same.
"""

from lockstep.strategies import _published, ddp_spawn


class Strategy(_published.Strategy, ddp_spawn.Strategy):
    pass
