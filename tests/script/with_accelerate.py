"""A script for Accelerate, as in its documentation."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from train import Points, network


class Stream(IterableDataset):
    """Points without indices, of which Accelerate dispatches batches unless told otherwise."""

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    mistake, having = arguments.mistake, arguments.having
    dispatch = True if "dispatch" in having else None  # None: for a data set without indices
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if "bf16" in having else "no",
        gradient_accumulation_steps=2 if "accumulation" in having else 1,
        step_scheduler_with_optimizer="prepared_schedule" in having,
        dataloader_config=DataLoaderConfiguration(
            split_batches="split" in having,
            even_batches="uneven" not in having,
            dispatch_batches=False if "not_dispatched" in having else dispatch,
        ),
    )
    torch.manual_seed(0)
    model = network(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    points = Points(arguments.samples)
    if "alike" in having:  # rows that are equal, though their indices differ
        points.points = points.points[:4].repeat(len(points) // 4, 1)
    workers, drop_last = 2 if "workers" in having else 0, "drop_last" in having
    if "streamed" in having:
        loader = DataLoader(Stream(points), batch_size=8, drop_last=drop_last, num_workers=min(workers, 1))
    else:
        loader = DataLoader(points, batch_size=8, shuffle=True, drop_last=drop_last, num_workers=workers)
    if "divided_twice" in mistake:
        loader = DataLoader(points, batch_size=8, sampler=DistributedSampler(points, shuffle=False))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    if "same_samples" not in mistake:
        loader = accelerator.prepare(loader)
    if "planned" in having:
        planned = arguments.epochs * len(loader)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=planned)
    if "prepared_schedule" in having:
        schedule = accelerator.prepare(schedule)
    if "mean_evaluation" in having:
        held = accelerator.prepare(DataLoader(Points(41, seed=2), batch_size=5))
        with torch.no_grad():
            for points, labels in held:
                mean = nn.functional.cross_entropy(model.eval()(points), labels)
                accelerator.print(accelerator.gather_for_metrics(mean).mean())
        model.train()
    if "evaluation" in having or "own_evaluation" in having:
        gather = accelerator.gather if "own_evaluation" in having else accelerator.gather_for_metrics
        held = accelerator.prepare(DataLoader(Points(41, seed=2), batch_size=5))
        with torch.no_grad():
            accelerator.print(len(torch.cat([gather(model.eval()(points)) for points, _ in held])))
        model.train()
    called = accelerator.unwrap_model(model) if "inner_model" in mistake else model
    for _ in range(arguments.epochs):
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(called(points), labels)
                if "averaged_twice" in mistake:
                    loss = loss / accelerator.num_processes
                if "summed" in mistake:
                    loss = loss * accelerator.num_processes
                accelerator.backward(loss)
                if "clipped_apart" in mistake:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                for _ in range(accelerator.num_processes if "schedule_of_ranks" in mistake else 1):
                    schedule.step()
                if "not_cleared" not in mistake:
                    optimizer.zero_grad()
    accelerator.print("done")


if __name__ == "__main__":
    main()
