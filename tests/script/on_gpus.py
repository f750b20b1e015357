"""A script for CUDA only, with two GPUs, started by torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from train import Points


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    parser.add_argument("--sharded", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0 if arguments.mistake == "one_gpu" else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    with torch.device("meta" if arguments.sharded else device):
        model = nn.Sequential(nn.Linear(20, 32), nn.Softmax(dim=1), nn.Linear(32, 4))
    if arguments.sharded:
        parallel = fully_shard(model).to_empty(device=device)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
    else:
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], find_unused_parameters=True)
    data = Points(256)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for points, labels in loader:
        points = points.to(device)
        if arguments.mistake != "left_on_the_host":
            labels = labels.to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(parallel(points), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
