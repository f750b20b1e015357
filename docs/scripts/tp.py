"""Tensor parallelism: ranks divide the matrices of each layer, and train on the same samples.

Start it by: torchrun --standalone --nproc-per-node 2 tp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)  # the same data, order and initial weights on all ranks
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
# A part of the first layer's outputs on each rank, which are inputs of the second: one all-reduce joins its outputs.
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)  # the batch of all ranks together
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(2):
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
