"""dataparallel: nn.DataParallel, one process that scatters each batch over all GPUs and gathers what they compute.

Advantages: one line around the model; no launcher, no process group.
Limits: one Python process drives all GPUs, and copies the weights from the first to the others in each step; one
machine only. PyTorch recommends DistributedDataParallel instead.
On a CPU: without a GPU, nn.DataParallel only calls the model (torch/nn/parallel/data_parallel.py), so this is single
with a wrapper; the report says so.
"""

import torch

from lockstep.strategies import single

ONE_DEVICE_ON = ("cpu",)
ONE_PROCESS_ON = ("cpu", "cuda")
PLAIN_ON = ("cpu",)
NUMBERS_DEVICE = ("output_device",)
PREFIX = "module.model."  # of the names of the weights that it saves


class Strategy(single.Strategy):
    def __init__(self, settings):
        super().__init__(settings)
        self.output = self.options.get("output_device", 0)  # a strategy that extends it may lack the option

    def wrap(self):
        on_gpus = self.world.device.type == "cuda"
        devices = list(range(self.hardware.devices)) if on_gpus else None
        output = self.output if on_gpus else None
        self.model = torch.nn.DataParallel(Replica(self.module, self.autocast), devices, output)
        for number in self.others():  # torch.manual_seed seeds every GPU alike, so all would drop the same units
            with torch.cuda.device(number):
                torch.cuda.manual_seed(torch.initial_seed() + number)
        if not on_gpus:
            self.notes.append("without a GPU nn.DataParallel only calls the model: this is single with a wrapper")

    def inputs(self, arrays):
        """The batch on this rank's device, but its labels on the GPU that gathers outputs and computes the loss."""
        tensors = super().inputs(arrays)
        if self.world.device.type == "cuda" and self.output:
            output = torch.device("cuda", self.output)
            labels = {name: tensor.to(output) for name, tensor in tensors.items() if name.startswith("labels")}
            tensors |= labels
        return tensors

    def others(self) -> list[int]:
        """The numbers of the GPUs that it trains on besides the first."""
        return self.model.device_ids[1:]

    def save_state(self, folder):
        super().save_state(folder)
        torch.save([torch.cuda.get_rng_state(number) for number in self.others()], folder / "random.pt")

    def load_state(self, folder):
        super().load_state(folder)
        states = torch.load(folder / "random.pt", map_location="cpu", weights_only=True)
        for number, state in zip(self.others(), states, strict=False):  # another number of devices may have saved it
            torch.cuda.set_rng_state(state, number)

    def live(self):
        devices = self.model.device_ids
        output = devices.index(self.model.output_device) if devices else 0
        return {"devices": max(1, len(devices)), "output_device": output}

    @staticmethod
    def to_state_dict(folder):
        state = single.Strategy.to_state_dict(folder)
        return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}


OPTIONS = {
    "nodes": {
        "type": "integer",
        "const": 1,
        "default": 1,
        "description": "nn.DataParallel is one process, which can't span machines.",
    },
    "output_device": {
        "type": "integer",
        "minimum": 0,
        "default": 0,
        "description": "the row's GPU, counted from 0, on which outputs are gathered and the loss is computed, which"
        " takes memory there. Parameters and their gradients stay on the first GPU",
    },
}


class Replica(torch.nn.Module):
    """The model as each GPU's thread runs it.

    Autocast holds for one thread only. nn.DataParallel switches it on in the other threads, but always in fp16,
    whatever precision is asked for (torch/nn/parallel/parallel_apply.py).
    """

    def __init__(self, model, autocast):
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, **inputs):
        with self.autocast():
            return self.model(**inputs)
