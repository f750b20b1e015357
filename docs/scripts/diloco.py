"""DiLoCo: ranks train on their own; every few steps a second optimizer takes a step along what they moved on average.

Start it by: torchrun --standalone --nproc-per-node 2 diloco.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 16  # steps from one outer step to the next

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)  # the same data and the same initial weights on all ranks
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
sampler = DistributedSampler(data, drop_last=True)  # a part of the data for each rank
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)  # the batch of one rank
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
begun = [parameter.detach().clone() for parameter in model.parameters()]  # where all ranks began together
outer = torch.optim.SGD(begun, lr=0.7, momentum=0.9, nesterov=True)


@torch.no_grad()
def outer_step():
    """Step from where the ranks began, along the mean of how far each has come, and begin again from there."""
    for start, parameter in zip(begun, model.parameters(), strict=True):
        start.grad = start - parameter
        dist.all_reduce(start.grad)
        start.grad /= dist.get_world_size()
    outer.step()
    for start, parameter in zip(begun, model.parameters(), strict=True):
        parameter.copy_(start)


step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)  # another order in each epoch
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            outer_step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
if step % EVERY:
    outer_step()  # the steps since the last one, too
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
