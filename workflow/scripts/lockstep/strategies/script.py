"""script: a training script of your own, with its own loop and its own wrapping, which trains the plan of all rows.

The script tells Lockstep five things through `lockstep.session`: that it has joined, what it trains, which step it is
in, its loss, and when the gradients are ready. In return it gets clocks, a proof and a line in the table. torchrun
starts it, on this machine or on several.

Advantages: what you have is measured and proven as it is, by the same plan as the other rows.
Limits: samples, initial weights and schedule come from the plan; an interrupted run can go on only where each rank
holds whole weights.
On a CPU: whatever the script does there; the one that comes with Lockstep, config/my_script.py, does what `ddp` does.
"""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lockstep.config import precisions
from lockstep.errors import RunFailed
from lockstep.strategies import _group


class Strategy(_group.Strategy):
    rehearses_average = True  # when gradients are averaged is known to the script's wrapping only

    def lead(self, session):
        """Run the script, which goes through the session's runs (lockstep/session.py)."""
        script = Path(self.options["script"])
        sys.path.insert(0, str(script.resolve().parent))
        sys.argv = [str(script), *self.options["arguments"]]
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise RunFailed(f"{script}: it ended itself by sys.exit({ended.code!r})") from ended
        if session.trained < (wanted := 1 + len(session.settings.variations)):
            raise RunFailed(
                f"{script}: it ended after {session.trained} of {wanted} trainings. It must go through all runs of"
                " session.join, and through all steps of each."
            )

    def take(self, module: torch.nn.Module, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take over what the script has made: the plain model, the wrapped one, and the optimizer."""
        self.module, self.model, self.optimizer = module, model, optimizer
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=precisions.of(self.precision).scaled)

    def gradient_norm(self):
        return whole(super().gradient_norm())

    def live(self):
        return {"backend": dist.get_backend()}

    def state_dict(self):
        return {name: whole(tensor) for name, tensor in self.module.state_dict().items()}

    def save(self, folder):
        state = self.state_dict()
        if self.world.rank == 0:
            torch.save(state, folder / "checkpoint.pt")

    def save_state(self, folder):
        if any(isinstance(weight, DTensor) for weight in self.module.parameters()):
            raise RunFailed(
                "checkpoint_every: the script's weights are sharded, and the state of sharded weights can't be saved."
                " Set checkpoint_every to 0 in its row."
            )
        super().save_state(folder)

    def stop(self):
        if dist.is_initialized():  # the script may have left the group already
            super().stop()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded, gathered from all ranks. Called on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.cpu().full_tensor().to(tensor.device)  # gloo can't gather a GPU's tensors


FILES = ("script",)
UNCOUNTED = [({}, "the script is your own")]
OWN_OPTIMIZER = [({}, "the script makes it")]
OPTIONS = {
    "script": {
        "type": "string",
        "minLength": 1,
        "default": "config/my_script.py",
        "description": "path of the script, which trains through `lockstep.session`",
    },
    "arguments": {
        "type": "array",
        "items": {"type": "string"},
        "default": [],
        "description": "the script's command-line arguments, for example [--compile, --bucket=25]",
    },
    "launcher": {
        "enum": ["torchrun", "launch", "hand"],
        "default": "torchrun",
        "description": "as for ddp",
    },
    "rendezvous": {
        "enum": ["static", "c10d"],
        "default": "static",
        "description": "as for ddp",
    },
}
