"""Context parallelism: ranks divide the tokens of each text; attention gathers the keys and values of all of them.

Start it by: torchrun --standalone --nproc-per-node 2 cp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, TOKENS = 64, 32, 50

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
width = LENGTH // dist.get_world_size()
own = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)  # this rank's tokens


def whole(part):
    """The parts of all ranks, joined along the tokens. Gradients of a rank's part are added up over ranks."""
    return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()])


class Model(nn.Module):
    """One layer of causal attention over the tokens of a text."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        places = torch.arange(LENGTH, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(places[own])
        key, value = whole(self.key(hidden)), whole(self.value(hidden))
        earlier = places[own, None] >= places
        attended = nn.functional.scaled_dot_product_attention(self.query(hidden), key, value, attn_mask=earlier)
        return self.head(hidden + attended)


torch.manual_seed(0)  # the same data, order and initial weights on all ranks
texts = torch.randint(TOKENS, (512, 1)) + torch.arange(LENGTH + 1)  # each counts on from its first token
data = TensorDataset(texts % TOKENS)
model = Model().to(device)
parallel = DistributedDataParallel(model)  # averages gradients, as each rank has the loss of its own tokens
loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)  # the batch of all ranks together
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(2):
    for (batch,) in loader:
        inputs, targets = batch[:, :-1][:, own].to(device), batch[:, 1:][:, own].to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")  # of its own tokens
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
