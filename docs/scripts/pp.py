"""Pipeline parallelism: each rank holds some of the layers, and passes what they make to the next rank.

Start it by: torchrun --standalone --nproc-per-node 2 pp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1

torch.manual_seed(0)  # the same data, order and initial weights on all ranks
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
names = list(model.state_dict())  # in the model's order
layers = dict(model.named_children())
number = len(layers) // (last + 1)  # of the layers on each rank; the last one has what is left, too
own = list(layers)[rank * number :] if rank == last else list(layers)[rank * number : (rank + 1) * number]
part = nn.Sequential()
for name in own:
    part.add_module(name, layers[name])  # under its name in the whole model
part.to(device)
stage = PipelineStage(part, rank, last + 1, device)
# A batch goes through in four micro-batches, so that ranks compute at the same time. The losses' mean is the batch's.
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)  # the batch of all ranks together
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

for epoch in range(2):
    for inputs, labels in loader:
        losses = []
        given = (inputs.to(device),) if rank == 0 else ()
        wanted = {"target": labels.to(device), "losses": losses} if rank == last else {}
        optimizer.zero_grad()
        schedule.step(*given, **wanted)
        optimizer.step()
    if rank == last:
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.3f}")
parts = [None] * (last + 1)
dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in part.state_dict().items()})
if rank == 0:
    every = {name: tensor for state in parts for name, tensor in state.items()}
    torch.save({name: every[name] for name in names}, "model.pt")
dist.destroy_process_group()
