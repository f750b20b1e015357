"""A script for Lightning Fabric, which starts its own ranks."""

import argparse

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from train import Points, network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn" if "spawn" in arguments.having else "ddp")
    fabric.launch(train, arguments)


def train(fabric, arguments):
    fabric.seed_everything(0)
    model = network(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(Points(256), batch_size=8, shuffle=True)
    if "same_samples" not in arguments.mistake:
        loader = fabric.setup_dataloaders(loader)
    called = model.module if "inner_model" in arguments.mistake else model
    for _ in range(2):
        for points, labels in loader:
            if "not_cleared" not in arguments.mistake:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(called(points), labels)
            if "averaged_twice" in arguments.mistake:
                loss = loss / fabric.world_size
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
