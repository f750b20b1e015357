"""What a rank sends in a step: a program that takes steps as the first of two ranks, and counts instead of sending.

python counted.py STRATEGY OPTIONS: prints, as JSON, the bytes and the number of messages of a step by collective, and
the shapes of the model's weights, and which of them are trained.
"""

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification

from lockstep.config import reading, registry
from lockstep.model import lora
from lockstep.model.optimizer import make_optimizer

SENT: dict[str, list[int]] = {}  # bytes, messages


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Done(dist._Work):
    """Work that is done, with these results."""

    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self.future


class Counting(dist.ProcessGroup):
    """A group of two ranks, of which the other one has the same as this one."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.ranks = size

    def size(self):
        return self.ranks

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def getBackendName(self):
        return "counting"

    def _count(self, name, tensors, result):
        before = SENT.get(name, [0, 0])
        SENT[name] = [before[0] + size(tensors), before[1] + 1]
        return Done(result)

    def allreduce(self, tensors, options=None):
        return self._count("all_reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors, options=None):
        return self._count("all_reduce", tensors, tensors)

    def broadcast(self, tensors, options=None):
        return self._count("broadcast", tensors, tensors)

    def allgather(self, outputs, inputs, options=None):
        for group, own in zip(outputs, inputs, strict=True):
            for each in group:
                each.copy_(own)
        return self._count("all_gather", [tensor for group in outputs for tensor in group], outputs)

    def all_gather_single(self, output, own, options=None):
        output.view(self.ranks, -1).copy_(own.reshape(1, -1).expand(self.ranks, -1))
        return self._count("all_gather", [output], [output])

    def all_gather_single_coalesced(self, outputs, inputs, options=None):
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return Done(outputs)

    def reduce_scatter(self, outputs, inputs, options=None):
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0])
        return self._count("reduce_scatter", [tensor for parts in inputs for tensor in parts], outputs)

    def reduce_scatter_single(self, output, whole, options=None):
        output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return self._count("reduce_scatter", [whole], [output])

    def reduce_scatter_single_coalesced(self, outputs, inputs, options=None):
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole)
        return Done(outputs)

    # What torch calls them depends on its version.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, options=None):
        return Done([])


def main(strategy: str, options: dict) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "RENDEZVOUS": "env://"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    hardware = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}
    row = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": strategy} | options}}).rows["x"]
    if strategy == "deepspeed":
        from lockstep.model import importing

        os.environ["DS_ACCELERATOR"] = "cpu"
        with importing.hidden("mlflow"):
            import deepspeed  # noqa: F401
    dist.Backend.register_backend(
        "counting", lambda store, rank, number, timeout: Counting(rank, number), devices=["cpu"]
    )
    dist.init_process_group("counting", rank=0, world_size=2, store=dist.HashStore())
    trained = registry.load(strategy)(row.settings())
    trained.start()
    config = BertConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = lora.put_into(BertForSequenceClassification(config), row.train)
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    few = [name for name, weight in model.named_parameters() if weight.requires_grad]
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    trained.sample = {name: tensor.numpy() for name, tensor in inputs.items()}
    trained.set_up(model, lambda wrapped: make_optimizer(wrapped, row.train))
    trained.replay = SimpleNamespace(done=0, steps=10**6)
    trained.replay.training = SimpleNamespace(settings=SimpleNamespace(kind=SimpleNamespace(profiled=True)))
    trained.replay.dev_split = SimpleNamespace(due=lambda done: False)
    model.train()
    # PowerSGD compresses from its third step on; what is sent every so many steps is counted over all of them.
    every = options.get("every", 1)
    for step in range(3 + every):
        if step == 3:
            SENT.clear()
        for micro in range(row.train.accumulation):
            last = micro == row.train.accumulation - 1
            with trained.averaging(last) or nullcontext():
                outputs = trained.forward(inputs)
                trained.backward(outputs.logits.float().pow(2).mean(), last)
        trained.step()
        trained.replay.done += 1
    sent = {name: [number / every for number in numbers] for name, numbers in SENT.items()}
    print(json.dumps({"sent": sent, "shapes": shapes, "trained": few}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
