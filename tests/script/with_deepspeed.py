"""A script for DeepSpeed, whose engine computes gradients and steps."""

import argparse

import deepspeed
import torch
from torch import nn

from train import Points, network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    if "sgd" in arguments.having:
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2 if "accumulation" in arguments.having else 1,
        "optimizer": optimizer,
        "zero_optimization": {"stage": arguments.stage},
    }
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = network(arguments)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings, training_data=Points(256)
    )
    for _ in range(2):
        for points, labels in loader:
            called = engine.module if "inner_model" in arguments.mistake else engine
            loss = nn.functional.cross_entropy(called(points.to(engine.device)), labels.to(engine.device))
            if "averaged_twice" in arguments.mistake:
                loss = loss / engine.world_size
            engine.backward(loss)
            engine.step()
            if "drifting" in arguments.mistake and engine.global_rank:
                with torch.no_grad():
                    model[0].bias += 1e-3


if __name__ == "__main__":
    main()
