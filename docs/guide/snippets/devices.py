import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, gpus = dist.get_rank(), torch.cuda.device_count()
# On four GPUs each of two ranks has two of its own; on fewer, and on a CPU, they share what there is.
first = torch.device("cuda", 2 * rank % gpus) if gpus else torch.device("cpu")
second = torch.device("cuda", (2 * rank + 1) % gpus) if gpus else torch.device("cpu")


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4).to(first), torch.nn.Linear(4, 1).to(second)

    def forward(self, inputs):
        return self.two(self.one(inputs.to(first)).to(second))


# No device_ids: the model's layers are on their devices already.
model = DistributedDataParallel(Halves())
model(torch.full((2, 4), 1.0 + rank)).sum().backward()
norm = torch.stack([parameter.grad.norm().cpu() for parameter in model.parameters()]).norm()
norms = [torch.zeros(()) for _ in range(2)]
dist.all_gather(norms, norm)
print(f"rank {rank}: on {first} and {second}, the same gradients on both: {torch.equal(*norms)}", flush=True)
dist.destroy_process_group()
