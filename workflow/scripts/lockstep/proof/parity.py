"""The proof that a row trains the same model as `single`: both train a few steps from the same weights.

Losses alone prove little. AdamW hides gradients that are summed instead of averaged; the gradient norm shows them. If
every rank trains the whole global batch, all numbers are right, and only the ledger shows it (runs.py checks it against
the plan after every run). So the proof covers losses, gradient norm, update and ledger.

It answers two questions separately, because rounding would hide the answer to the first:

semantics  Does the row compute the same function? Its trial is also trained in float64, where rounding is below 1e-12,
           so any larger difference is a mistake, and one tolerance fits every model. Some frameworks can't do this.
           AdamW hides a wrong factor of a gradient, so one step of plain SGD follows, whose update is the gradient. It
           also shows in which weights a mistake begins.
rounding   Does it compute it in the precision that it is timed in? How far rounding alone moves a model in a few steps
           depends on the model and on the machine. So it is measured: the reference is trained again with reordered
           sums and a scaled loss, which is the rounding that ranks cause. This distance is the floor, and a row may be
           further away by a fixed factor.

The reference is also trained with two mild mistakes. A verdict says how far the row is from the reference, relative to
the floor, and how many times further away the mildest mistake is.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep import paths
from lockstep.config import precisions
from lockstep.config.configuration import FP64_TOLERANCE, IN_PARTS, MISTAKES, ONE_STEP, REORDERED, Config
from lockstep.config.row import Row
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, OtherWork, RunFailed, in_weights
from lockstep.files import atomic_file, read_json, write_json
from lockstep.model import lora, models
from lockstep.proof import conversion, verdicts
from lockstep.run import facts, journal, lifetime, record_files, runs
from lockstep.run.ledger import check_ledger, gather_ledger
from lockstep.run.record import Compared


@dataclass(frozen=True)
class Distances:
    """How far a trial is from the reference.

    losses   largest difference of a step's mean loss over the global batch
    norm     relative difference of the first step's gradient norm
    weights  largest difference of a final weight
    update   norm of the difference of all final weights, divided by the norm of the reference's total update
    """

    losses: float
    norm: float
    weights: float
    update: float

    def beyond(self, tolerance: dict[str, float]) -> list[str]:
        """The kinds of distance that exceed their tolerance; NaN exceeds any."""
        return [name for name, most in tolerance.items() if not getattr(self, name) <= most]


# In float64 rounding causes distances of 1e-14 in 12 steps, and the mildest mistake 1e-4.
FP64 = dict.fromkeys(("losses", "norm", "weights", "update"), FP64_TOLERANCE)
# A lossy row can't be proven to train exactly the same model; these limits only show that it trains a similar one.
LOSSY = {"losses": 2e-2, "norm": 5e-2, "update": 0.8}
# Single weights are not compared with the floor: for a tiny gradient, Adam turns rounding noise into full steps.
MEASURED = ("losses", "norm", "update")
OF_A_PROOF = (paths.VERDICT, paths.RECORD, paths.ENVIRONMENT)
KEYS_BIAS = ("key.bias", "k_proj.bias", "k_lin.bias", "key_proj.bias")  # names of the bias of attention keys


def prove_reference(config: Config, reference: Row, results: Path, in_forks: bool = False) -> dict:
    """Train a reference, and measure its floor and its mistakes; both are written into its folder.

    in_forks: whether ranks are forks of this process (run/forked.py).
    """
    trial = replace(reference, in_forks=in_forks)
    with lifetime.hold(results / trial.folder(1)):
        return _prove_reference(config, trial, results)


def _prove_reference(config: Config, trial: Row, results: Path) -> dict:
    folder, precision = _run(config, trial, results), trial.train.precision
    own, start = Trained.of(folder), _start(results, trial)
    compared = [name for name in trial.variations if name != ONE_STEP]
    distances = {name: own.distances(Trained.of(folder / name), start) for name in compared}
    honest = REORDERED if verdicts.has_batch_statistics(results) else IN_PARTS | REORDERED
    floors, mistakes = ({name: distances[name] for name in names if name in distances} for names in (honest, MISTAKES))
    for name in compared:  # rows are compared with its step of plain SGD, too
        shutil.rmtree(folder / name)
    verdict = {"row": trial.name, "world_size": 1, "proof": "equal", "reason": "", "precision": precision}
    if floors:
        verdict["floor"] = {
            name: max(precisions.of(precision).least_floor, *(getattr(distance, name) for distance in floors.values()))
            for name in MEASURED
        }
        verdict["mistakes"] = {
            name: {kind: getattr(distance, kind) for kind in MEASURED} for name, distance in mistakes.items()
        }
    write_json(folder / paths.VERDICT, verdict)
    journal.note(results, "proof", folder, OF_A_PROOF)
    return verdict


def prove(config: Config, row: Row, results: Path) -> dict:
    """Run `row`'s trial, compare it with its references, and return the verdict, which is written into its folder.

    The verdict's `proof` is equal, within-tolerance (in reduced precision, or for a lossy row within wide limits), or
    unequal. Raises BadInput if a reference is missing, and RunFailed if the trial fails; failed.json then has the
    reason.
    """
    references = {name: _folder_of(reference, results) for name, reference in config.references(row).items()}
    trial = config.trial(row)
    with lifetime.hold(results / trial.folder(1)):
        return _prove(config, row, trial, references, results)


def _prove(config: Config, row: Row, trial: Row, references: dict[str, Path], results: Path) -> dict:
    verdict = {
        "row": row.name,
        "world_size": trial.hardware.devices,
        "steps": trial.train.max_steps,
        "precision": row.precision,
        "kind": "lossy" if row.lossy else row.precision,
        "lossy": row.lossy,
    }
    try:
        folder = _run(config, trial, results)
        verdict |= compare(row, folder, references, _start(results, trial))
    except OtherWork as error:
        folder = results / trial.folder(1)
        verdict |= {"proof": "unequal", "reason": str(error), "distances": None}
    else:
        if departed := record_files.read_run(folder).departed:
            told = [*departed, verdict["reason"]] if verdict["reason"] else departed
            verdict |= {"proof": "unequal", "reason": "; ".join(told)}
        (folder / paths.FINAL_WEIGHTS).unlink()
        for name in trial.variations:
            shutil.rmtree(folder / name, ignore_errors=True)
    if verdict["proof"] == "unequal" and (why := verdicts.another_model(row, trial, results)):
        verdict |= {"by_nature": why, "reason": f"{why}: {verdict['reason']}"}
    write_json(folder / paths.VERDICT, verdict)
    journal.note(results, "proof", folder, OF_A_PROOF)
    return verdict


def compare(row: Row, folder: Path, references: dict[str, Path], start: dict[str, torch.Tensor]) -> dict:
    """Compare the finished trial in `folder` with its `references`, a folder for each precision.

    Raises OtherWork if it has trained other tensors than the references.
    """
    precision = next(iter(references))
    measured = read_json(references[precision] / paths.VERDICT)
    reference, ours = Trained.of(references[precision]), Trained.of(folder)
    distances = reference.distances(ours, start)
    declared = precisions.of(precision)
    tolerance = LOSSY if row.lossy else {name: declared.tolerance * measured["floor"][name] for name in MEASURED}
    reasons = [
        f"{name} {getattr(distances, name):.2g} is above {tolerance[name]:.2g}" for name in distances.beyond(tolerance)
    ]
    verdict = {
        "distances": asdict(distances),
        "tolerance": tolerance,
        "floor": measured["floor"],
        "above_floor": max(getattr(distances, name) / measured["floor"][name] for name in MEASURED),
        "below_mistake": _below_mildest(distances, measured),
        "mistake_of_limit": min(
            max(mistake[name] / tolerance[name] for name in MEASURED) for mistake in measured["mistakes"].values()
        ),
        "fp64": None,
        "no_fp64": row.no_fp64,
        "first_gradients": None,
    }
    first = None
    if "fp64" in references:
        exact_reference, exactly = Trained.of(references["fp64"]), Trained.of(folder / "fp64")
        exact = exact_reference.distances(exactly, start)
        verdict["fp64"] = asdict(exact)
        reasons += [
            f"in fp64 {name} {getattr(exact, name):.2g} is above {FP64[name]:.0e}" for name in exact.beyond(FP64)
        ]
        if exact.beyond(FP64):  # rounding hides nothing there, so that it tells more
            reference, ours, tolerance = exact_reference, exactly, FP64
        if (folder / ONE_STEP).is_dir():
            first = first_gradients(Trained.of(references["fp64"] / ONE_STEP), Trained.of(folder / ONE_STEP), start)
            verdict["first_gradients"] = first
            if first["differing"]:
                reasons.append(_said_of_gradients(first))
    if reasons:
        reasons.append(reference.where_losses(ours, tolerance))
        if not (first and first["differing"]):  # after several steps all weights may differ
            reasons.append(reference.where_weights(ours, start, tolerance))
    best = "within-tolerance" if row.lossy else declared.proof
    return verdict | {"proof": "unequal" if reasons else best, "reason": "; ".join(reasons)}


def first_gradients(reference: "Trained", ours: "Trained", start: dict[str, torch.Tensor]) -> dict:
    """The weights whose gradient differs in the first step, after one step of plain SGD in float64 from `start`.

    Backward goes from the loss to the inputs, and a wrong gradient of a layer's output reaches all layers before it.
    So the place to look is the differing weight that is nearest to the loss, the last in the model's order.

    Returns `differing` of `weights`; of the nearest one also its name (`nearest`), and `times`, the norm of its
    gradient divided by that in the reference, None where that is zero. Raises OtherWork as `Trained.distances` does.
    """
    reference.require_same_tensors(ours)
    weights = list(reference.by_weight(ours, start))
    least = FP64_TOLERANCE**2 * sum(weight.movement for weight in weights)
    differing = [weight for weight in weights if not weight.difference <= least]  # NaN differs
    first = {"differing": len(differing), "weights": len(weights), "nearest": None, "times": None}
    if differing:
        nearest = differing[-1]
        times = (nearest.other_movement / nearest.movement) ** 0.5 if nearest.movement else None
        first |= {"nearest": nearest.name, "times": times}
    return first


def _said_of_gradients(first: dict) -> str:
    if first["times"] is None:
        how = "whose gradient is zero in the reference"
    elif abs(first["times"] - 1) < 5e-4:
        how = "whose gradient has another direction"
    else:
        how = f"whose gradient is {first['times']:.4g} times as large"
    weights = in_weights(first["differing"], first["weights"], first["nearest"])
    return f"in fp64 the first step's gradient differs in {weights}, {how}"


def _below_mildest(distances: Distances, measured: dict) -> float:
    """How many times further away than the row the mildest mistake is, by the kind of distance that shows it best.

    A distance below the floor counts as the floor, since differences below rounding say nothing.
    """
    floor = measured["floor"]
    return min(
        max(mistake[name] / max(getattr(distances, name), floor[name]) for name in MEASURED)
        for mistake in measured["mistakes"].values()
    )


@dataclass(frozen=True)
class OneWeight:
    """How far one weight is from the reference's.

    most: the largest difference of a number; difference: the sum of squared differences; movement and other_movement:
    the sums of squares of the reference's update and of the other's.
    """

    name: str
    most: float
    difference: float
    movement: float
    other_movement: float

    @property
    def update(self) -> float:
        """The norm of the difference, divided by that of the reference's update; infinite if only `other` moved it."""
        if not self.movement:
            return math.inf if self.difference else 0.0
        return (self.difference / self.movement) ** 0.5


@dataclass(frozen=True)
class Trained:
    """The result of a trial, or of a variation of one."""

    losses: list[float]
    norm: float
    weights: dict[str, torch.Tensor]

    @staticmethod
    def of(folder: Path) -> "Trained":
        file = folder / paths.RECORD if (folder / paths.RECORD).is_file() else paths.rank_summary(folder, 0)
        numbers = facts.of(Compared, read_json(file))
        return Trained(numbers.losses, numbers.gradient_norm, load_file(folder / paths.FINAL_WEIGHTS))

    def distances(self, other: "Trained", start: dict[str, torch.Tensor]) -> Distances:
        """The distances of `other` from this result, the reference; both started from the weights `start`.

        Raises OtherWork if its tensors differ in name or shape.
        """
        self.require_same_tensors(other)
        weights = list(self.by_weight(other, start))
        return Distances(
            losses=max(self._of_losses(other)),
            norm=abs(self.norm - other.norm) / self.norm,
            weights=max(weight.most for weight in weights),
            update=(sum(weight.difference for weight in weights) / sum(weight.movement for weight in weights)) ** 0.5,
        )

    def require_same_tensors(self, other: "Trained") -> None:
        """Raises OtherWork if `other` has tensors of other names or shapes, as LoRA updates of another rank are."""
        shapes, theirs = ({name: weight.shape for name, weight in each.weights.items()} for each in (self, other))
        if differing := sorted(name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name)):
            pair = [list(each[differing[0]]) if differing[0] in each else "missing" for each in (theirs, shapes)]
            raise OtherWork(f"it trained other tensors: {differing[0]} is {pair[0]}, but {pair[1]} in the reference")

    def where_losses(self, other: "Trained", tolerance: dict[str, float]) -> str:
        """The first step whose loss differs."""
        losses = self._of_losses(other)
        first = next((step for step, distance in enumerate(losses, 1) if not distance <= tolerance["losses"]), None)
        return f"its loss differs from step {first} on" if first else "its losses agree"

    def where_weights(self, other: "Trained", start: dict[str, torch.Tensor], tolerance: dict[str, float]) -> str:
        """How many weights have another update, and which one's is the farthest away."""
        updates = {weight.name: weight.update for weight in self.by_weight(other, start)}
        differing = [name for name, update in updates.items() if not update <= tolerance["update"]]
        if not differing:
            return "its weights agree"
        farthest = max(differing, key=lambda name: (math.isnan(updates[name]), updates[name]))
        return f"{len(differing)} of {len(updates)} weights differ, {farthest} most"

    def _of_losses(self, other: "Trained") -> list[float]:
        return [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]

    def by_weight(self, other: "Trained", start: dict[str, torch.Tensor]) -> Iterator[OneWeight]:
        """How far each weight of `other` is from this one's, in the model's order, if it has a gradient at all."""
        for name in start:  # files have another order
            weight = self.weights.get(name)
            if weight is None or not weight.is_floating_point():
                continue
            # One by one, as copies of a large model may not fit into memory.
            reference, theirs, initial = weight.double(), other.weights[name].double(), start[name].double()
            distance = (theirs - reference).abs()
            movements = [float((each - initial).square().sum()) for each in (reference, theirs)]
            yield OneWeight(name, float(distance.max()), float(distance.square().sum()), *movements)


def _run(config: Config, trial: Row, results: Path) -> Path:
    """Run a trial and its variations; returns its folder, in which only the final weights of each are large files."""
    folder = results / trial.folder(1)
    for name in trial.variations:
        shutil.rmtree(folder / name, ignore_errors=True)
    try:
        finished = runs.run(config, trial, 1, results)
        try:
            with atomic_file(folder / paths.FINAL_WEIGHTS) as temporary:
                save_file(conversion.read(folder), temporary)
        except RunFailed as error:  # it trained, but its weights can't be read
            failed = replace(finished, status="failed", reason=str(error))
            record_files.write_run(folder / paths.FAILED, failed)
            (folder / paths.RECORD).unlink()
            raise
    finally:
        shutil.rmtree(folder / paths.CHECKPOINT, ignore_errors=True)
    plan = Plan.load(paths.plan_file(results, trial.plan_name))
    for name, changes in {} if trial.may_depart else trial.variations.items():
        its_plan = plan.first(changes["steps"]) if "steps" in changes else plan
        check_ledger(gather_ledger(folder / name, trial.hardware.processes), its_plan)
    return folder


def _start(results: Path, trial: Row) -> dict[str, torch.Tensor]:
    """The weights that a trial begins with, without those that no gradient moves."""
    model = lora.put_into(models.load(paths.data_folder(results) / paths.WEIGHTS), trial.train)
    unmoved = without_gradient(model)
    return {name: weight for name, weight in model.state_dict().items() if name not in unmoved}


def without_gradient(model: torch.nn.Module) -> set[str]:
    """The names of a model's weights whose gradient is zero except for rounding, which Adam turns into full steps.

    These are biases of attention keys: such a bias adds the same number to all scores of a query, which the softmax
    cancels. Where positions are part of the scores, as rotary and relative ones are, each score gets another number,
    but for the bias of DeBERTa's keys of positions, which is added to all of them. Models that rotate only a part of
    each key, such as Phi, are treated as those that rotate none.
    """
    config = getattr(model, "config", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    by_position = rotary and rotary.get("partial_rotary_factor", 1.0) == 1.0
    by_position = by_position or getattr(config, "relative_attention", False)
    by_position = by_position or str(getattr(config, "position_embedding_type", "")).startswith("relative")
    names = ("pos_key_proj.bias",) if by_position else KEYS_BIAS
    return {name for name in model.state_dict() if name.endswith(names)}


def _folder_of(reference: Row, results: Path) -> Path:
    """The folder of a trained reference. Raises BadInput if it was not trained yet."""
    folder = results / reference.folder(1)
    by_sgd = [f"{ONE_STEP}/{paths.FINAL_WEIGHTS}"] if ONE_STEP in reference.variations else []
    for name in (paths.VERDICT, paths.FINAL_WEIGHTS, *by_sgd):
        if not (folder / name).is_file():
            raise BadInput(
                f"{folder / name} does not exist: the reference must be trained first."
                " Run parity.py with this configuration and --row reference, or without --row to prove every row."
            )
    return folder
