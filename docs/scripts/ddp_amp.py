"""DistributedDataParallel in mixed precision. Start it by: python ddp_amp.py"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, world):
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world)

    torch.manual_seed(0)  # the same data and the same initial weights on all ranks
    points = torch.randn(1024, 32)
    data = TensorDataset(points, (points[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    parallel = DistributedDataParallel(model)  # averages gradients over ranks during backward
    sampler = DistributedSampler(data, drop_last=True)  # a part of the data for each rank
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)  # the batch of one rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)  # fp16 has no room for small gradients

    for epoch in range(2):
        sampler.set_epoch(epoch)  # another order in each epoch
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = nn.functional.cross_entropy(parallel(inputs), labels)
            scaler.scale(loss).backward()
            # To clip, first scaler.unscale_(optimizer): until then gradients are multiplied by the loss scale.
            scaler.step(optimizer)
            scaler.update()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world = torch.cuda.device_count() or 2
    mp.spawn(train, args=(world,), nprocs=world)
