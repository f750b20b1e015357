"""What one would write by hand over the plan's batches, and nothing else: the least that training this way takes.

python -m benchmarks.bare RESULTS trains a prepared results folder's plan, and prints the most memory that took, in MiB.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.rank import memory


def train(model, optimizer, schedule, plan: Plan, tokens: Tokens) -> None:
    for step in range(plan.steps):
        batch = tokens.batch(plan.step_ids(step), plan.widths[step])
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = tensors.pop("labels")
        loss = cross_entropy(model(**tensors).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main() -> None:
    from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

    torch.set_num_threads(1)
    data = paths.data_folder(Path(sys.argv[1]))
    (plan,) = (Plan.load(file) for file in (data / paths.PLANS).glob("bucketed-b64-e1-s*.npz"))
    model = BertForSequenceClassification.from_pretrained(data / paths.WEIGHTS).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, plan.steps // 10, plan.steps)
    gauge = memory.Gauge(torch.device("cpu"))
    gauge.start()
    train(model, optimizer, schedule, plan, Tokens.load(paths.split_folder(data, "train")))
    gauge.stop()
    torch.save(model.state_dict(), data.parent / "bare.pt")
    print(gauge.usage["peak_mb"])


if __name__ == "__main__":
    main()
