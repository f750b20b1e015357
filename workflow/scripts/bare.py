"""Train the plan of a row by a bare PyTorch loop on one device, and print the time of a step.

The output is one line of JSON: step_ms (median), samples_per_second, train_seconds, steps, and `disturbed`, the reasons
why its times can't be trusted. Nothing is kept. The model must be one of transformers', like that of the default
configuration.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from lockstep import cli, paths
from lockstep.config.hardware import training_gpus
from lockstep.config.machine import cpu_cores, selection
from lockstep.data import prepared
from lockstep.run import watcher
from lockstep.run.progress import WARMUP_STEPS


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", default="single", help="the row whose plan, precision, attention and rate to use")
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    config.require_row(arguments.row, f"--row {arguments.row}")
    row, data = config.rows[arguments.row], paths.data_folder(arguments.results)
    prepared.require(arguments.results)
    os.environ.update(selection((training_gpus(row.hardware) or [])[:1] or None))
    os.environ.setdefault("OMP_NUM_THREADS", str(row.hardware.threads))

    import numpy as np
    import torch

    from lockstep.data.plan import Plan
    from lockstep.data.tokens import Tokens
    from lockstep.model import attention, models
    from lockstep.model.optimizer import make_optimizer, make_schedule
    from lockstep.rank import bare
    from lockstep.strategies.single import allow_tf32

    torch.set_num_threads(row.hardware.threads)
    allow_tf32(row.options.get("tf32", False))
    torch.manual_seed(row.train.seed)
    plan = Plan.load(paths.require(paths.plan_file(arguments.results, row.plan_name), "plan.py"))
    device = torch.device(row.hardware.device)
    attention.choose(row.train.attention, device, len(set(plan.widths.tolist())))
    models.keep_masks()
    model = models.load(data / paths.WEIGHTS, config.model.dropout).train().to(device)
    optimizer = make_optimizer(model, row.train)
    schedule = make_schedule(optimizer, row.train, plan.steps, plan.epochs)
    tokens = Tokens.load(paths.split_folder(data, "train"))
    with tempfile.TemporaryDirectory() as folder:
        with watcher.beside(Path(folder), (training_gpus(row.hardware) or [])[:1]):
            seconds = bare.timed(model, optimizer, schedule, plan, tokens, row.precision, row.train.clip)
            window = [time.perf_counter() - float(seconds.sum()), time.perf_counter()]
        samples = watcher.read(Path(folder))
    busy = row.hardware.threads if row.hardware.device == "cpu" else 1
    steady = seconds[WARMUP_STEPS:] if len(seconds) > 2 * WARMUP_STEPS else seconds
    figures = {
        "step_ms": 1000 * float(np.median(steady)),
        "samples_per_second": len(plan.ids) / float(seconds.sum()),
        "train_seconds": float(seconds.sum()),
        "steps": plan.steps,
        "disturbed": watcher.judge(samples, window, cpu_cores(), busy).disturbed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    cli.run(main)
