"""recipe: the open division. DDP, or one process alone, with what makes a step cheaper; each an option, one at a time.

packed      texts end to end in rows as long as the longest text, so that hardly a token is padding (packing.py)
compile     torch.compile: dynamic, one program for all shapes; or static, one for each of a few widths, to which
            batches are rounded up (on GPUs replayed as CUDA graphs)
weights     bf16: the model computes and communicates in bf16 throughout, the optimizer keeps weights in fp32 and trains
            those (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1)
tf32        fp32 matrices are multiplied in TensorFloat-32, with 10 bits of precision
resident    all token ids lie on the device from the start, and batches are put together there
lora        queries and values are changed by products of two thin matrices; those and the head are trained, the rest
            keeps its initial weights (Hu et al. 2021, arXiv:2106.09685), by peft
optimizer   adamw8bit: AdamW keeps its state in 8 bits, of tensors of 4096 numbers or more (Dettmers et al. 2021,
            arXiv:2110.02861), by bitsandbytes

Advantages: how fast the same texts can be learnt when the rules of the closed division do not hold.
Limits: not the same numbers; whether it is as good is for the report to tell (config/ladder.yaml). lora is meant
for pretrained models: one from scratch keeps the random embeddings that it began with.
On a CPU: bf16 pays where the CPU has bf16 instructions. Packing does not, as attention over rows of several texts costs
more than the padding that buckets leave; nor does compiling a model of this size. State in 8 bits costs time, as it
is converted in each step.
"""

import contextlib
import copy
import math

import numpy as np
import torch

from lockstep.data import packing
from lockstep.data.tokens import Tokens
from lockstep.errors import RunFailed
from lockstep.strategies import ddp, single

HEAD = {"pooler", "pre_classifier", "classifier", "score"}  # what models call what follows the encoder
WIDTH = 16  # static: widths are multiples of this


class Strategy(ddp.Strategy):
    def joins_group(self):
        return self.processes > 1  # DDP would copy the gradients of one process for nothing

    def prepare(self, model, make_optimizer):
        if self.options["tf32"]:
            torch.set_float32_matmul_precision("high")
        if self.options["lora"]:
            self.adapted = adapted(model, self.options["lora"])
            model = self.adapted.get_base_model()  # the same class as before, with updates beside its matrices
        super().prepare(model, lambda _: make_optimizer(self.trained))
        if self.options["optimizer"] == "adamw8bit":
            self.optimizer = in_8_bits(self.optimizer)

    def wrap(self):
        self.trained = self.module  # what the optimizer updates; the module is what computes
        if self.options["weights"] == "bf16":
            self.module = self.model = copy.deepcopy(self.trained).to(torch.bfloat16)
        if self.options["packed"]:
            self.model = packing.Packed(self.module)
        if self.options["compile"] == "dynamic":
            self.model.compile(dynamic=True)
        elif self.options["compile"] == "static":
            torch._dynamo.config.cache_size_limit = 64
            on_gpu = self.world.device.type == "cuda"
            self.model.compile(dynamic=False, mode="reduce-overhead" if on_gpu else "default")
        if self.joins_group():
            super().wrap()
            if self.options["weights"] == "bf16":
                self.model.register_comm_hook(None, average_in_fp32)

    def batch(self, tokens, ids, width):
        if self.options["packed"]:
            return self.to_device(packing.batch(tokens, ids, tokens.longest))
        if self.options["compile"] == "static":
            width = min(math.ceil(width / WIDTH) * WIDTH, self.module.config.max_position_embeddings)
        if self.options["resident"]:
            return self.resident_batch(tokens, ids, int(width))
        return super().batch(tokens, ids, width)

    def resident_batch(self, tokens, ids, width):
        """What `Tokens.batch` returns, made on the device from arrays that are there."""
        if not hasattr(self, "data"):
            every = Tokens(tokens.flat(np.arange(len(tokens))), tokens.lengths, tokens.labels, tokens.pad_id)
            arrays = {name: getattr(every, name) for name in ("token_ids", "starts", "lengths", "labels")}
            self.data = {name: torch.tensor(array, device=self.world.device) for name, array in arrays.items()}
        ids = self.to_device({"ids": ids})["ids"]
        columns = torch.arange(width, device=self.world.device)
        mask = columns < self.data["lengths"][ids, None]
        positions = torch.where(mask, self.data["starts"][ids, None] + columns, 0)
        token_ids = torch.where(mask, self.data["token_ids"][positions], tokens.pad_id)
        return {"input_ids": token_ids.long(), "attention_mask": mask.long(), "labels": self.data["labels"][ids]}

    def averaging(self, last):
        return super().averaging(last) if self.joins_group() else contextlib.nullcontext()

    def step(self):
        if self.trained is self.module:
            super().step()
            return
        trained, working = (
            [weight for weight in model.parameters() if weight.requires_grad] for model in (self.trained, self.module)
        )
        for weight, computed in zip(trained, working, strict=True):
            weight.grad = None if computed.grad is None else computed.grad.float()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(trained, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, trained)
        self.optimizer.zero_grad()
        self.module.zero_grad()

    def live(self):
        bf16 = next(self.module.parameters()).dtype == torch.bfloat16
        ranks = {len(weight) for name, weight in self.module.named_parameters() if ".lora_A." in name}
        own = {
            "packed": any(isinstance(module, packing.Packed) for module in self.model.modules()),
            "weights": "bf16" if bf16 else "fp32",
            "tf32": torch.get_float32_matmul_precision() == "high",
            "lora": max(ranks, default=0),
            "optimizer": type(self.optimizer).__name__.lower(),
        }
        return super().live() | own if self.joins_group() else own

    def state_dict(self):
        if self.options["lora"]:  # on a copy: the live model goes on training its updates apart
            return copy.deepcopy(self.adapted).merge_and_unload().state_dict()
        return self.trained.state_dict()

    def save(self, folder):
        if self.world.rank == 0:
            torch.save(self.state_dict(), folder / "checkpoint.pt")

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
        "description": "torch.compile: one program for all shapes, or one for each width, rounded up to 16s",
    },
    "weights": {
        "enum": ["fp32", "bf16"],
        "default": "fp32",
        "description": "what the model computes with; with bf16 the optimizer keeps weights in fp32",
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
    "lora": {
        "type": "integer",
        "enum": [0, 4, 8, 16, 32, 64],
        "default": 0,
        "description": "train low-rank updates of this rank, and the head; 0: all weights",
    },
    "optimizer": {
        "enum": ["adamw", "adamw8bit"],
        "default": "adamw",
        "description": "AdamW with its state in 32 bits, or in 8",
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
    "peft": ("0.21.2", "make setup", {"lora": [4, 8, 16, 32, 64]}),
    "bitsandbytes": ("0.50.2", "pip install bitsandbytes==0.50.2", {"optimizer": ["adamw8bit"]}),
}
DIVISION = "open"
REFUSED = [
    ({"weights": ["bf16"], "precision": ["fp32", "fp16"]}, "set precision to bf16: that is what it will compute in"),
    ({"weights": ["bf16"], "hook": ["fp16", "bf16", "powersgd"]}, "its gradients are bf16 already"),
    ({"tf32": [True], "device": ["cpu"]}, "TensorFloat-32 is a GPU's; on a CPU take precision: bf16"),
    ({"resident": [True], "device": ["cpu"]}, "the token ids are where they are needed"),
    ({"packed": [True], "compile": ["static"]}, "batches have different numbers of rows; take compile: dynamic"),
    ({"packed": [True], "resident": [True]}, "packed batches are put together on the host"),
    (
        {"lora": [4, 8, 16, 32, 64], "optimizer": ["adamw8bit"]},
        "take one of them: LoRA leaves little state to save",
    ),
]
LOSSY = [
    ({"weights": ["bf16"]}, "also what autocast keeps in fp32 is computed in bf16"),
    ({"lora": [4, 8, 16, 32, 64]}, "it trains another model: few of the weights, and those by updates of low rank"),
    ({"optimizer": ["adamw8bit"]}, "the optimizer's state is rounded to 8 bits in each step"),
]


def adapted(model, rank):
    """peft's wrapper around `model`, in which it has put updates of this rank, and frozen all else but the head.

    An update's one matrix begins as zero; the other alike on all ranks and in all runs, as the model does.
    """
    import peft

    ends = {name.split(".")[-1] for name, _ in model.named_modules()}
    asked = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=rank,  # updates count once, at any rank
        modules_to_save=sorted(ends & HEAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the model is not on its device yet, whose dropout stays as it is
        try:
            return peft.get_peft_model(model, asked)
        except ValueError as error:
            raise RunFailed(
                f"lora: peft can't adapt {model.config.model_type}; take lora: 0. It says: {error}"
            ) from None


def in_8_bits(optimizer):
    """bitsandbytes' AdamW with the groups and settings of `optimizer`."""
    from bitsandbytes.optim import AdamW8bit

    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
    return AdamW8bit(groups, **{name: optimizer.defaults[name] for name in ("lr", "betas", "eps")})


def average_in_fp32(_, bucket):
    """A hook of DDP: gloo can't sum bf16, and sums of many ranks would lose bits."""
    total = bucket.buffer().float() / torch.distributed.get_world_size()
    done = torch.distributed.all_reduce(total, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))
