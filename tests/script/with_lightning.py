"""A script for Lightning's Trainer, which starts its own ranks."""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from train import Points, network


class Classifier(LightningModule):
    def __init__(self, arguments):
        super().__init__()
        self.network, self.mistake = network(arguments), arguments.mistake

    def training_step(self, batch, _):
        points, labels = batch
        loss = nn.functional.cross_entropy(self.network(points), labels)
        return loss / self.trainer.world_size if "averaged_twice" in self.mistake else loss

    def validation_step(self, batch, _):
        points, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.network(points), labels), sync_dist=True)

    def on_train_batch_end(self, *_):
        if "drifting" in self.mistake and self.global_rank:
            with torch.no_grad():
                self.network[0].bias += 1e-3

    def configure_optimizers(self):
        scale = self.trainer.world_size if "rate_scaled" in self.mistake else 1
        return torch.optim.AdamW(self.parameters(), lr=1e-3 * scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default=[], type=lambda words: words.split(","))
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn" if "spawn" in arguments.having else "ddp",
        max_epochs=2,
        accumulate_grad_batches=2 if "accumulation" in arguments.having else 1,
        gradient_clip_val=0.25 if "clip" in arguments.having else None,
        use_distributed_sampler="same_samples" not in arguments.mistake,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(arguments),
        DataLoader(Points(256), batch_size=8, shuffle=True),
        DataLoader(Points(40, seed=2), batch_size=5),
    )


if __name__ == "__main__":
    main()
