"""A training script as users write them, which knows nothing of Lockstep, with a mistake if one is named."""

import argparse
import io
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SubsetRandomSampler

# How launchers tell a process its rank and the number of ranks.
TOLD = [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
BY_HAND = {"summed", "wrong_number", "clipped_apart", "other_weights"}  # mistakes of one who averages gradients himself


class Points(Dataset):
    def __init__(self, count, noisy=False, seed=1, of_rank=None):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 20, generator=generator)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        self.noisy, self.of_rank = noisy, of_rank

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(20) if self.noisy else 0.0
        if self.of_rank is not None:  # augmentation of one's own, which no seed of PyTorch's changes
            noise = 0.1 * torch.randn(20, generator=torch.Generator().manual_seed(1000 * self.of_rank + index))
        return self.points[index] + noise, self.labels[index]


class Own:
    """A user's sampler, which yields NumPy integers."""

    def __init__(self, count, rank, world):
        self.count, self.rank, self.world = count, rank, world

    def __iter__(self):
        return iter(np.random.RandomState(0).permutation(self.count)[self.rank :: self.world])

    def __len__(self):
        return self.count // self.world

    def set_epoch(self, epoch):
        pass


def network(arguments):
    layers = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4)]
    if "batch_norm" in arguments.having:
        layers.insert(1, nn.BatchNorm1d(32))
    if "frozen_norm" in arguments.having:
        layers.insert(1, nn.BatchNorm1d(32).eval())
    model = nn.Sequential(*layers)
    if "unused" in arguments.mistake:
        model.register_parameter("spare", nn.Parameter(torch.zeros(4)))
    return model


def coarse(state, bucket):
    """A communication hook that sends signs only."""
    mean = bucket.buffer().abs().mean()
    sent = bucket.buffer().sign().mul_(mean / dist.get_world_size())
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: future.value()[0])


@torch.compile(backend="eager")
def compiled_step(optimizer):
    optimizer.step()


def clip_by_hand(parameters, by_squares):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if by_squares:
        norm = sum((gradient**2).sum() for gradient in gradients) ** 0.5
    else:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.05 / float(norm)))


def train(rank, world, epochs, arguments):
    mistake, having = arguments.mistake, arguments.having
    if "RANK" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": arguments.port}
        dist.init_process_group("gloo", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(rank if "other_weights" in mistake else 0)
    model = network(arguments)
    if "random_alike" not in mistake:
        torch.manual_seed(rank)
    by_hand = bool(BY_HAND & set(mistake)) or "by_hand" in having
    if "sync_batch_norm" in having:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    unused = "unused" in mistake
    wrapped = model if by_hand else DistributedDataParallel(model, find_unused_parameters=unused)
    if "half_hook" in having:
        wrapped.register_comm_hook(state=None, hook=fp16_compress_hook)
    if "coarse_hook" in mistake:
        wrapped.register_comm_hook(None, coarse)
    if "fsdp" in having:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        wrapped = fully_shard(model)
    if "compile" in having:
        wrapped = torch.compile(wrapped)
    data = Points(arguments.samples, "noisy" in having, seed=rank if "other_data" in mistake else 1)
    sampler = None if "same_samples" in mistake else DistributedSampler(data, drop_last="drop_last" in having)
    if "seed_of_rank" in mistake:
        sampler = DistributedSampler(data, seed=rank)
    if "own_sampler" in having:
        sampler = Own(len(data), rank, world)
    if "some" in having:
        sampler = SubsetRandomSampler(range(rank, 64, world))
    if "validation" in having and rank == 0:
        validation = DataLoader(Points(40, seed=2), batch_size=20, shuffle=True)
    if "shared_validation" in having:
        held = Points(41, seed=2)
        dropped = "dropped_validation" in having
        parts = DistributedSampler(held, drop_last=dropped)
        validation = DataLoader(held, batch_size=5, sampler=parts, drop_last=dropped)
    workers = 2 if "workers" in having else 0
    size = 4 if rank and "uneven" in mistake else 8
    loader = DataLoader(data, batch_size=size, sampler=sampler, num_workers=workers)
    if "sgd" in having:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        rate = 1e-3 * (world if "rate_scaled" in mistake else 1)
        decay = 0.01 * (world if "decay_of_ranks" in mistake else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    if "group_rate" in mistake:
        groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.1 * world}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    planned = arguments.samples * epochs // (8 * (world if "planned" in having else 2))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=planned)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in having)
    loss_of = nn.CrossEntropyLoss()
    every = 2 if "accumulation" in having else 1
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch") and "same_order" not in mistake:
            sampler.set_epoch(epoch)
        for number, (points, labels) in enumerate(loader, 1):
            if "tokens" in mistake:  # of a text those that count
                labels = labels.masked_fill(points[:, 0] < 0, -100)
            last = number % every == 0
            if not by_hand and "fsdp" not in having and "compile" not in having:
                wrapped.require_backward_grad_sync = last or "every_micro_batch" in mistake
            called = model if "inner_model" in mistake else wrapped
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in having):
                scores = called.forward(points) if "forward" in having else called(points)
                loss = loss_of(scores, labels) / every
            if "single_class" in mistake:
                loss = loss_of(scores[:, :1], 0 * labels)
            if "zero_late" in having:
                optimizer.zero_grad()
            if "averaged_twice" in mistake:
                loss = loss / world
            scaler.scale(loss).backward()
            if not last:
                continue
            if by_hand:
                if "clipped_apart" in mistake:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        if "summed" not in mistake:
                            parameter.grad /= world + ("wrong_number" in mistake)
            if "clipped_while_scaled" in mistake:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if "unscaled_late" in mistake:
                    scaler.unscale_(optimizer)
            elif "clip_loop" in having or "clip_squares" in having:
                clip_by_hand(model.parameters(), "clip_squares" in having)
            elif "clip_value" in having:
                nn.utils.clip_grad_value_(model.parameters(), 1e-6)
            elif "clip" in having:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if "compiled_step" in having:
                compiled_step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            for _ in range(world if "schedule_of_ranks" in mistake else 1):
                schedule.step()
            if "drifting" in mistake and rank:
                with torch.no_grad():
                    model[0].bias += 1e-3
            if "not_cleared" not in mistake and "zero_late" not in having:
                optimizer.zero_grad()
            if "saved_as_module" in mistake and not rank:
                torch.save(wrapped.state_dict(), io.BytesIO())
            if "crash" in mistake and number == 3:
                raise SystemExit("no more")
        if "shared_validation" in having or ("validation" in having and rank == 0):
            with torch.no_grad():
                print(sum(loss_of(model.eval()(points), labels) for points, labels in validation))
            if "still_evaluating" not in mistake:
                model.train()
    if not rank:
        print(f"{epoch + 1} epochs of {len(data)} points, loss {float(loss.detach()):.3f}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    parser.add_argument("--spawn", type=int)
    parser.add_argument("--fork", type=int)
    parser.add_argument("--local_rank", type=int)  # as deepspeed tells it
    parser.add_argument("--port", default="29511")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.spawn:
        mp.spawn(train, args=(arguments.spawn, arguments.epochs, arguments), nprocs=arguments.spawn)
    elif arguments.fork:
        count = arguments.fork
        ranks = [mp.Process(target=train, args=(rank, count, arguments.epochs, arguments)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    else:
        told = ([int(os.environ[name]) for name in names] for names in TOLD if names[0] in os.environ)
        rank, world = next(told, [0, 1])
        train(rank, world, arguments.epochs, arguments)


if __name__ == "__main__":
    main()
