"""A script whose collator pads texts of several lengths to the longest of their batch, in one of the usual forms."""

import argparse
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

WORDS, PADDING = 30, {"mask": 1, "ignored": 2, "tokens_first": 0, "fields": 0, "left": 7}
FORMS = tuple(PADDING)


@dataclass
class Texts:
    words: torch.Tensor
    kept: torch.Tensor


class Collator:
    """Returns the words as [samples, tokens], and which of them are kept, or otherwise, as the form says."""

    def __init__(self, form):
        self.form = form

    def __call__(self, texts):
        side = "left" if self.form == "left" else "right"
        padded = [
            pad_sequence(each, batch_first=True, padding_value=value, padding_side=side)
            for value, each in ((PADDING[self.form], texts), (False, [torch.ones_like(text).bool() for text in texts]))
        ]
        if self.form == "ignored":  # True: not to be attended to
            return padded[0], ~padded[1]
        if self.form == "tokens_first":
            return padded[0].T.contiguous(), padded[1].T.contiguous()
        return padded


class Next(nn.Module):
    """Scores for the next word after each."""

    def __init__(self, form):
        super().__init__()
        self.form, self.table, self.last = form, nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, words, kept=None):
        if self.form == "fields":
            words, kept = words.words, words.kept
        if kept is not None:
            words = words.masked_fill(kept if self.form == "ignored" else ~kept, 0)
        return self.last(self.table(words).tanh())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--mistake", default="")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    lengths, form = random.Random(1), arguments.form
    texts = [torch.randint(0, WORDS, (lengths.randrange(3, 20),)) for _ in range(128)]
    model = DistributedDataParallel(Next(form))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for words, kept in DataLoader(texts, batch_size=6, sampler=DistributedSampler(texts), collate_fn=Collator(form)):
        if form == "tokens_first":
            scores = model(words)
        else:
            scores = model(Texts(words, kept)) if form == "fields" else model(words, kept)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="none")
        counts = (~kept if form == "ignored" else kept).flatten()
        total = counts.sum().float()
        if arguments.mistake != "own_mean":
            dist.all_reduce(total)
            total /= dist.get_world_size()
        optimizer.zero_grad()
        ((loss * counts).sum() / total).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
