"""Loops over packed sequences, by a small Llama: a bare one over the plan, Trainer as documented, Lockstep's own."""

import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from benchmarks.common import PROJECT
from benchmarks.loops import BareLoop, Planned, PlannedLoop, TrainerLoop
from lockstep import paths
from lockstep.config import reading
from lockstep.data.documents import NO_TARGET, Sequences
from lockstep.model.optimizer import make_schedule

CONFIGS = ("config/config.yaml", "config/language.yaml")
WHOLE = ["train.epochs=1", "train.eval_every=0", "train.checkpoint=last", "train.best=macro_f1", "hardware.device=cpu"]
ROW = reading.read([PROJECT / name for name in CONFIGS], WHOLE).rows["single"]


class OfSequences(Planned):
    row = ROW

    def load(self, split: Path) -> Sequences:
        return Sequences.load(split)


class BareSequences(OfSequences, BareLoop):
    """What one would write by hand, and nothing else."""

    def train(self, first: int, steps: int) -> float:
        plan, model = self.part(first, steps), self.model
        schedule = make_schedule(self.optimizer, self.settings.train, plan.steps, plan.epochs)
        began = time.perf_counter()
        for step in range(plan.steps):
            batch = self.samples.batch(plan.step_ids(step), int(plan.widths[step]))
            inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
            labels = inputs.pop("labels").flatten()
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
            cross_entropy(logits, labels, ignore_index=NO_TARGET).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.train.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            schedule.step()
        return len(plan.ids) / (time.perf_counter() - began)


class PlannedSequences(OfSequences, PlannedLoop):
    """Lockstep's own loop with its strategy `single`."""


class TrainerSequences(TrainerLoop):
    """transformers.Trainer as its documentation starts it for causal models: the same tokens in blocks of one length,
    the collator for language modelling, in which documents attend across their borders."""

    row = ROW

    def set_up(self):
        split = Sequences.load(paths.split_folder(paths.data_folder(self.results), "train"))
        length = int(split.lengths.max())
        whole = torch.from_numpy(split.input_ids[: len(split.input_ids) // length * length].astype("int64"))
        self.dataset = [{"input_ids": block} for block in whole.view(-1, length)]
        self.tokenizer = AutoTokenizer.from_pretrained(paths.data_folder(self.results) / paths.TOKENIZER)

    def collator(self):
        from transformers import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(self.tokenizer, mlm=False)
