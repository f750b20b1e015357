"""The proof that a row trains the same model as `single`: a few steps of both, from the same weights, side by side.

Losses alone prove little. AdamW hides gradients that are summed instead of averaged, which the gradient's norm shows;
and ranks that all train the whole global batch compute exactly what they should, which only the ledger shows (it is
held against the plan after every run, see `runs`). So losses, gradient norm, weights and ledger all are part of it.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep import checkpoint, runs
from lockstep.config import REFERENCE, Config, Row
from lockstep.errors import RunFailed
from lockstep.files import read_json, write_json

WEIGHTS = "weights.safetensors"  # what a trial ended with


@dataclass(frozen=True)
class Distances:
    """How far a row is from the reference.

    losses   largest difference of a step's mean loss over the global batch
    norm     difference of the first step's gradient norm, over that of the reference
    weights  largest difference of a final weight
    update   norm of the difference of all final weights, over the norm of what the reference trained them by
    """

    losses: float
    norm: float
    weights: float
    update: float


# Chosen from what was seen on a CPU: over 12 steps fp32 rows differ by rounding alone (2e-7 in losses, 4e-7 in weights,
# 1e-6 in updates), and every mistake of tests/test_parity.py by far more. Adam moves a weight by about the learning
# rate whatever its gradient, so where rounding turns a small gradient's sign a single weight says little: reduced
# precision is held to losses, norm and update. bf16 has 8 bits of precision, fp16 has 11.
TOLERANCES = {
    "fp32": Distances(losses=1e-5, norm=1e-5, weights=1e-5, update=1e-4),
    "fp16": Distances(losses=2e-3, norm=1e-2, weights=0.1, update=0.1),
    "bf16": Distances(losses=1e-2, norm=2e-2, weights=0.1, update=0.2),
    "lossy": Distances(losses=2e-2, norm=5e-2, weights=0.1, update=0.8),
}
# A key's bias adds the same to all scores of a query, which the softmax takes away again: its gradient is zero but for
# rounding, of which Adam makes whole steps. What architectures call it.
WITHOUT_GRADIENT = ("key.bias", "k_proj.bias", "k_lin.bias", "key_proj.bias")


def prove(config: Config, row: Row | None, results: Path) -> dict:
    """Run `row`'s trial (None: the reference's), and return the verdict, which is written as verdict.json beside it.

    proof is equal, within-tolerance or unequal. A trial that fails is unequal, with the reason.
    """
    trial = config.trial(row)
    folder = results / trial.folder(1)
    try:
        runs.run(config, trial, 1, results)
        save_file(checkpoint.read(folder), folder / WEIGHTS)
    except RunFailed as error:
        if row is None:
            raise
        verdict = {"proof": "unequal", "reason": str(error), "found": None, "lossy": "", "steps": None}
    else:
        verdict = compare(row, folder, results) if row else {"proof": "equal", "reason": "", "found": None, "lossy": ""}
    finally:
        shutil.rmtree(folder / "native", ignore_errors=True)
    verdict = {"row": trial.name, "world_size": trial.hardware.processes} | verdict
    write_json(folder / "verdict.json", verdict)
    return verdict


def compare(row: Row, folder: Path, results: Path) -> dict:
    """Hold the finished trial in `folder` against the reference's."""
    (reference,) = (results / "parity" / REFERENCE).glob("n*/rep1")
    ours, theirs = (read_json(run / "record.json") for run in (folder, reference))
    start = load_file(results / "data" / "weights" / "model.safetensors")
    mine, wanted = (load_file(run / WEIGHTS) for run in (folder, reference))
    difference = {
        name: (mine[name].double() - wanted[name].double()).abs()
        for name in wanted
        if not name.endswith(WITHOUT_GRADIENT)
    }
    movement = {name: (start[name].double() - wanted[name].double()).abs() for name in difference}
    found = Distances(
        losses=max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
        norm=abs(ours["gradient_norm"] - theirs["gradient_norm"]) / theirs["gradient_norm"],
        weights=max(float(tensor.max()) for tensor in difference.values()),
        update=_norm(difference) / _norm(movement),
    )
    kind = "lossy" if row.lossy else row.precision
    tolerance = TOLERANCES[kind]
    beyond = [name for name, value in asdict(found).items() if not value <= asdict(tolerance)[name]]  # NaN is beyond
    proof = "unequal" if beyond else "equal" if kind == "fp32" else "within-tolerance"
    return {
        "proof": proof,
        "reason": "; ".join(
            f"{name} {asdict(found)[name]:.2g} is above {asdict(tolerance)[name]:.2g}" for name in beyond
        ),
        "kind": kind,
        "lossy": row.lossy,
        "steps": len(ours["losses"]),
        "found": asdict(found),
        "tolerance": asdict(tolerance),
    }


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5


def read(config: Config, row: Row, results: Path) -> dict | None:
    """The verdict on a row, None if it was not held against the reference yet."""
    file = results / config.trial(row).folder(1) / "verdict.json"
    return read_json(file) if file.is_file() else None
