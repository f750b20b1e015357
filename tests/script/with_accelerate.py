"""A script for Accelerate, as in its documentation."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from train import Points, network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2 if "accumulation" in arguments.having else 1,
        step_scheduler_with_optimizer="prepared_schedule" in arguments.having,
    )
    torch.manual_seed(0)
    model = network(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Points(256), batch_size=8, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    if "same_samples" not in arguments.mistake:
        loader = accelerator.prepare(loader)
    if "prepared_schedule" in arguments.having:
        schedule = accelerator.prepare(schedule)
    if arguments.having and "evaluation" in arguments.having[0]:
        gather = accelerator.gather if arguments.having == ["own_evaluation"] else accelerator.gather_for_metrics
        held = accelerator.prepare(DataLoader(Points(41, seed=2), batch_size=5))
        with torch.no_grad():
            print(len(torch.cat([gather(model.eval()(points)) for points, _ in held])))
        model.train()
    called = accelerator.unwrap_model(model) if "inner_model" in arguments.mistake else model
    for _ in range(2):
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(called(points), labels)
                if "averaged_twice" in arguments.mistake:
                    loss = loss / accelerator.num_processes
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if "not_cleared" not in arguments.mistake:
                    optimizer.zero_grad()
    accelerator.print("done")


if __name__ == "__main__":
    main()
