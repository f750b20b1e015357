"""A script for Lightning Fabric, which starts its own ranks."""

import argparse

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from train import Points, network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn" if "spawn" in arguments.having else "ddp")
    fabric.launch(train, arguments)


def train(fabric, arguments):
    fabric.seed_everything(0)
    model = network(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Points(256), batch_size=8, shuffle=True))
    for _ in range(2):
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
