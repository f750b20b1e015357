"""published_accelerate: accelerate as in the published script, with the habits of published_ddp.

The test counts every sample once for each rank.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of Accelerate; with two ranks, its test has twice as many samples as the split.
On a CPU: the same.
"""

from lockstep.strategies import _published, accelerate


class Strategy(_published.Strategy, accelerate.Strategy):
    pass


OPTIONS = {
    "count_each_rank": {
        "type": "boolean",
        "default": True,
        "description": "the test counts every sample once for each rank",
    },
}
