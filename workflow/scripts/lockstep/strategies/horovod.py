"""horovod: Horovod's ring all-reduce (Sergeev and Del Balso 2018, arXiv:1802.05799), hooked onto the optimizer.

Each gradient is sent as soon as the backward pass has computed it; `step` waits for all of them. horovodrun starts the
processes, which communicate through gloo, or leaves both to MPI (`controller: mpi`). On GPUs gradients go through NCCL
if Horovod was built with it.

Advantages: no wrapper around the model; fits in where MPI is used already.
Limits: no release since 2023, so it must be built, with a newer C++ standard than it asks for; built without NCCL it
moves all gradients through the CPU. broadcast_optimizer_state would make a fresh AdamW take a step.
On a CPU: gloo or MPI.
"""

import horovod.torch as hvd
from torch.profiler import record_function

from lockstep.config.hardware import World
from lockstep.model import batch_norm
from lockstep.strategies import single
from lockstep.strategies._group import take_device


class Strategy(single.Strategy):
    def start(self):
        hvd.init()
        device = take_device(self.hardware, hvd.local_rank())
        backend = "nccl" if device.type == "cuda" and hvd.nccl_built() else self.options["controller"]
        if device.type == "cuda" and backend != "nccl":
            self.notes.append(
                f"Horovod is built without NCCL here, so gradients go from GPU to GPU through the CPU, by {backend}:"
                " its time is no measure of Horovod on GPUs"
            )
        self.world = World(hvd.rank(), hvd.local_rank(), hvd.size(), device, backend)
        return self.world

    def synchronised(self, model):
        if not self.options["sync_batchnorm"]:
            return model
        # Not Horovod's SyncBatchNorm: it trains on GPUs only, and counts in fp32, which the kernels refuse beside fp64.
        return batch_norm.synchronised(model, batch_norm.shared(sum_over_ranks))

    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        # Parameters only. Sending the state of a fresh AdamW would make it take a step on gradients of zero first.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        own = self.optimizer
        self.optimizer = hvd.DistributedOptimizer(
            own,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, self.options["compression"]),
            backward_passes_per_step=self.accumulation,
        )
        # A fused optimizer unscales fp16 gradients by itself. Horovod's subclass does not say so any more, and
        # PyTorch's GradScaler would then wait for the device in each step.
        if getattr(own, "_step_supports_amp_scaling", False):
            self.optimizer._step_supports_amp_scaling = True

    def gradient_norm(self):
        self.optimizer.synchronize()
        return super().gradient_norm()

    def step(self):
        with record_function("communication"):  # in Horovod's own threads, which PyTorch's profiler does not see
            self.optimizer.synchronize()  # here, as clipping needs the averages; `step` need not wait again
        with self.optimizer.skip_synchronize():
            super().step()

    def forget_gradients(self):
        self.optimizer.synchronize()  # the backward pass has started to average them
        super().forget_gradients()

    def live(self):
        compressions = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}
        return {
            "compression": compressions[self.optimizer._compression],
            "accumulation": self.optimizer.backward_passes_per_step,
            "controller": "mpi" if hvd.mpi_enabled() else "gloo",
            "nccl_built": bool(hvd.nccl_built()),
            "mpi_built": bool(hvd.mpi_built()),
            "gloo_built": bool(hvd.gloo_built()),
        }

    def all_gather(self, tensor):
        return hvd.allgather(tensor[None])

    def stop(self):
        hvd.shutdown()


OPTIONS = {
    "launcher": {
        "enum": ["horovodrun"],
        "default": "horovodrun",
        "description": "horovodrun",
    },
    "controller": {
        "enum": ["gloo", "mpi"],
        "default": "gloo",
        "description": "what the processes find each other through and, without NCCL, communicate through",
    },
    "compression": {
        "enum": ["none", "fp16"],
        "default": "none",
        "description": "with `fp16`, send gradients in fp16",
    },
    "sync_batchnorm": {
        "type": "boolean",
        "default": False,
        "description": "batch normalisation takes its statistics over all ranks, by Lockstep's own implementation",
    },
}
NEEDS = {"horovod": ("0.28.1", "make horovod")}
SYNCS_BATCH_NORM = ["sync_batchnorm"]
LOSSY = [
    ({"compression": ["fp16"]}, "gradients are compressed before they are sent"),
]
UNCOUNTED = [({}, "Horovod connects ranks by its own library, where one rank can't run without the others")]
REFUSED = [
    (
        {"optimizer": ["muon"]},
        "Horovod makes an optimizer of its own, of a single kind, and Muon comes with AdamW; use ddp",
    ),
]


def sum_over_ranks(tensor):
    """The sum of all ranks' tensors, on each rank; the backward pass sums gradients in the same way."""
    return hvd.allreduce(tensor, op=hvd.Sum)
