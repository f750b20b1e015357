"""Loops over the same model and rows: of many tutorials, of two libraries' documentation, a bare one over the plan, and
Lockstep's own: the closed division's `single` and the open one's `recipe`."""

import contextlib
import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks import bare
from lockstep import paths
from lockstep.config import reading
from lockstep.config.row import Row
from lockstep.config.settings import Settings
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens, table
from lockstep.model import models
from lockstep.model.optimizer import make_optimizer, make_schedule
from lockstep.rank.dev_split import DevSplit
from lockstep.rank.replay import Replay
from lockstep.rank.training import set_up
from lockstep.run.progress import Progress
from lockstep.strategies import recipe, single

BATCH, LENGTH = 64, 128
TUNED_ROW = {"strategy": "recipe", "processes": 1, "precision": "bf16", "weights": "bf16"}
ROWS = reading.parse(
    {
        "train": {"epochs": 1, "eval_every": 0, "checkpoint": "last"},
        "hardware": {"device": "cpu"},
        "rows": {"single": {"strategy": "single"}, "tuned": TUNED_ROW},
    }
).rows
ROW, TUNED = ROWS["single"], ROWS["tuned"]


def on_one_core(row: Row) -> Settings:
    settings = row.settings()
    return replace(settings, hardware=replace(settings.hardware, device="cpu", devices=1, processes=1, threads=1))


class Loop:
    """A model of its own, and `train`, which returns samples per second."""

    row = ROW

    def __init__(self, results: Path):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.results, self.settings = results, on_one_core(self.row)
        models.keep_masks()
        self.model = models.load(paths.data_folder(results) / paths.WEIGHTS).train()
        self.set_up()

    def set_up(self) -> None:
        self.optimizer = make_optimizer(self.model, self.settings.train)


class PaddedLoop(Loop):
    """Shuffles, pads every text to 128 tokens, tokenises it anew in collate, and prints the loss at every step."""

    def set_up(self):
        super().set_up()
        columns = table(paths.split_folder(paths.data_folder(self.results), "train"))
        rows = list(zip(columns["text"].to_pylist(), columns["label"].to_pylist(), strict=True))
        self.tokenizer = AutoTokenizer.from_pretrained(paths.data_folder(self.results) / paths.TOKENIZER)
        self.batches = iter(DataLoader(rows, BATCH, shuffle=True, collate_fn=self.collate))

    def collate(self, rows: list) -> dict:
        texts, labels = zip(*rows, strict=True)
        encoded = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        return {"inputs": encoded, "labels": torch.tensor(labels)}

    def train(self, first: int, steps: int) -> float:
        began = time.perf_counter()
        for step in range(first, first + steps):
            batch = next(self.batches)
            inputs = {name: batch["inputs"][name] for name in ("input_ids", "attention_mask")}
            loss = cross_entropy(self.model(**inputs).logits, batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            print(f"\rstep {step} loss {loss.item():.4f}", end="", flush=True)
        seconds = time.perf_counter() - began
        print("\r", end="")
        return steps * BATCH / seconds


class TrainerLoop(Loop):
    """transformers.Trainer as its documentation starts it: texts tokenised before, each batch padded to its longest."""

    def set_up(self):
        self.dataset = tokenised(self.results)
        self.tokenizer = AutoTokenizer.from_pretrained(paths.data_folder(self.results) / paths.TOKENIZER)

    def collator(self):
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer)

    def train(self, first: int, steps: int) -> float:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            str(self.results / "trainer"),
            per_device_train_batch_size=self.settings.train.global_batch,
            learning_rate=self.settings.train.learning_rate,
            weight_decay=self.settings.train.weight_decay,
            max_steps=steps,
            seed=first,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(self.model, arguments, data_collator=self.collator(), train_dataset=self.dataset)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # its summary of each part
            trainer.train()
        return steps * self.settings.train.global_batch / (time.perf_counter() - began)


class AccelerateLoop(Loop):
    """The loop of accelerate's documentation, over a DataLoader that pads each batch to its longest text."""

    def set_up(self):
        from accelerate import Accelerator
        from transformers import DataCollatorWithPadding

        super().set_up()
        collator = DataCollatorWithPadding(
            AutoTokenizer.from_pretrained(paths.data_folder(self.results) / paths.TOKENIZER)
        )
        loader = DataLoader(tokenised(self.results), BATCH, shuffle=True, collate_fn=collator)
        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1)
        self.accelerator = Accelerator(cpu=True)
        wrapped = self.accelerator.prepare(self.model, self.optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = wrapped

    def train(self, first: int, steps: int) -> float:
        began = time.perf_counter()
        for step, batch in enumerate(self.loader):
            if step == steps:
                break
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(**batch).loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
        return steps * BATCH / (time.perf_counter() - began)


def tokenised(results: Path):
    """The training split as prepared, with the columns that a model takes."""
    from datasets import load_from_disk

    return load_from_disk(str(paths.split_folder(paths.data_folder(results), "train"))).select_columns(
        ["input_ids", "label"]
    )


class Planned(Loop):
    """Loops over parts of the plan."""

    def set_up(self):
        super().set_up()
        self.whole = Plan.load(paths.plan_file(self.results, self.row.plan_name))
        self.samples = self.load(paths.split_folder(paths.data_folder(self.results), "train"))

    def load(self, split: Path):
        return Tokens.load(split)

    def part(self, first: int, steps: int) -> Plan:
        """`steps` steps of the plan from step `first` on, and on from the beginning where it ends."""
        first %= self.whole.steps - steps
        starts = self.whole.starts[first : first + steps + 1]
        return Plan(
            ids=self.whole.ids[starts[0] : starts[-1]],
            starts=starts - starts[0],
            widths=self.whole.widths[first : first + steps],
            epochs=self.whole.epochs[first : first + steps],
            dropped=self.whole.dropped,
        )


class BareLoop(Planned):
    """What one would write by hand, see bare.py."""

    def train(self, first: int, steps: int) -> float:
        plan = self.part(first, steps)
        schedule = make_schedule(self.optimizer, self.settings.train, steps, plan.epochs)
        began = time.perf_counter()
        bare.train(self.model, self.optimizer, schedule, plan, self.samples)
        return len(plan.ids) / (time.perf_counter() - began)


class PlannedLoop(Planned):
    """Lockstep's own training loop with its strategy `single`, by its own clock."""

    strategy_class = single.Strategy

    def set_up(self):
        super().set_up()
        self.strategy = self.strategy_class(self.settings)
        self.strategy.start()
        self.strategy.set_up(self.model, lambda wrapped: make_optimizer(wrapped, self.settings.train))
        self.progress = Progress(self.results, ranks=1)
        self.progress.begin(0)

    def train(self, first: int, steps: int) -> float:
        plan = self.part(first, steps)
        training = set_up(self.strategy, self.settings, self.results, self.progress)
        self.strategy.train(Replay(training, plan, self.samples, DevSplit(training, plan, self.samples)))
        return len(plan.ids) / training.clock.reading().train_seconds

    def batching(self, first: int, steps: int) -> float:
        """The share of the time of these steps that it takes to put their batches together."""
        plan = self.part(first, steps)
        seconds = len(plan.ids) / self.train(first, steps)
        began = time.perf_counter()
        for step in range(steps):
            self.strategy.batch(self.samples, plan.step_ids(step), plan.widths[step])
        return (time.perf_counter() - began) / seconds


class TunedLoop(PlannedLoop):
    """The same loop with the open division's fastest recipe for a CPU that has bf16 instructions."""

    strategy_class = recipe.Strategy

    row = TUNED


class SameWidths(PlannedLoop):
    """The same loop over steps of this plan that are as wide as another's, `wanted`: the same work on other texts."""

    wanted: np.ndarray  # int [steps], in tokens

    def part(self, first: int, steps: int) -> Plan:
        first %= len(self.wanted) - steps
        random, whole = np.random.default_rng(first), self.whole
        near = [np.abs(whole.widths - width) for width in self.wanted[first : first + steps]]
        chosen = np.array([random.choice(np.flatnonzero(away == away.min())) for away in near])
        ids = np.concatenate([whole.step_ids(step) for step in chosen])
        return Plan(ids, np.arange(steps + 1) * BATCH, whole.widths[chosen], whole.epochs[chosen], whole.dropped)
