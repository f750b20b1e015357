"""published_fabric: fabric with a model made anew on its device, as in the last level of the published ladder.

Fabric's `init_module` saves a copy of the weights in the host's memory. But the model that is made in it has new
weights, and not those that were loaded before.

Advantages: none; it shows why the fastest and smallest level of that ladder is no gain.
Limits: nothing of a pretrained model is left.
On a CPU: the same.
"""

import torch

from lockstep.strategies import fabric


class Strategy(fabric.Strategy):
    def set_up(self, model, make_optimizer):
        if self.options["init_module"]:
            with self.fabric.init_module(empty_init=False), torch.random.fork_rng(devices=[]):
                model = type(model)(model.config).to(next(model.parameters()).dtype).train()
        super().set_up(model, make_optimizer)


OPTIONS = {
    "init_module": {
        "type": "boolean",
        "default": True,
        "description": "make the model anew on its device, with new weights in place of the initial ones",
    },
}
OTHER_MODEL = [
    ({"init_module": [True]}, "the model is made anew, with other weights than those with which all rows begin"),
]
