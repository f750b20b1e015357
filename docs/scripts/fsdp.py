"""FSDP2: parameters, gradients and optimizer state are sharded.

Start it by: torchrun --standalone --nproc-per-node 2 fsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)  # gathered when it is needed, and given back
fully_shard(model)
sampler = DistributedSampler(data, drop_last=True)  # a part of the data for each rank
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)  # the batch of one rank
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)  # another order in each epoch
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # by all
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
