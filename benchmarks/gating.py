"""How often `lockstep gate` fails a commit that is compared with itself, and which slow-down it finds.

One commit is timed against itself in many blocks, by the gate's own code. Each window of successive blocks is then
judged as a gate of so many blocks would have. For the slow-down that is found nine times in ten, the second times are
multiplied: that is a slow-down of each step by the same share.
"""

import bisect
import os
import subprocess
import sys
import time
from pathlib import Path

from lockstep.script import commits, gate

LIMIT = 0.05
SIZES = (5, 10, 20, 40)  # blocks
FOUND = 0.9  # of all windows
MOST_STEPS = 400  # of half a percent
TRAIN = """
import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
while True:
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
"""
HEADER = ["blocks", "minutes", "windows", "failed of windows with itself", "undecided", "slow-down found in 9 of 10"]


def gating(folder: Path, blocks: int) -> list[list[str]]:
    """A line for each number of blocks in SIZES that is at most a third of `blocks`."""
    base, ours, minutes = measured(folder, blocks)
    lines = []
    for size in SIZES:
        if 3 * size > blocks:
            break
        verdicts = judged(base, ours, size)
        lines.append(
            [
                str(size),
                f"{size * minutes:.1f}",
                str(len(verdicts)),
                f"{verdicts.count(gate.SLOWER)} of {len(verdicts)}",
                f"{verdicts.count(gate.UNDECIDED) / len(verdicts):.0%}",
                f"{smallest_found(base, ours, size):.1%}",
            ]
        )
    return lines


def measured(folder: Path, blocks: int) -> tuple[list[float], list[float], float]:
    """Seconds per step of two equal trees in each block, and the minutes that a block took."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "train.py").write_text(TRAIN, encoding="utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(repository)]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "Train"]):
        subprocess.run([*git, *words], check=True)
    (repository / "remark.txt").write_text("Nothing that is run.\n", encoding="utf-8")
    os.chdir(repository)
    trees = commits.copies(repository.resolve(), "HEAD", folder / "trees", [])
    runs = gate.Runs(gate.Asked([sys.executable, "train.py"], LIMIT), repository.resolve(), folder / "runs")
    steps = gate.steps_of_a_run(runs.time(trees[0], gate.TRIED))
    base, ours, began = [], [], time.monotonic()
    for block in range(blocks):
        timed = runs.block(*trees, steps, block)
        base.append(timed["base"].seconds)
        ours.append(timed["ours"].seconds)
        print(f"block {block + 1} of {blocks}: {ours[-1] / base[-1]:.3f}", flush=True)
    return base, ours, (time.monotonic() - began) / 60 / blocks


def judged(base: list[float], ours: list[float], size: int, slower: float = 0.0) -> list[str]:
    """The verdicts on all windows of `size` successive blocks, ours being slower by a share besides."""
    return [verdict(base[at : at + size], ours[at : at + size], slower) for at in range(len(base) - size + 1)]


def verdict(base: list[float], ours: list[float], slower: float) -> str:
    """What a gate says that looks after each block, and ends early if the change passes."""
    ours = [seconds * (1 + slower) for seconds in ours]
    for blocks in range(gate.FEWEST_BLOCKS, len(base) + 1):
        speed = gate.judge(base[:blocks], ours[:blocks], LIMIT, last=blocks == len(base))
        if speed.verdict != gate.UNDECIDED:
            return speed.verdict
    return gate.UNDECIDED


def smallest_found(base: list[float], ours: list[float], size: int) -> float:
    """The smallest slow-down, in steps of half a percent, for which nine windows in ten are slower."""

    def share(step: int) -> float:
        verdicts = judged(base, ours, size, step / 200)
        return verdicts.count(gate.SLOWER) / len(verdicts)

    step = bisect.bisect_left(range(MOST_STEPS), FOUND, key=share)
    return step / 200 if step < MOST_STEPS else float("inf")
