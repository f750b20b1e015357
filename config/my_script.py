"""A training script that Lockstep benchmarks and proves as a row: DistributedDataParallel with a loop of its own.

    rows: {mine: {strategy: script, script: config/my_script.py}}

Copy it, and change what you like: the wrapping, the loop, the optimizer's step.
"""

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from lockstep import session

for run in session.join():
    model = DistributedDataParallel(run.model.to(run.device))
    optimizer = run.optimizer(model)
    for step in run.steps(model, optimizer):
        for batch in step.batches():
            with nullcontext() if batch.last else model.no_sync():
                with run.autocast():
                    outputs = model(**batch.inputs)
                run.loss(batch, outputs).backward()
        step.gradients_ready()  # they are averaged, and not clipped yet
        if run.clip:
            run.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        run.scaler.step(optimizer)
        run.scaler.update()
        optimizer.zero_grad()
