"""Scripts in which not every trained parameter belongs to one model that is called in training."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, default_collate

from train import Points


def average(tensor):
    """Replace a tensor by its mean over all ranks."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def adversarial(loader, mistake):
    """A generator and a discriminator in turn, which judges what the generator has made."""
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 20)))
    discriminator = nn.Linear(20, 1)
    judged = discriminator if "inner_model" in mistake else DistributedDataParallel(discriminator)
    makes, judges = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, discriminator))
    torch.manual_seed(dist.get_rank())
    for points, _ in loader:
        made = generator(torch.randn_like(points) if "same_samples" in mistake else points.roll(1, 1))
        judges.zero_grad()
        (judged(made.detach()).exp().mean() - judged(points).mean()).backward()
        judges.step()
        makes.zero_grad()
        (-discriminator(made).mean()).backward()  # its gradients are of one rank, and are never used
        makes.step()


def temperature(loader, mistake):
    """A parameter beside the model, which DistributedDataParallel does not know; its gradient is small."""
    model, heat = DistributedDataParallel(nn.Linear(20, 4)), nn.Parameter(torch.zeros(()))
    if "other_weights" in mistake:
        nn.init.constant_(heat, dist.get_rank())
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [heat], "lr": 1e-6}], lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points) * (1e-4 * heat).exp(), labels).backward()
        if "not_averaged" not in mistake:
            dist.all_reduce(heat.grad)
            heat.grad /= 1 if "summed" in mistake else dist.get_world_size()
        optimizer.step()


def sharded(loader, mistake):
    """FSDP2, whose gradients are averaged in every second micro-batch, or never, and then clipped."""
    model = fully_shard(nn.Linear(20, 4))
    rate = 1e-3 * (1 + dist.get_rank()) if "rate_of_rank" in mistake else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for number, (points, labels) in enumerate(loader, 1):
        model.set_requires_gradient_sync(number % 2 == 0 and "never_averaged" not in mistake)
        loss = nn.functional.cross_entropy(model(points), labels) / 2
        (loss * dist.get_world_size() if "summed" in mistake else loss).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


def flat(loader, mistake):
    """FSDP1, of whose flat parameters each rank holds a part."""
    model = FullyShardedDataParallel(nn.Linear(20, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()


def joined(loader, mistake):
    """Rank 1 ends a batch earlier than rank 0."""
    model = DistributedDataParallel(nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = 3 - dist.get_rank()
    with model.join():
        for _, (points, labels) in zip(range(batches), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()


def views(loader, mistake):
    """Two views of each batch go through the model before a single backward pass, as where views are contrasted."""
    model = nn.Sequential(nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 4))  # the first layer is frozen
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, _ in loader:
        optimizer.zero_grad()
        (-nn.functional.cosine_similarity(model(points), model(points.roll(1, 1)))).mean().backward()
        optimizer.step()


def stacked(loader, mistake):
    """Two views of each batch go through the model as one, whose rows are as long as a batch has samples."""
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.cat((points[:, :8], points[:, 8:16]))), labels.repeat(2)).backward()
        optimizer.step()


def closure(loader, mistake):
    """An optimizer that computes the gradient several times in a step."""
    model = DistributedDataParallel(nn.Linear(20, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for points, labels in loader:

        def evaluate(points=points, labels=labels):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def penalised(loader, mistake):
    """The model is called inside its wrapper before the wrapper is, to penalise its slope."""
    inner = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        points.requires_grad_()
        (slope,) = torch.autograd.grad(inner(points).sum(), points, create_graph=True)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(points), labels) + slope.square().mean()).backward()
        optimizer.step()


def tried(loader, mistake):
    """Lazy layers get their shapes by calls before the first batch, and the same weights on all ranks after these."""
    torch.manual_seed(dist.get_rank())
    inner = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4))
    for _ in range(2):
        inner(torch.ones(1, 20))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()


class Fitted(nn.Module):
    """A module whose method is the loop."""

    def __init__(self):
        super().__init__()
        self.model = DistributedDataParallel(nn.Linear(20, 4))

    def fit(self, loader, optimizer):
        for points, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(points), labels).backward()
            optimizer.step()


def plain(loader, mistake):
    model = DistributedDataParallel(nn.Linear(20, 4))
    if "random_alike" not in mistake:
        torch.manual_seed(dist.get_rank())
    held = copy.deepcopy(model.module) if "stale_optimizer" in mistake else model
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)
        loss = loss * torch.rand(()) if "weighted" in mistake else loss
        loss = loss / int(os.environ["NGPU"]) if "averaged_twice" in mistake else loss
        loss = nn.functional.cross_entropy(model(points), labels, reduction="sum") / 8 if "sum" in mistake else loss
        (loss * dist.get_world_size() if "summed" in mistake else loss).backward()
        for weight in model.parameters() if "noise" in mistake else ():
            weight.grad += 0.01 * torch.randn_like(weight)
            average(weight.grad)
        if "one_steps" not in mistake or dist.get_rank() == 0:
            optimizer.step()


def fitted(loader, mistake):
    model = Fitted()
    model.fit(loader, torch.optim.SGD(model.parameters(), lr=0.1))


def waits(loader, mistake):
    """Rank 0 waits after its second step for a message that nobody sends."""
    model = DistributedDataParallel(nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (points, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
        if number == 2 and dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)


class Looked(nn.Module):
    """Has a sparse gradient and a complex weight."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(4, 20, sparse=True), nn.Linear(20, 4)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64) + 0.5j)

    def forward(self, points, kinds):
        return (self.last(points + self.table(kinds)) * self.turn).abs()


def sparse(loader, mistake):
    model = Looked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points, labels), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = parameter.grad / dist.get_world_size()
        if "imaginary" in mistake:
            model.turn.grad.imag.mul_(dist.get_world_size())
        optimizer.step()


class Graph(nn.Module):
    """A model that is called with a sparse matrix, and has another one as a buffer."""

    def __init__(self, links):
        super().__init__()
        self.register_buffer("links", links.to_sparse_csr())
        self.last = nn.Linear(20, 4)

    def forward(self, links, points):
        return self.last((links @ points.T + self.links @ points.T).T)


def graph(loader, mistake):
    links = (torch.rand(20, 20) < 0.2).float()
    model = Graph(links)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(links.to_sparse(), points), labels).backward()
        for parameter in model.parameters():
            average(parameter.grad)
        optimizer.step()


class Sometimes(nn.Module):
    """Leaves out its second layer in some of the steps, by chance."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 4), nn.Linear(4, 4)

    def forward(self, points):
        scores = self.first(points)
        return scores if torch.rand(()) < 0.5 else self.second(scores)


def layer_drop(loader, mistake):
    model = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()


def experts(loader, mistake):
    """A layer that all ranks share, and one that each rank has for itself."""
    shared = nn.Linear(20, 20)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(shared, nn.Linear(20, 4))
    for parameter in model[1].parameters():
        parameter.allreduce = "marked" not in mistake  # as DeepSpeed and Megatron mark them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        for parameter in model.parameters() if "averaged" in mistake else shared.parameters():
            average(parameter.grad)
        optimizer.step()


def growing(loader, mistake):
    """A model that is given a further layer after two steps."""
    model = nn.Sequential(nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (points, labels) in enumerate(loader, 1):
        if number == 3:
            model.append(nn.Linear(4, 4))
            optimizer.add_param_group({"params": model[1].parameters()})
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        for parameter in list(model.parameters())[: 2 if "only_old" in mistake else None]:
            average(parameter.grad)
        optimizer.step()


def later(loader, mistake):
    """Ranks come to the same weights after the optimizer has stepped: by their mean, or each by its half of them."""
    model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 4))
    weights = list(model.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    by_halves = "halves" in mistake or "halves_of_one" in mistake
    optimizer = torch.optim.SGD(weights[rank::world] if by_halves else weights, lr=0.1)
    for points, labels in loader:
        model.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        if "halves" in mistake:
            for weight in weights:
                average(weight.grad)
        optimizer.step()
        for number, weight in enumerate(weights):
            if by_halves:
                dist.broadcast(weight.data, number % world)
            else:
                average(weight.data)


def two_optimizers(loader, mistake):
    """One of the model's body, the other of its head, which is averaged by hand or not."""
    body, head = DistributedDataParallel(nn.Linear(20, 8)), nn.Linear(8, 4)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
    for points, labels in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(head(body(points)), labels).backward()
        for weight in () if "not_averaged" in mistake else head.parameters():
            average(weight.grad)
        for optimizer in optimizers:
            optimizer.step()


def evaluated(loader, mistake):
    """Rank 0 evaluates after each second step, and the others wait for it."""
    model = DistributedDataParallel(nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (points, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
        if number % 2 == 0:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    model.module(points)
            dist.barrier()


class Summed(torch.autograd.Function):
    """The sum over ranks, of which each rank's gradient is that of its own part."""

    @staticmethod
    def forward(context, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient


def inputs(loader, mistake):
    """A layer of whose inputs each rank has a part of its own, so that all train on the same samples."""
    first, head = nn.Linear(20, 8, bias=False), nn.Linear(8, 4)
    part = nn.Linear(10, 8, bias=False)
    part.weight.data = first.weight.data.chunk(2, dim=1)[dist.get_rank()].clone()

    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = part, head

        def forward(self, points):
            return self.head(Summed.apply(self.part(points.chunk(2, dim=1)[dist.get_rank()])))

    model = Divided()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()


class Pieces(Points):
    """Samples that are drawn by chance, whatever their index, as pieces of a long text are."""

    def __getitem__(self, index):
        return super().__getitem__(int(torch.randint(len(self), ())))


class Masking:
    """A collator that hides some inputs of a batch by chance."""

    def __init__(self, generator=None):
        self.generator = generator

    def __call__(self, items):
        points, labels = default_collate(items)
        hidden = torch.bernoulli(torch.full(points.shape, 0.3), generator=self.generator).bool()
        return points.masked_fill(hidden, 0.0), labels


KINDS = (plain, adversarial, temperature, sharded, flat, joined, views, closure, fitted, waits, experts, growing)
KINDS += (sparse, graph, penalised, layer_drop, later, two_optimizers, evaluated, tried, stacked, inputs)


def main():
    kinds = {each.__name__: each for each in KINDS}
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    having = arguments.having
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Points(256, "noisy" in having, seed=dist.get_rank() if "own_data" in having else 1)
    if "pieces" in having:
        data = Pieces(256)
    if "noise_of_rank" in having:
        data = Points(256, of_rank=dist.get_rank())
    if "subset" in having:
        data = Subset(data, range(128))
    rank, world = dist.get_rank(), dist.get_world_size()
    by_hand = "by_hand" in having
    if by_hand:
        order = torch.Generator().manual_seed(rank if "own_order" in arguments.mistake else 0)
        data = Subset(data, torch.randperm(255, generator=order)[rank::world])  # of one sample more for rank 0
    collate = Masking() if "masked" in having else None
    if "own_generator" in having:
        collate = Masking(torch.Generator().manual_seed(dist.get_rank()))
    sampler = None if by_hand or "same_samples" in arguments.mistake else DistributedSampler(data)
    workers = 1 if "workers" in having else 0
    shuffle = True if by_hand else None
    loader = DataLoader(data, 8, sampler=sampler, shuffle=shuffle, collate_fn=collate, num_workers=workers)
    kinds[arguments.kind](loader, arguments.mistake)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
