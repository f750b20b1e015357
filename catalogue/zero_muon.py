"""python -m catalogue.zero_muon: does DeepSpeed's own Muon, with ZeRO's stages on two processes, step as on one?

    python -m catalogue.zero_muon [--write]

Four linear layers learn in eight steps whose gradients' norms are below 1, so that clipping at 1 must change nothing.
Each case is held against PyTorch's Muon in one process, with the same settings. Both compute Muon's iteration
(Newton-Schulz) in bf16, so an honest case differs by a per cent. --write puts the table into docs/catalogue.md.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common import PROJECT, between_marks, markdown
from catalogue.table import PAGE
from lockstep import cli

STAGES = (0, 1, 2, 3)
CLIPS = (0.0, 1.0)  # 0: no clipping
STEPS, SAMPLES = 8, 256
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
FAR = 0.1  # of the update; bf16's rounding makes .012
MARKS = ("<!-- zero_muon: begin -->", "<!-- zero_muon: end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/catalogue.md")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)  # as one of the processes of a case
    arguments = parser.parse_args()
    if arguments.train:
        train(**arguments.train)
        return 0
    distances = {}
    for clip in CLIPS:
        alone = updates(1, stage=None, clip=clip)
        for stage in STAGES:
            distances[stage, clip] = distance(updates(2, stage=stage, clip=clip), alone)
    print(table(distances))
    if arguments.write:
        between_marks(PAGE, MARKS, table(distances))
    return 0


def distance(measured: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """How far updates are from the reference's, as a share of the norm of these."""
    squared = sum((measured[name] - reference[name]).square().sum() for name in reference)
    return float((squared / sum(update.square().sum() for update in reference.values())).sqrt())


def updates(processes: int, **case) -> dict[str, torch.Tensor]:
    """Train a case (see `train`) with so many processes; returns the update of each weight."""
    # DeepSpeed would compile the iteration, for ten seconds.
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        case["file"] = str(Path(folder, "updates.pt"))
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        program += ["-m", "catalogue.zero_muon", "--train", json.dumps(case)]
        finished = subprocess.run(program, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{case}: it failed:\n{finished.stdout}{finished.stderr}")
        return torch.load(case["file"])


def train(file: str, clip: float, stage: int | None) -> None:
    """Train as one process of a case, and let rank 0 write the update of each weight.

    clip: the largest norm of the gradient, 0 for any. stage: of ZeRO; None is PyTorch's own Muon, without DeepSpeed.
    """
    import deepspeed  # it reads the environment

    deepspeed.init_distributed("gloo", verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    widths = (32, 48, 32, 32, 32)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))
    inputs, targets = torch.randn(2, STEPS, SAMPLES, 32).unbind()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step = _by_pytorch(model, clip) if stage is None else _by_deepspeed(model, clip, stage)
    own = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    for samples, wanted in zip(inputs[:, own], targets[:, own], strict=True):
        step(samples, wanted)
    trained = {name: _whole(weight, stage) for name, weight in model.named_parameters()}
    if rank == 0:
        torch.save({name: weight - start[name] for name, weight in trained.items()}, file)


def _by_pytorch(model, clip):
    matrices, others = _divided(model)
    optimizers = (torch.optim.Muon(matrices, **SETTINGS), torch.optim.AdamW(others, lr=SETTINGS["lr"], weight_decay=0))

    def step(samples, wanted):
        torch.nn.functional.mse_loss(model(samples), wanted).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _by_deepspeed(model, clip, stage):
    import deepspeed
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices, others = _divided(model)
    for weight in model.parameters():
        weight.use_muon = any(weight is matrix for matrix in matrices)
    adamw = {"lr": SETTINGS["lr"], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "use_muon": False}
    groups = [{"params": matrices, "ns_method": "standard", "use_muon": True, **SETTINGS}, {"params": others, **adamw}]
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_scatter": False},  # Muon does not allow the latter
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW)
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=optimizer, dist_init_required=False)

    def step(samples, wanted):
        engine.backward(torch.nn.functional.mse_loss(engine(samples), wanted))
        engine.step()

    return step


def _divided(model):
    """The matrices that Muon trains, all but the last layer's; and the other weights."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2][:-1]
    return matrices, [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]


def _whole(weight, stage):
    from deepspeed.utils import safe_get_full_fp32_param

    return (safe_get_full_fp32_param(weight) if stage else weight.detach()).clone()


def table(distances: dict[tuple[int, float], float]) -> str:
    """A line for each of ZeRO's stages: the distance without clipping, and with clipping that must change nothing."""
    lines = []
    for stage in STAGES:
        shown = [(distances[stage, clip], f"{100 * distances[stage, clip]:.1f} %") for clip in CLIPS]
        lines.append([f"{stage}", *(f"**{cell}**" if far > FAR else cell for far, cell in shown)])
    return markdown(["ZeRO stage", "no clipping", "`gradient_clipping: 1`"], lines)


if __name__ == "__main__":
    cli.run(main)
