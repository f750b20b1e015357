"""A script for Horovod, like its examples."""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from train import Points, network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = network(arguments)
    scale = hvd.size() if "scaled_rate" in arguments.having else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale, momentum=0.9)
    data = Points(256)
    replicas = 1 if "same_samples" in arguments.mistake else hvd.size()
    sampler = DistributedSampler(data, num_replicas=replicas, rank=hvd.rank() % replicas)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    if "other_weights" not in arguments.mistake:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    operation = hvd.Sum if "summed" in arguments.mistake else hvd.Average
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=operation)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            if "not_cleared" not in arguments.mistake:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
