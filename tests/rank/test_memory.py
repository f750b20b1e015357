"""What can't fit into a GPU is refused before it goes there, and nothing that may fit is (rank/memory.py)."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.config import reading
from lockstep.errors import RunFailed
from lockstep.rank import memory

WEIGHTS = 10_000
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("row", "least"),
    [
        ({"strategy": "single"}, 12),
        ({"strategy": "ddp"}, 12),
        ({"strategy": "ddp", "optimizer": "sgd"}, 4),
        ({"strategy": "ddp", "optimizer": "muon"}, 8),
        ({"strategy": "ddp", "precision": "bf16"}, 6),
        ({"strategy": "fsdp"}, 3),
        ({"strategy": "fsdp", "replicate": 2}, 3),  # at least; each of its two groups of two has all of it
        ({"strategy": "tp", "shard": True}, 3),
        ({"strategy": "zero_redundancy"}, 4 + 2),
        ({"strategy": "deepspeed", "stage": 1}, 4 + 2),
        ({"strategy": "deepspeed", "stage": 3}, 3),
        ({"strategy": "deepspeed", "stage": 3, "offload_optimizer": True}, 0),
        ({"strategy": "pp", "accumulation": 4}, 0),
    ],
)
def test_weights_and_optimizer_must_fit_into_a_gpu(monkeypatch, row, least):
    """least: bytes for each weight, of the fewest that four GPUs need, by hand; 0 if that is not known."""
    on_cores = {"device": "cpu", "processes": 4, "oversubscribe": True}
    settings = reading.parse({"hardware": on_cores, "rows": {"x": row}}).rows["x"].settings()
    model = torch.nn.Linear(WEIGHTS, 1, bias=False)

    def has(memory_of_a_gpu: int) -> None:
        there = SimpleNamespace(total_memory=memory_of_a_gpu)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)

    has(least * WEIGHTS)
    memory.refuse_too_large(model, settings, GPU)
    has(least * WEIGHTS - 1)
    if least:
        with pytest.raises(RunFailed, match="it would end out of memory: weights and optimizer take at least"):
            memory.refuse_too_large(model, settings, GPU)
    memory.refuse_too_large(model, settings, torch.device("cpu"))


def test_what_is_not_trained_has_no_optimizer(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(WEIGHTS, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    model[0].requires_grad_(False)
    there = SimpleNamespace(total_memory=4 * (WEIGHTS + 1) + 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    memory.refuse_too_large(model, reading.parse({"rows": {"x": {"strategy": "single"}}}).rows["x"].settings(), GPU)
