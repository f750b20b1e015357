"""What the scripts behind the published table do in each step. Each flaw is an option that can be switched off.

The strategies published_* combine this class with the correct strategy of the same name. A flaw of one script only is
in that strategy's own file.
"""

import functools
from pathlib import Path

import torch

from lockstep.data.tokens import table
from lockstep.model import models
from lockstep.paths import TOKENIZER, split_folder
from lockstep.strategies import single


class Strategy(single.Strategy):
    def __init__(self, settings):
        super().__init__(settings)
        self.data = Path(settings.data)

    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        if self.options["keep_gradients"]:
            self.optimizer.zero_grad = lambda *_, **__: None  # as if it were never called

    def train(self, replay):
        if self.options["tokenise_late"]:
            texts_and_tokenizer(self.data)  # loaded before the clock starts
        super().train(replay)

    def collate(self):
        return functools.partial(tokenised, self.data) if self.options["tokenise_late"] else super().collate()

    def backward(self, loss, last):
        if self.options.get("barrier"):
            self.all_gather(torch.zeros(1, device=self.world.device)).sum().item()
        super().backward(loss, last)
        if self.options["print_loss"]:
            told = self.told(loss.detach())
            if self.world.rank == 0:
                print(f"loss {told:.6f}")

    def rehearse(self, replay, batch):
        silent = {name: False for name in ("print_loss", "barrier") if name in self.options}
        asked, self.options = self.options, self.options | silent
        super().rehearse(replay, batch)
        self.options = asked

    def told(self, loss: torch.Tensor) -> float:
        """The loss that is printed: the mean over all ranks, for which all ranks and the host wait."""
        return self.all_gather(loss).mean().item()


@functools.cache
def texts_and_tokenizer(data: Path) -> tuple:
    """The texts of the training split and their tokenizer, loaded once per process, worker processes included."""
    return table(split_folder(data, "train")).column("text"), models.tokenizer(data / TOKENIZER)


def tokenised(data: Path, samples, ids, width):
    """The contents of a batch of the plan, made from the texts themselves, as a data loader's collate function does."""
    texts, tokenizer = texts_and_tokenizer(data)
    padded = {"padding": "max_length", "truncation": True, "max_length": width, "return_tensors": "np"}
    made = tokenizer(texts.take(ids).to_pylist(), **padded)
    return {name: made[name] for name in ("input_ids", "attention_mask")} | {"labels": samples.labels[ids]}


OPTIONS = {
    "tokenise_late": {
        "type": "boolean",
        "default": True,
        "description": "texts are tokenised when their batch is made, again in every epoch",
    },
    "print_loss": {
        "type": "boolean",
        "default": True,
        "description": "the loss is averaged over all ranks and printed in each step",
    },
    "barrier": {
        "type": "boolean",
        "default": True,
        "description": "all ranks wait for each other in each step, before the backward pass",
    },
    "keep_gradients": {
        "type": "boolean",
        "default": False,
        "description": "gradients are never cleared, so each step adds to the gradients of all earlier steps",
    },
}
OTHER_MODEL = [
    ({"keep_gradients": [True]}, "gradients are never cleared"),
]
REFUSED = [
    (
        {"tokenise_late": [True], "task": ["image-classification", "image-segmentation", "language-modelling"]},
        "this task has no texts to tokenise; set tokenise_late: false",
    ),
]
