"""deepspeed: DeepSpeed's engine with ZeRO, which shards optimizer state (stage 1), gradients (2) and parameters (3).

Each stage also shards what the stages before it shard (Rajbhandari et al. 2020, arXiv:1910.02054). DeepSpeed's own
launcher starts the processes, or torchrun. Reduced precision is `torch_autocast`, as in the other rows; with
`native_precision` the engine casts the whole model instead.

Advantages: models far larger than one device's memory; offloading; the stage is one number in the configuration.
Limits: the engine owns precision, clipping, accumulation and the backward pass, with defaults of its own (it clips at
1.0 unless told otherwise); the shards of a checkpoint must be put together again.
On a CPU: all stages work through gloo and agree with ddp up to rounding. They are slower than ddp, so this shows that
they work, not what they are worth.
"""

import contextlib
import io
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import paths
from lockstep.config import deepspeed_file, precisions
from lockstep.config.hardware import World
from lockstep.errors import RunFailed
from lockstep.model import importing
from lockstep.strategies import ddp
from lockstep.strategies._deepspeed import (
    forget_gradients,
    load_collectives,
    make_universal,
    pickle_plainly,
    scale_as_native_fp16,
    values_only,
)
from lockstep.strategies._group import take_device


class Strategy(ddp.Strategy):
    rehearses_average = True

    def start(self):
        if self.hardware.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # Imported here because DeepSpeed chooses its accelerator on import; without mlflow, which only tuning needs.
        with importing.hidden("mlflow"):
            import deepspeed
        self.deepspeed = deepspeed
        if self.hardware.device == "cpu":
            self.notes += load_collectives(deepspeed)
        local_rank = int(os.environ["LOCAL_RANK"])
        device = take_device(self.hardware, local_rank)
        deepspeed.init_distributed(
            self.hardware.backend, verbose=False, timeout=timedelta(seconds=self.hardware.timeout)
        )
        # On a CPU the ranks share buffers of 66 MiB each, which outlive the run unless their files are removed. Once
        # every rank has opened all of them, no rank needs the files' names any more.
        dist.barrier()
        place = "{}_{MASTER_ADDR}_{MASTER_PORT}_{}".format(os.getuid(), dist.get_rank(), **os.environ)
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}").unlink(missing_ok=True)
        self.world = World(dist.get_rank(), local_rank, dist.get_world_size(), device, dist.get_backend())
        return self.world

    def _require_native(self, precision):
        """Raise RunFailed if this device has no instructions for the precision; DeepSpeed then refuses it."""
        accelerator = self.deepspeed.accelerator.get_accelerator()
        if precision == "fp16" and not accelerator.is_fp16_supported():
            raise RunFailed(
                "native_precision, precision: fp16: DeepSpeed's engine computes in fp16 only on devices that have"
                " instructions for it, and this CPU has none; set native_precision to false, or precision to bf16"
            )

    def set_up(self, model, make_optimizer):
        self.module = model.to(self.world.device)
        self.scaler = torch.amp.GradScaler(enabled=False)  # the engine has its own
        zero = {"stage": self.options["stage"]}
        if self.options["offload_optimizer"]:
            zero["offload_optimizer"] = {"device": "cpu"}
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # shares may be unequal, and the engine only multiplies by it
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,  # 0 switches clipping off; the default would be 1
            "zero_optimization": zero,
            # Without this, DeepSpeed refuses to offload PyTorch's fused optimizer, which every row has.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,  # DeepSpeed has not tested SGD; the proof tests it
        }
        if (precision := precisions.of(self.precision)).autocast:
            if self.options["native_precision"]:
                self._require_native(self.precision)
                settings[self.precision] = {"enabled": True}
            else:
                settings["torch_autocast"] = {"enabled": True, "dtype": precision.dtype}
        own, file = make_optimizer(model), self.options.get("config_file")
        settings = deepspeed_file.merged(file, settings)
        named = deepspeed_file.optimizer(file)
        if named and deepspeed_file.algorithm(named) == self.algorithm(own):
            settings["optimizer"] = _by_the_engine(named, own)
            groups = [{key: group[key] for key in ("params", "weight_decay")} for group in own.param_groups]
            given = {"model_parameters": groups}
        else:
            given = {"optimizer": own}
        self.files[paths.DEEPSPEED] = settings
        self.model, *_ = self.deepspeed.initialize(model=model, config=settings, dist_init_required=False, **given)
        self.optimizer = self.model.basic_optimizer  # the one inside ZeRO's own, whose type no schedule accepts
        if precision.scaled and self.options["stage"] and not self.options["native_precision"]:
            scale_as_native_fp16(self.model)

    def algorithm(self, optimizer):
        as_adamw = getattr(optimizer, "adam_w_mode", None)  # DeepSpeed's FusedAdam and DeepSpeedCPUAdam have it
        return super().algorithm(optimizer) if as_adamw is None else "adamw" if as_adamw else "adam"

    def loss_scale(self):
        without_zero = self.model.torch_autocast_z0_gradscaler
        return without_zero.get_scale() if without_zero else getattr(self.model.optimizer, "loss_scale", 1.0)

    def start_loss_scale(self, scale):
        if without_zero := self.model.torch_autocast_z0_gradscaler:
            without_zero.load_state_dict(without_zero.state_dict() | {"scale": scale})
        else:
            self.model.optimizer.loss_scale = scale

    def in_precision_of_weights(self, tensors):
        precision = precisions.of(self.precision)
        if not (precision.autocast and self.options["native_precision"]):
            return super().in_precision_of_weights(tensors)
        weights = getattr(torch, precision.dtype)
        return {
            name: tensor.to(weights) if tensor.is_floating_point() and not name.startswith("labels") else tensor
            for name, tensor in tensors.items()
        }

    def autocast(self):
        return contextlib.nullcontext()  # the engine has its own

    def averaging(self, last):
        return contextlib.nullcontext()  # `backward` tells the engine after which micro-batch to average

    def backward(self, loss, last):
        # The engine divides by the number of micro-batches; our losses are parts of the global batch's mean already.
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.accumulation)

    def gradient_norm(self):
        from deepspeed.utils import safe_get_full_grad

        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        gradients = [safe_get_full_grad(parameter) for parameter in trained]
        norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        return norm / self.loss_scale()

    def forget_gradients(self):
        forget_gradients(self.model)

    def step(self):
        self.model.step()

    def live(self):
        engine = self.model
        return {
            "backend": self.world.backend,
            "stage": engine.zero_optimization_stage(),
            "accumulation": engine.gradient_accumulation_steps(),
            "clip": engine.gradient_clipping(),
            "offload_optimizer": bool(engine.zero_cpu_offload()),
            "native_precision": bool(engine.fp16_enabled() or engine.bfloat16_enabled()),
            "autocast": engine.torch_autocast_enabled(),
            "reduce_bucket_size": engine.zero_reduce_bucket_size(),
        }

    def state_dict(self):
        if self.options["stage"] == 0:
            return super().state_dict()
        state = self.module.state_dict()  # at stage 3 its parameters are empty, but every name is in it
        return state | {name: self._whole(weight) for name, weight in self.module.named_parameters()}

    def _whole(self, weight):
        """A whole parameter, gathered from all ranks. A trained one is in fp32; a frozen one is in the model only."""
        from deepspeed.utils import safe_get_full_fp32_param

        if weight.requires_grad:
            return safe_get_full_fp32_param(weight)
        if self.options["stage"] < 3:
            return weight.detach()
        with self.deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def save(self, folder):
        pickle_plainly()
        self.model.save_checkpoint(str(folder), tag="final")

    def save_state(self, folder):
        pickle_plainly()
        self.model.save_checkpoint(str(folder), tag="state")

    def load_state(self, folder):
        shards = len(list(folder.glob("state/*zero_pp_rank_*_optim_states.pt")))
        with values_only():
            if shards in (0, self.world.size):
                self.model.load_checkpoint(str(folder), tag="state", load_lr_scheduler_states=False)
            else:
                self._load_from_other_shards(folder)

    def _load_from_other_shards(self, folder):
        """Load a state that another number of processes saved, by way of DeepSpeed's universal checkpoint.

        The universal checkpoint is made in the run's temporary folder. When DeepSpeed 0.19.8 reads it, it gives all
        groups of parameters the settings of the first, weight decay included, and gives all parameters one and the same
        tensor to count steps, which each of them then increments. Both are put right here.
        """
        if not isinstance(self.optimizer, torch.optim.Adam):
            raise RunFailed(
                "Another number of processes can read ZeRO's state only from DeepSpeed's universal checkpoint, which"
                " supports AdamW and Adam alone: resume with as many processes as saved the state"
            )
        universal = Path(tempfile.gettempdir()) / "universal"
        if self.world.rank == 0:
            make_universal(folder / "state", universal / "state")
        dist.barrier()
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        self.model._config.load_universal_checkpoint = True
        self.model.load_checkpoint(str(universal), tag="state", load_lr_scheduler_states=False)
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group |= own
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    @staticmethod
    def to_state_dict(folder):
        file = folder / "final" / "mp_rank_00_model_states.pt"  # at stage 3 each rank has one of its own
        if any(folder.glob("final/zero_pp_rank*")) or any(folder.glob("final/*zero*optim*")):
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            with (
                values_only(),
                contextlib.redirect_stdout(io.StringIO()),  # it prints what it does, with progress bars
                contextlib.redirect_stderr(io.StringIO()),
            ):
                state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="final")
                if file.is_file():  # at stage 1 frozen weights are stored nowhere else
                    module = torch.load(file, map_location="cpu", weights_only=True)["module"]
                    state = {name: tensor for name, tensor in module.items() if name not in state} | state
                return state
        return torch.load(file, map_location="cpu", weights_only=True)["module"]


def _by_the_engine(named: dict, own: torch.optim.Optimizer) -> dict:
    """The section `optimizer` of the user's file with this run's settings, since a trial has another learning rate."""
    group = own.param_groups[0]
    settings = {
        key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov") if key in group
    }
    return named | {"params": (named.get("params") or {}) | settings}


INHERITS = ("sync_batchnorm",)
OPTIONS = {
    "launcher": {
        "enum": ["deepspeed", "torchrun", "hand"],
        "default": "deepspeed",
        "description": "DeepSpeed's own launcher; torchrun; or hand, as in ddp",
    },
    "config_file": {
        "type": ["string", "null"],
        "default": None,
        "description": "your own configuration file for DeepSpeed's engine (ds_config.json), its optimizer included. A"
        " row that it contradicts is refused",
    },
    "stage": {
        "enum": [0, 1, 2, 3],
        "default": 3,
        "description": "ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too",
    },
    "native_precision": {
        "type": "boolean",
        "default": False,
        "description": "use the engine's own bf16 or fp16, which casts the whole model, in place of autocast",
    },
    "offload_optimizer": {
        "type": "boolean",
        "default": False,
        "description": "keep the optimizer's state in the CPU's memory",
    },
}
# Stages 0 to 2 reduce whole gradients, though 1 and 2 keep a share of them; stage 2 does so after each micro-batch.
# Stage 3 gathers weights once for forward and backward, as long as there are fewer than 5e8 (max_reuse_distance), each
# by a message of its own: a BERT of three layers has 57. What fits into one bucket of 5e8 numbers is otherwise sent in
# one piece. Nothing overlaps, unless a GPU prefetches at stage 3.
SENDS = [
    ({"sync_batchnorm": [True]}, None),
    ({"config_file": {"type": "string"}}, None),  # which may choose other buckets, or another precision
    # The weights of matrix products, and their gradients, are sent in the precision of autocast, the others in fp32.
    ({"stage": [1, 2, 3], "precision": ["bf16", "fp16"]}, None),
    # Weights of at most 1e5 numbers stay after a micro-batch (stage3_param_persistence_threshold), the others do not.
    ({"stage": [3], "accumulation": {"minimum": 2}}, None),
    (
        {"stage": [0], "native_precision": [False]},
        [
            {"collective": "all_reduce", "numbers": "trained", "bytes": 4, "pieces": "one"},
        ],
    ),
    (
        {"stage": [1], "native_precision": [False], "offload_optimizer": [False]},
        [
            {"collective": "all_reduce", "numbers": "trained", "bytes": 4, "pieces": "one"},
            {"collective": "all_gather", "numbers": "trained", "bytes": 4, "pieces": "one"},
            {"collective": "all_reduce", "numbers": 1, "bytes": 4, "pieces": "one"},
        ],
    ),
    (
        {"stage": [2], "native_precision": [False], "offload_optimizer": [False]},
        [
            {"collective": "all_reduce", "numbers": "trained", "bytes": 4, "pieces": "one", "per": "micro_batch"},
            {"collective": "all_gather", "numbers": "trained", "bytes": 4, "pieces": "one"},
            {"collective": "all_reduce", "numbers": 1, "bytes": 4, "pieces": "one"},
        ],
    ),
    (
        {"stage": [3], "native_precision": [False], "offload_optimizer": [False]},
        [
            {
                "collective": "all_gather",
                "numbers": "weights",
                "bytes": 4,
                "pieces": "parameters",
                "per": "micro_batch",
                "during": "forward",
                "hidden_on": ["cuda"],
            },
            {
                "collective": "reduce_scatter",
                "numbers": "trained",
                "bytes": 4,
                "pieces": "one",
                "per": "micro_batch",
                "during": "backward",
                "hidden_on": ["cuda"],
            },
            {"collective": "all_reduce", "numbers": 1, "bytes": 4, "pieces": "one"},
        ],
    ),
]
SHARDS = [
    ({"stage": [1]}, ["optimizer"]),
    ({"stage": [2]}, ["optimizer", "gradients"]),
    ({"stage": [3]}, ["optimizer", "gradients", "weights"]),
]
NO_FP64 = "ZeRO keeps the weights that it trains in fp32"
NEEDS = {"deepspeed": ("0.19.8", "make setup")}
FILES = ("config_file",)
CHECKED = {"config_file": "deepspeed_file"}
UNCOUNTED = [({"offload_optimizer": [True]}, "the optimizer computes in the host's memory")]
LOSSY = [
    (
        {"native_precision": [True], "precision": ["bf16", "fp16"]},
        "what autocast would keep in fp32 is computed in the reduced precision, too",
    ),
]
REFUSED = [
    (
        {"optimizer": ["muon"]},
        "ZeRO clips the step of its own Muon where others clip the gradient (docs/catalogue.md); use fsdp or ddp",
    ),
    ({"offload_optimizer": [True], "stage": [0]}, "ZeRO stage 0 has no optimizer shards to offload; use stage 1 to 3"),
    (
        {"native_precision": [True], "precision": ["fp16"], "stage": [0]},
        "DeepSpeed 0.19.8 divides these gradients by a scale that it did not multiply the loss by; use stage 1 to 3",
    ),
    (
        {"native_precision": [True], "precision": ["bf16"], "stage": [0]},
        "at stage 0 DeepSpeed keeps the trained weights in bf16 only; use stage 1 to 3",
    ),
    (
        {"offload_optimizer": [True], "device": ["cpu"]},
        "the optimizer is on the CPU already; set offload_optimizer to false",
    ),
    (
        {"lora": {"minimum": 1}, "native_precision": [True], "precision": ["bf16", "fp16"]},
        "the engine would round the frozen weights, too; set native_precision to false, as autocast leaves them"
        " unchanged",
    ),
]
