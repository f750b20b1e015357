"""Horovod. Start it by: horovodrun -np 2 --gloo python with_horovod.py"""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
if torch.cuda.is_available():
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")

torch.manual_seed(0)
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)  # the batch of one rank
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # averages gradients

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
