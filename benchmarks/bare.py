"""python -m benchmarks.bare RESULTS: the most memory that the bare loop takes (lockstep/rank/bare.py), in MiB.

It trains the plan in a prepared results folder, on one thread of the CPU.
"""

import sys
from pathlib import Path

import torch

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.rank import memory
from lockstep.rank.bare import train


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
