"""fsdp: FSDP2 (`fully_shard`): every rank keeps a shard of each parameter, of its gradient and of its optimizer state.

A layer's parameters are gathered just before the layer runs and freed after it; its gradients are averaged into shards
(Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054, stage 3). With `replicate: n` the ranks
form n groups, for example one per machine. Each group shards the whole model among its ranks, and gradients are
averaged over all groups, so parameters are sent within a group only (hybrid sharding, HSDP).

Advantages: models larger than one device's memory, with PyTorch alone; checkpoints are sharded, too.
Limits: parameters are sent in both the forward and the backward pass, so 1.5 times as much is sent as by ddp.
On a CPU: works through gloo and agrees with ddp. It is slower than ddp, so this shows that it works, not what it is
worth.
"""

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from lockstep.errors import RunFailed
from lockstep.model import batch_norm, models
from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    rehearses_average = True  # else FSDP keeps unsharded gradients until it next averages

    def place(self, model):
        """Leave the model on the host: `fully_shard` moves one layer at a time, so no device ever holds it whole."""
        return model

    def wrap(self):
        policy = MixedPrecisionPolicy()
        if self.precision == "bf16" and self.options["mixed_precision"] == "policy":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding = {
            "mesh": self.device_mesh(),
            "mp_policy": policy,
            "reshard_after_forward": self.options["reshard_after_forward"],
        }
        if policy.param_dtype:  # as autocast leaves them; PyTorch refuses weights in bf16 beside statistics in fp32
            for norm in filter(batch_norm.depends_on_batch, self.model.modules()):
                fully_shard(norm, **sharding | {"mp_policy": MixedPrecisionPolicy()})
        for layer in layers(self.model, self.on_host(self.sample)):
            fully_shard(layer, **sharding)
        fully_shard(self.model, **sharding)  # in place, before the optimizer is made, which then updates the shards

    def on_host(self, arrays):
        return self.in_precision_of_weights({name: torch.from_numpy(array) for name, array in arrays.items()})

    def device_mesh(self):
        groups = self.options["replicate"]
        if groups == 1:
            return init_device_mesh(self.world.device.type, (self.world.size,))
        shape = (groups, self.world.size // groups)  # neighbouring ranks form a group
        return init_device_mesh(self.world.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        if isinstance(self.optimizer, torch.optim.SGD):  # PyTorch 2.13 has no fused SGD for sharded tensors
            for group in self.optimizer.param_groups:
                group |= {"fused": False, "foreach": True}

    def autocast(self):
        if self.options["mixed_precision"] == "policy":
            return torch.autocast(self.world.device.type, enabled=False)
        return super().autocast()

    def averaging(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def gradient_norm(self):
        return super().gradient_norm().full_tensor()

    def live(self):
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        groups = [group for module in sharded for group in param_groups(module)]
        meshes = {parameter.device_mesh for parameter in self.model.parameters()}
        return {
            "backend": self.world.backend,
            "replicate": max(mesh.size(0) if mesh.ndim > 1 else 1 for mesh in meshes),
            "shard": max(mesh.size(-1) for mesh in meshes),
            "sharded_modules": len(sharded),
            "reshard_after_forward": all(group.post_forward_mesh_info is not None for group in groups),
        }

    def state_dict(self):
        self._share_buffers()
        state = self.model.state_dict()
        return {name: self._whole(tensor) if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}

    def _whole(self, tensor):
        """A sharded tensor, gathered from all ranks; gloo gathers it in the host's memory.

        Gathering a GPU's tensor through gloo ends the process (github.com/pytorch/pytorch/issues/132471).
        """
        if self.world.backend == "gloo":
            return tensor.cpu().full_tensor().to(tensor.device)
        return tensor.full_tensor()

    def _share_buffers(self):
        """Give every rank the buffers of rank 0, as ddp does before each step; FSDP leaves each rank its own."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def save(self, folder):
        self._share_buffers()
        # As safetensors, because the default writer describes its files in a pickle, which may run any code. The format
        # does not store a tensor twice, so only one of several tied weights is saved.
        tied = models.tied_names(self.model)
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}
        with saying_why():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    @contextlib.contextmanager
    def as_kept(self):
        own = [buffer.clone() for buffer in self.model.buffers()]
        yield
        for buffer, before in zip(self.model.buffers(), own, strict=True):
            buffer.copy_(before)

    def save_state(self, folder):
        state = {f"weights.{name}": weight for name, weight in self.model.named_parameters()}
        for name, weight in self.model.named_parameters():
            for key, tensor in self.optimizer.state.get(weight, {}).items():  # a frozen one has none
                # PyTorch 2.13 can't read back a tensor without dimensions.
                state[f"optimizer.{key}.{name}"] = tensor if tensor.ndim else tensor.reshape(1)
        with saying_why():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    def load_state(self, folder):
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        state = {}
        for name, weight in self.model.named_parameters():
            state[f"weights.{name}"] = weight.detach()  # filled in place
            for key in OPTIMIZER_STATE:
                if f"optimizer.{key}.{name}" in stored:
                    empty = torch.zeros(1, device=weight.device) if key == "step" else torch.zeros_like(weight.detach())
                    state[f"optimizer.{key}.{name}"] = empty
                    self.optimizer.state[weight][key] = empty[0] if key == "step" else empty  # the same memory
        if missing := stored.keys() - state.keys():
            raise RunFailed(f"{folder}: holds {min(missing)}, which this model and optimizer do not have")
        with saying_why():
            dcp.load(state, storage_reader=reader)

    @staticmethod
    def to_state_dict(folder):
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of a single process, which is intended
            dcp.load(state, storage_reader=reader, no_dist=True)
        return state


OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW, Adam and SGD
INHERITS = ("launcher", "sync_batchnorm")
DIVIDES_RANKS = ("replicate",)
OPTIONS = {
    "replicate": {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "number of groups of ranks, each of which shards the whole model; 1: all ranks are one group",
    },
    "reshard_after_forward": {
        "type": "boolean",
        "default": True,
        "description": "free a layer's gathered parameters after its forward pass, which saves memory and sends more",
    },
    "mixed_precision": {
        "enum": ["autocast", "policy"],
        "default": "autocast",
        "description": "bf16 by autocast, as in other rows, or by FSDP's policy, which also gathers parameters in bf16",
    },
}
# A layer's weights are gathered before it computes, and freed after it; with reshard_after_forward they are gathered
# again for its backward pass. On a CPU all of this blocks. To clip, ranks sum norms, a number for each weight.
SENDS = [
    ({"sync_batchnorm": [True]}, None),
    (
        {"replicate": [1], "mixed_precision": ["policy"], "precision": ["bf16"]},
        [
            {
                "collective": "all_gather",
                "numbers": "weights",
                "bytes": 2,
                "pieces": "layers",
                "per": "micro_batch",
                "during": "forward",
                "hidden_on": ["cuda"],
            },
            {
                "where": {"reshard_after_forward": [True]},
                "collective": "all_gather",
                "numbers": "weights",
                "bytes": 2,
                "pieces": "layers",
                "per": "micro_batch",
                "during": "backward",
                "hidden_on": ["cuda"],
            },
            {
                "collective": "reduce_scatter",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "layers",
                "during": "backward",
                "hidden_on": ["cuda"],
            },
            {
                "where": {"clip": {"exclusiveMinimum": 0}},
                "collective": "all_reduce",
                "numbers": 1,
                "bytes": 4,
                "pieces": "one",
            },
        ],
    ),
    (
        {"replicate": [1]},
        [
            {
                "collective": "all_gather",
                "numbers": "weights",
                "bytes": 4,
                "pieces": "layers",
                "per": "micro_batch",
                "during": "forward",
                "hidden_on": ["cuda"],
            },
            {
                "where": {"reshard_after_forward": [True]},
                "collective": "all_gather",
                "numbers": "weights",
                "bytes": 4,
                "pieces": "layers",
                "per": "micro_batch",
                "during": "backward",
                "hidden_on": ["cuda"],
            },
            {
                "collective": "reduce_scatter",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "layers",
                "during": "backward",
                "hidden_on": ["cuda"],
            },
            {
                "where": {"clip": {"exclusiveMinimum": 0}},
                "collective": "all_reduce",
                "numbers": 1,
                "bytes": 4,
                "pieces": "one",
            },
        ],
    ),
]
SHARDS = [({}, ["optimizer", "gradients", "weights"])]
LOSSY = [
    (
        {"mixed_precision": ["policy"], "precision": ["bf16"]},
        "what autocast would keep in fp32 is computed in bf16, too",
    ),
]
REFUSED = [
    ({"precision": ["fp16"]}, "there is no gradient scaler for sharded gradients; use precision: bf16"),
]


def param_groups(module: FSDPModule) -> list:
    """The groups in which FSDP2 gathers a module's parameters; PyTorch 2.13 has a list of them, 2.11 one or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


@contextlib.contextmanager
def saying_why():
    """Raise the exception of the first rank that failed; DCP's own exception gives only the numbers of such ranks."""
    try:
        yield
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


def layers(model, sample):
    """The model's layers, which are sharded one by one, except those that one forward pass calls several times.

    ALBERT's layers share one set of parameters, but FSDP2 expects one backward pass of a layer for each forward pass,
    so such a layer is sharded with the whole model. `sample` holds the model's inputs for one sample, on its device.
    """
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    calls = dict.fromkeys((layer for stack in stacks for layer in stack), 0)
    if not calls:
        return []

    def count(module, inputs):
        calls[module] += 1

    hooks = [layer.register_forward_pre_hook(count) for layer in calls]
    model.eval()  # so that no random number is drawn
    inputs = {name: tensor for name, tensor in sample.items() if name != "labels"}
    with torch.no_grad():
        try:  # by shapes alone, which takes no time, however large the model is
            weights = dict([*model.named_parameters(), *model.named_buffers()])
            functional_call(model, on_meta(weights), kwargs=on_meta(inputs))
        except Exception:  # a model may look at values, and then raises anything
            calls.update(dict.fromkeys(calls, 0))
            model(**inputs)
    model.train()
    for hook in hooks:
        hook.remove()
    return [layer for layer, times in calls.items() if times <= 1]


def on_meta(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}
