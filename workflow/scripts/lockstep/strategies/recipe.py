"""recipe: the open division: DDP, or a single process, with options that make a step cheaper, to be tried one by one.

This file selects the options; each is implemented in the file named beside it.

packed      texts are put end to end in rows as long as the longest text, so that there is hardly any padding; on a GPU
            in bf16 or fp16 they are all in one row, with attention for texts of any lengths (data/packing.py)
compile     torch.compile. dynamic: one program for all shapes; static: one for each of a few widths, to which batches
            are rounded up, and which GPUs replay as CUDA graphs (model/compiling.py)
weights     bf16: the model computes and communicates in bf16 throughout, but for batch normalisation, while the
            optimizer keeps weights in fp32 and updates those (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1;
            model/master_weights.py)
tf32        matrix products and convolutions in fp32 are computed in TensorFloat-32, with 10 bits of precision
resident    all token ids are on the device from the start, and batches are put together there (data/resident.py)
optimizer   adamw8bit: AdamW keeps its state in 8 bits for tensors of 4096 numbers or more (Dettmers et al. 2021,
            arXiv:2110.02861), by bitsandbytes (model/optimizer.py)

Advantages: shows how fast the same texts can be learnt without the rules of the closed division.
Limits: not the same numbers; the report shows whether the model is as good (config/ladder.yaml).
On a CPU: bf16 pays off where the CPU has bf16 instructions. Packing does not: attention over rows of several texts
costs more than the little padding that is left when a batch has texts of similar length. Compiling a model of this size
does not pay off either. A state in 8 bits costs time, because it is converted in each step.
"""

import contextlib

import torch

from lockstep.config import precisions
from lockstep.data import packing
from lockstep.data.resident import ResidentTokens
from lockstep.model import compiling, models
from lockstep.model.master_weights import MasterWeights, in_bf16
from lockstep.strategies import ddp, single
from lockstep.strategies._hooks import average_in_fp32


class Strategy(ddp.Strategy):
    resident: ResidentTokens | None = None  # made for the first batch

    @property
    def weights_in_bf16(self) -> bool:
        return self.options["weights"] == "bf16"

    def joins_group(self):
        return self.processes > 1  # DDP would copy the gradients of one process for nothing

    def set_up(self, model, make_optimizer):
        super().set_up(model, lambda _: make_optimizer(self.trained))
        if self.weights_in_bf16:
            self.optimizer = MasterWeights(self.optimizer, self.trained, self.module, self.clip)

    def wrap(self):
        self.trained = self.module  # what the optimizer updates; the module is what computes
        if self.weights_in_bf16:
            self.module = self.model = in_bf16(self.trained)
        if self.options["packed"]:
            self.model = packing.Packed(self.module)
            self.varlen = self._has_varlen()
            if self.varlen:
                packing.use_varlen(self.module)
                if any(models.dropouts(self.module)):
                    self.notes.append("attention for texts of any lengths (varlen_attn) has no dropout")
        if self.options["compile"] == "dynamic":
            compiling.compile_dynamic(self.model)
        elif self.options["compile"] == "static":
            compiling.compile_static(self.model, self.world.device)
            if self.world.device.type == "cuda":  # the allocator does not run when a graph is replayed
                self.notes.append("its peak memory leaves out that within CUDA graphs; reserved_memory_mb has it")
        if self.joins_group():
            super().wrap()
            if self.weights_in_bf16:
                self.model.register_comm_hook(None, average_in_fp32)

    def batch(self, samples, ids, width):
        if not self.options["resident"]:
            return super().batch(samples, ids, width)
        if self.resident is None:
            self.resident = ResidentTokens(samples, self.world.device)
        return self.resident.batch(self.to_device({"ids": ids})["ids"], int(self.padded_width(width)))

    def collate(self):
        if self.options["packed"]:
            return packing.one_row if self.varlen else packing.several_rows
        return super().collate()

    def inputs(self, arrays):
        longest = {name: arrays[name] for name in ("longest",) if name in arrays}  # a number, which the host needs
        return super().inputs({name: array for name, array in arrays.items() if name not in longest}) | longest

    def padded_width(self, width):
        if self.options["compile"] != "static":
            return width
        longest = getattr(getattr(self.module, "config", None), "max_position_embeddings", None)  # images have none
        return compiling.few_widths(width, longest) if longest else width

    def _has_varlen(self) -> bool:
        """Whether FlashAttention works on this device, in this precision."""
        device = self.world.device
        reduced = precisions.of(self.precision).autocast
        return device.type == "cuda" and reduced and torch.cuda.get_device_capability(device) >= (8, 0)

    def averaging(self, last):
        return super().averaging(last) if self.joins_group() else contextlib.nullcontext()

    def rehearse(self, replay, batch):
        replayed = self.options["compile"] == "static" and self.world.device.type == "cuda"
        for _ in range(compiling.CALLS_TO_A_GRAPH if replayed else 1):
            super().rehearse(replay, batch)

    def step(self):
        if self.weights_in_bf16:
            self.optimizer.step()  # clips, too, in fp32
            self.optimizer.zero_grad()
        else:
            super().step()

    def live(self):
        bf16 = any(weight.dtype == torch.bfloat16 for weight in self.module.parameters())
        own = {
            "packed": any(isinstance(module, packing.Packed) for module in self.model.modules()),
            "weights": "bf16" if bf16 else "fp32",
            "tf32": torch.get_float32_matmul_precision() == "high",
        }
        return super().live() | own if self.joins_group() else own

    def state_dict(self):
        return self.trained.state_dict()

    def save(self, folder):
        if self.world.rank == 0:
            torch.save(self.state_dict(), folder / "checkpoint.pt")

    def trained_module(self):
        return self.trained

    def load_state(self, folder):
        super().load_state(folder)
        if self.weights_in_bf16:
            self.optimizer.round()

    @staticmethod
    def to_state_dict(folder):
        return single.Strategy.to_state_dict(folder)


OPTIONS = {
    "packed": {
        "type": "boolean",
        "default": False,
        "description": "put texts end to end instead of padding them; for BERT models",
    },
    "compile": {
        "enum": ["off", "dynamic", "static"],
        "default": "off",
        "description": "torch.compile: one program for all shapes (`dynamic`), or one for each width, rounded up to a"
        " multiple of 16 (`static`)",
    },
    "weights": {
        "enum": ["fp32", "bf16"],
        "default": "fp32",
        "description": "the weights that the model computes with; with `bf16` the optimizer keeps others in fp32",
    },
    "tf32": {
        "type": "boolean",
        "default": False,
        "description": "multiply fp32 matrices in TensorFloat-32",
    },
    "resident": {
        "type": "boolean",
        "default": False,
        "description": "keep all token ids on the GPU, and put batches together there",
    },
    "optimizer": {
        "enum": ["adamw", "adam", "sgd", "muon", "adamw8bit"],
        "description": "as in train, or AdamW with its state in 8 bits",
    },
}
INHERITS = [
    "launcher",
    "gradient_as_bucket_view",
    "bucket_mb",
    "static_graph",
    "find_unused_parameters",
    "hook",
    "powersgd_rank",
    "sync_batchnorm",
]
NEEDS = {
    "bitsandbytes": ("0.50.2", "pip install bitsandbytes==0.50.2", {"optimizer": ["adamw8bit"]}),
}
DIVISION = "open"
COMPILES = [({"compile": ["dynamic", "static"]}, "torch.compile")]
TRIES = [
    {"precision": "bf16"},
    {"precision": "bf16", "weights": "bf16"},
    {"processes": "auto"},
    {"tf32": True},
    {"packed": True},
    {"resident": True},
    {"compile": "dynamic"},
    {"compile": "static"},
]
UNCOUNTED = [
    ({"compile": ["dynamic", "static"]}, "the compiler decides what is kept"),
    ({"resident": [True]}, "the whole training split lies on the GPU"),
]
REFUSED = [
    (
        {"packed": [True], "task": ["image-classification", "image-segmentation"]},
        "only texts can be put end to end",
    ),
    (
        {"resident": [True], "task": ["image-classification", "image-segmentation"]},
        "only the token ids of texts are kept on the GPU",
    ),
    ({"weights": ["bf16"], "precision": ["fp32", "fp16"]}, "the model then computes in bf16; set precision to bf16"),
    ({"weights": ["bf16"], "hook": ["fp16", "bf16", "powersgd"]}, "gradients are bf16 already; set hook to none"),
    ({"tf32": [True], "device": ["cpu"]}, "only GPUs have TensorFloat-32; on a CPU use precision: bf16"),
    ({"resident": [True], "device": ["cpu"]}, "on a CPU the token ids are where they are needed already"),
    ({"packed": [True], "task": ["language-modelling"]}, "the sequences of this task have no padding"),
    ({"resident": [True], "task": ["language-modelling"]}, "batches of this task are put together on the host"),
    ({"packed": [True], "compile": ["static"]}, "packed batches differ in their number of rows; use compile: dynamic"),
    ({"packed": [True], "resident": [True]}, "packed batches are put together on the host"),
    (
        {"compile": ["static"], "device": ["cuda"], "accumulation": {"minimum": 2}},
        "the program is replayed as CUDA graphs, which overwrite the gradients that accumulation adds to; set compile"
        " to dynamic, or accumulation to 1",
    ),
    (
        {"resident": [True], "workers": {"minimum": 1}},
        "batches are put together on the GPU, not by worker processes; set workers to 0, or resident to false",
    ),
]
LOSSY = [
    ({"weights": ["bf16"]}, "what autocast would keep in fp32 is computed in bf16, too"),
    ({"tf32": [True]}, "fp32 matrices are multiplied with 10 bits of precision"),
    ({"optimizer": ["adamw8bit"]}, "the optimizer's state is rounded to 8 bits in each step"),
]
