"""Evaluation on the dev split while training. Which weights are kept follows from it, in checkpoint.py."""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep.data.plan import Plan, share
from lockstep.data.tokens import Tokens
from lockstep.errors import RunFailed
from lockstep.rank import checkpoint
from lockstep.rank.session import Session


class DevSplit:
    """When the dev split is evaluated, and what came of it."""

    def __init__(self, session: Session, plan: Plan, tokens: Tokens):
        self.session, self.plan, self.tokens = session, plan, tokens
        self.every, self.kept = session.train.eval_every, checkpoint.Kept(session, plan)
        self.history: list[dict] = []

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0 and step < self.plan.steps

    def finish(self) -> None:
        """After the last step."""
        if self.every:
            self.evaluate(self.plan.steps)
        self.kept.trained(self.plan.steps)

    def evaluate(self, step: int) -> None:
        logits = gather_logits(self.session, self.tokens)
        labels = torch.from_numpy(self.tokens.labels)
        predicted = logits.argmax(dim=1)
        scores = {
            "step": step,
            "support": len(logits),
            "loss": cross_entropy(logits, labels).item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "macro_f1": macro_f1(labels, predicted, logits.shape[1]),
        }
        self.history.append(scores)
        self.session.files.event("eval", scores)
        if self.session.strategy.world.rank == 0:
            numbers = ", ".join(f"dev {name} {scores[name]:.4f}" for name in ("loss", "accuracy", "macro_f1"))
            print(f"step {step}/{self.plan.steps}: {numbers}", flush=True)
        self.kept.evaluated(step, scores["macro_f1"])


def macro_f1(labels: torch.Tensor, predicted: torch.Tensor, classes: int) -> float:
    """The mean over classes of 2 * hits / (truths + guesses), 0 for a class with neither; labels and predicted: [n].

    The report's figure is scikit-learn's; importing that would cost every rank over a second.
    """
    hits, truths, guesses = (
        part.bincount(minlength=classes) for part in (labels[labels == predicted], labels, predicted)
    )
    return (2 * hits / (truths + guesses).clamp(min=1)).mean().item()


def gather_logits(session: Session, tokens: Tokens) -> torch.Tensor:
    """The logits of every sample of a split, each once, in order, on every rank: float32 on the CPU, [n, labels].

    All ranks run the same number of equally large batches, as collectives inside a forward pass need. What fills up a
    share is marked by the id -1, and dropped again.
    """
    strategy, world = session.strategy, session.strategy.world
    all_ids, all_logits = [], []
    strategy.model.eval()
    with torch.no_grad():
        for ids in tokens.batches(session.train.global_batch):
            padded = np.full(math.ceil(len(ids) / world.size) * world.size, -1)
            padded[: len(ids)] = ids
            mine = share(padded, world.rank, world.size)
            width = int(tokens.lengths[ids].max())
            inputs = strategy.to_device(tokens.batch(np.where(mine < 0, ids[0], mine), width))
            with strategy.autocast():
                logits = strategy.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            all_ids.append(torch.from_numpy(mine).to(world.device))
            all_logits.append(logits.float())
            session.progress.alive()
    strategy.model.train()
    ids = strategy.all_gather(torch.cat(all_ids)).flatten().cpu()
    logits = strategy.all_gather(torch.cat(all_logits)).flatten(0, 1).cpu()[ids >= 0]
    order = ids[ids >= 0].argsort()
    if not torch.equal(ids[ids >= 0][order], torch.arange(len(tokens))):
        raise RunFailed("the gathered predictions do not hold each sample of the split exactly once")
    return logits[order]
