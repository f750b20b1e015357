"""Two loops over the same model and rows: the one of many tutorials, and Lockstep's `single`."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lockstep import config, models, training
from lockstep.clock import Clock
from lockstep.plan import Plan
from lockstep.record import Progress, RankFiles
from lockstep.strategies.single import Strategy
from lockstep.tokens import Tokens, table

BATCH, LENGTH = 64, 128
TRAIN = config.parse({"train": {"eval_every": 0, "checkpoint": "last"}}).rows["single"]


def settings() -> dict:
    made = TRAIN.settings()
    made["hardware"] |= {"device": "cpu", "threads": 1}
    return made


class PaddedLoop:
    """Shuffles, pads every text to 128 tokens, tokenises it anew in collate, and prints the loss at every step."""

    def __init__(self, results: Path):
        torch.set_num_threads(1)
        columns = table(results / "data" / "dataset" / "train")
        rows = list(zip(columns["text"].to_pylist(), columns["label"].to_pylist(), strict=True))
        self.tokenizer = AutoTokenizer.from_pretrained(results / "data" / "tokenizer")
        self.model = models.load(results / "data" / "weights").train()
        self.optimizer = models.make_optimizer(self.model, TRAIN.settings()["train"])
        self.batches = iter(DataLoader(rows, BATCH, shuffle=True, collate_fn=self.collate))

    def collate(self, rows: list) -> dict:
        texts, labels = zip(*rows, strict=True)
        encoded = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        return {"inputs": encoded, "labels": torch.tensor(labels)}

    def train(self, first: int, steps: int) -> int:
        for step in range(first, first + steps):
            batch = next(self.batches)
            inputs = {name: batch["inputs"][name] for name in ("input_ids", "attention_mask")}
            loss = torch.nn.functional.cross_entropy(self.model(**inputs).logits, batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            print(f"\rstep {step} loss {loss.item():.4f}", end="", flush=True)
        print("\r", end="")
        return steps * BATCH


class PlannedLoop:
    """Lockstep's own training loop with its strategy `single`, over parts of the plan."""

    def __init__(self, results: Path):
        self.settings, self.results = settings(), results
        self.plan = Plan.load(next((results / "data" / "plan").glob("*.npz")))
        self.tokens = Tokens.load(results / "data" / "dataset" / "train")
        self.strategy = Strategy(self.settings)
        self.strategy.start()
        model = models.load(results / "data" / "weights").train()
        self.strategy.prepare(model, lambda prepared: models.make_optimizer(prepared, self.settings["train"]))
        self.progress = Progress(results, 1)
        self.progress.begin(0)

    def train(self, first: int, steps: int) -> int:
        starts = self.plan.starts[first : first + steps + 1]
        part = Plan(
            ids=self.plan.ids[starts[0] : starts[-1]],
            starts=starts - starts[0],
            widths=self.plan.widths[first : first + steps],
            epochs=self.plan.epochs[first : first + steps],
            dropped=self.plan.dropped,
        )
        files = RankFiles(self.results, 0)
        session = training.Session(
            self.strategy, self.settings["train"], False, self.results, Clock(), files, self.progress
        )
        never = training.Development(session, part, self.tokens)
        training._steps(session, part, self.tokens, never)
        return len(part.ids)
