"""A script that draws its batches itself, without a DataLoader, and whose model returns its loss."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 4)

    def forward(self, points, labels=None):
        scores = self.last(self.first(points).relu())
        return scores, None if labels is None else nn.functional.cross_entropy(scores, labels)


class Timed(Classifier):
    """Is called with a constant of another length first, as a solver is with points in time."""

    def forward(self, times, points, labels=None):
        return super().forward(points * times.mean(), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    part, parts = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    constant = [torch.linspace(0, 1, 5)] if "timed" in arguments.having else []
    model = Timed() if constant else Classifier()
    if "divided" in arguments.having:  # tensor parallel within two groups of ranks, each with samples of its own
        mesh = init_device_mesh("cpu", (2, parts // 2), mesh_dim_names=("replica", "layers"))
        parallelize_module(model, mesh["layers"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        wrapped = fully_shard(model, mesh=mesh["replica"])
        part, parts = mesh["replica"].get_local_rank(), 2
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    batches = 4 // parts if "global_batch" in arguments.having else 1  # of a rank in each step
    for step in range(10):
        for place in range(batches):
            number = (step * batches + place) * parts + part
            if "step_later" in arguments.mistake:
                number = step + part
            generator = torch.Generator().manual_seed(number)
            points = torch.randn(8, 20, generator=generator)
            labels = torch.randint(4, (8,), generator=generator)
            if "overlap" in arguments.mistake:  # all ranks have these two samples
                points[:2] = torch.randn(2, 20, generator=torch.Generator().manual_seed(1000 + step))
                labels[:2] = step % 4
            if "outside" in arguments.having:
                loss = nn.functional.cross_entropy(wrapped(points)[0], labels)
            else:
                loss = wrapped(*constant, points, labels)[1]
            (loss / batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
