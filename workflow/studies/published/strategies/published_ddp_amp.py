"""published_ddp_amp: ddp_amp as in the published script `distributed-multiprocess-amp`, which never clears gradients.

Gradients are also clipped while they are still multiplied by the loss scale. That makes them so small that AdamW's
epsilon (1e-8) counts beside them, and another model is trained. The loss scale hides that gradients are never cleared:
before each update the scaler divides what is left of all earlier steps once more, and a remainder 65,536 times smaller
does not show. Without a scaler the same mistake trains another model (tests/studies/test_published_rows.py).

Advantages: none; it shows what a missing line does.
Limits: without a loss scale it trains another model.
On a CPU: bf16 in place of fp16, with the same loss scale.
"""

import torch

from lockstep.strategies import _published, ddp_amp


class Strategy(_published.Strategy, ddp_amp.Strategy):
    def step(self):
        clip = self.clip
        if self.options["clip_scaled"] and clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.clip = 0  # so that `step` does not clip again
        super().step()
        self.clip = clip


OPTIONS = {
    "clip_scaled": {
        "type": "boolean",
        "default": True,
        "description": "gradients are clipped while they are multiplied by the loss scale (no `unscale_` before)",
    },
}
DEFAULTS = {"keep_gradients": True}
OTHER_MODEL = [
    ({"clip_scaled": [True]}, "gradients are clipped while they are multiplied by the loss scale"),
]
