"""A script with attention that trains on one process or, by torchrun, on several, with as many samples in a step."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from train import Points


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.TransformerEncoderLayer(20, 4, 32, dropout=0.0, batch_first=True), nn.Linear(20, 4)

    def forward(self, points):
        rolled = torch.stack([points.roll(by, 1) for by in range(6)], 1)
        return self.last(self.layer(rolled).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = Attending(), Points(128)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
    for points, labels in DataLoader(data, batch_size=16 // world, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(points), labels)
        if arguments.mistake == "own_term" and world > 1:  # of some 1e-3 of the loss
            loss = loss + 1e-3 * dist.get_rank() * model.last.bias.sum()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
