"""Find and explain differences between a script's ranks, and between its run on several ranks and on one."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lockstep.errors import RunFailed, in_weights, listed
from lockstep.script.recording import OthersIdle, Recording, goes_through_all, loaders_alike

DIFFERENT, CAUTION, NOTE = "different", "caution", "note"  # levels: the model is another, may be another, is the same
STAGES, FLAT = "pipeline parallel", "FullyShardedDataParallel"  # as the recorder calls them
BESIDE = ".param_groups["  # in the recorder's names of parameters that belong to no model that is called in training
EQUAL, UNTOLD = "equal", "not told"  # further answers of a verdict
ABOVE_FLOOR = 30  # models differ if they are more than this many times further apart than rounding alone moves them
# The smallest floor by precision, as a share of an update. In half precision each rank's gradient is rounded on its
# own, which reversing the order of a batch does not reproduce.
SMALLEST = {"torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}
SMALLEST_ELSE = 1e-6
# As a share of an update: if only larger distances can be detected, there is no verdict, unless each step has one.
TOO_HIGH = 0.2
FAR = 0.01  # a difference of this share of the gradient or the update is not taken for rounding
NOT_FAR = [(FAR / ABOVE_FLOOR,) * 2]  # what two_scripts is given for rounding, where that is not known
PART = 0.05  # as a share of a parameter's own gradient, which differs if it differs by more, however small it is
ROUNDED = 1e-7  # the share of a whole gradient up to which a weight's own may be rounding
SAME_SIZE = 5e-4  # relative; a gradient that differs by less in size differs in its direction
OTHER_SIZE = 0.01  # relative, of gradients of which only the norm is known
ALWAYS = 2e-5  # relative; if no step's gradient differs by more in size, it is scaled to that size
MANY = 0.5  # as a share of a step's samples: if ranks share more than this, it is not chance
OWN_PART = "give each rank its own part, as by DistributedSampler(dataset)."
FEW = 4  # steps that show a rule
_listed = partial(listed, most=3)
OF_SCALE = ("summed", "averaged_twice", "gradient_scale")  # causes that are reported beside any other finding
EXPLAIN = ("beginning", "apart", "clipped_apart", "groups")  # findings of which a difference to one process may come
OF_STEP = {"step": ("setting",)}  # and of which another step along the same gradients may come


@dataclass(frozen=True)
class Finding:
    """A difference with its cause and a remedy (`do`); `line` is the line of the script, as file:line."""

    kind: str
    level: str
    says: str
    do: str = ""
    line: str = ""
    step: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether the same model is trained; `distance` and `floor` are shares of the total update."""

    answer: str
    reason: str
    findings: list[Finding]
    distance: float | None = None
    floor: float | None = None
    table: list[dict] = field(default_factory=list)
    compared_in: int | None = None  # the step, from 1, that `parameters` is about
    # Each parameter in the model's order: `name`; `ratio` of its gradient's norm to that on one process; `distance` of
    # the gradients and what rounding alone makes (`floor`), as shares of the gradient; and whether they differ.
    parameters: list[dict] = field(default_factory=list)


def between_ranks(recorded: Recording) -> list[Finding]:
    """The findings from the ranks of one recording alone, without a replay."""
    (recorded,) = _alike_beside(recorded)
    if divided(recorded) == STAGES:  # each rank trains other parameters, and few of them read samples
        return []
    checks = [_other_beginning, _of_each_rank, _same_samples, _divided_otherwise, _a_step_later, _handed_out, _drifting]
    checks += [_not_cleared, _clipped_while_scaled, _clipped_apart, _no_gradient, _every_micro_batch, _one_device]
    checks += [_same_random_numbers, _without_gradient, _saved_as_module, _evaluating]
    return [finding for check in checks for finding in check(recorded)]


def divided(recorded: Recording) -> str | None:
    """What divides the model's layers among ranks; None if each rank has all of them."""
    return next((rank["initial"]["divided"] for rank in recorded.ranks if rank["initial"]["divided"]), None)


def incomparable(recorded: Recording) -> str:
    """Why a recording can't be compared with one process; empty if it can."""
    if recorded.world == 1 and not recorded.ranks[0]["initial"]["data_parallel"]:
        return "the command trained in one process, so there are no ranks to compare; was its launcher told how many?"
    steps = [step for rank in recorded.ranks for step in rank["steps"]]
    moved = any(rank["steps"][-1]["hashes"] != rank["initial"]["hashes"] for rank in recorded.ranks)
    if not moved and not any(step["gradients"] for step in steps):
        return "no step changed any weight, as no parameter had a gradient when the optimizer stepped"
    if not moved:
        return "no step changed any weight, though there are gradients: does the optimizer hold the model's weights?"
    if own := own_parameters(*_alike_beside(recorded)):
        return f"ranks hold parameters of their own ({_listed(own)}), which one process can't be given"
    by = divided(recorded)
    return f"ranks hold parts of the model's layers ({by}), which one process can't be given" if by else ""


def own_parameters(recorded: Recording) -> list[str]:
    """The parameters that differ between ranks by design, such as the experts of a mixture.

    The script tells DistributedDataParallel or the like to leave them out. Or they differ between ranks at first, and
    are not averaged in the first step, while all others are equal and averaged: a mistake would hardly affect the same
    few in both ways. Or ranks divide layers by hand, so that they have other shapes, or each rank lacks some names.
    """
    hashes = [rank["initial"]["hashes"] for rank in recorded.ranks]
    if recorded.world == 1 or divided(recorded):
        return []
    every = {name: None for each in hashes for name in each}
    if not any(each.keys() == every.keys() for each in hashes):
        return [name for name in every if any(name not in each for each in hashes)]
    shapes = [rank["initial"].get("shapes", {}) for rank in recorded.ranks]
    if parts := [name for name in every if any(each.get(name) != shapes[0].get(name) for each in shapes)]:
        return [name for name in parts if all(name in each for each in shapes)]
    if any(each.keys() != hashes[0].keys() for each in hashes):
        return []
    last = [rank["steps"][recorded.steps - 1]["hashes"] for rank in recorded.ranks]
    begun, ended = ({name for name in hashes[0] if len({at.get(name) for at in each}) > 1} for each in (hashes, last))
    marked = set(recorded.ranks[0]["initial"].get("not_averaged", ()))
    gradients = [rank["steps"][0]["gradients"] for rank in recorded.ranks]
    averaged = {name for name, mine in gradients[0].items() if all(_alike(mine, each.get(name)) for each in gradients)}
    unlike, others = begun - marked, gradients[0].keys() - begun - marked
    some = bool(others) and others <= averaged and unlike.isdisjoint(averaged) and unlike <= set().union(*gradients)
    own = marked & (begun | ended) | (unlike if some else set())
    return [name for name in hashes[0] if name in own]


def draws(recorded: Recording) -> bool:
    """Whether a model draws random numbers in training, as one that skips some of its layers does."""
    return any(rank["notes"].get("draws") for rank in recorded.ranks)


def takes_more_batches(recorded: Recording, alone: Recording) -> bool:
    """Whether one process takes as many batches for a step as all ranks together.

    A script does so if it is given the size of a step and divides it by the number of ranks.
    """
    here, there = (len(each.ranks[0]["steps"][0]["calls"]) for each in (recorded, alone))
    return recorded.world > 1 and there == recorded.world * here


def against_one(recorded: Recording, alone: Recording, floor: Recording) -> Verdict:
    """Compare a recording with its replay by one process; `floor` is the replay with each batch reversed."""
    found = between_ranks(recorded)
    recorded, alone, floor = _alike_beside(_with_mean_gradients(recorded), alone, floor)
    if shorter := next((each for each in (alone, floor) if each.steps < recorded.steps), None):
        how = f"as one process it ended after {shorter.steps} of {recorded.steps} steps: {shorter.last_words}"
        return untold(how, found)
    steps = recorded.steps
    if (at := not_finite(recorded)) and not_finite(alone) == at:
        return untold(f"in step {at} weights become infinite or NaN, with several ranks and with one", found)
    if Counter(_union(alone, 0)) != Counter(_union(floor, 0)):
        reason = (
            "two runs as one process train other samples, as where a collator draws from a generator of its own, or the"
            " loop changes them by chance"
        )
        return untold(reason, found)
    if other_data := _other_data(recorded, alone):
        if any(all(map(goes_through_all, same)) for same in _that_train(recorded)):
            reason = "each rank goes through all of a data set of its own, and one process has rank 0's only"
            return untold(reason, found)
        if any(_same_in_part(rank, alone.ranks[0]) for rank in recorded.ranks):
            reason = (
                "under the same numbers ranks have samples of which a part is alike, as labels, and the rest is not, as"
                " where a data set draws its augmentation by rank, which one process can't do"
            )
            return untold(reason, found)
        return Verdict(DIFFERENT, other_data.says, [other_data, *found])
    other = _other_samples(recorded, alone, steps)
    found += _parts_by_hand(recorded, proven=not other)
    if other:
        return untold(other, found)
    if _other_names(recorded, alone):
        return untold("on one process the script trains parameters of other names or shapes", found)
    if not _initial_distance(recorded, alone) <= SMALLEST_ELSE:
        mine, its = (each.ranks[0]["initial"]["hashes"] for each in (recorded, alone))
        names = [name for name in mine if mine[name] != its[name]]
        return untold(f"one process begins with other weights, which it could not be given: {_listed(names)}", found)
    distances = [_distance(recorded, alone, step) for step in range(steps)]
    floors = [_distance(alone, floor, step) for step in range(steps)]
    table = [
        {
            "step": step + 1,
            "samples": [len(_rows(rank["steps"][step])) for rank in recorded.ranks],
            "loss": _mean_loss(recorded, step),
            "loss_alone": _mean_loss(alone, step),
            "gradient": _gradient_ratio(recorded, alone, step),
            "rate": recorded.ranks[0]["steps"][step]["rates"][0],
            "distance": distances[step],
            "floor": floors[step],
        }
        for step in range(steps)
    ]
    found += _other_rates(recorded, alone, steps)
    found += _other_options(recorded, alone)
    smallest = _smallest(recorded)
    first = next(
        (step for step in range(steps) if not distances[step] <= ABOVE_FLOOR * max(floors[step], smallest)), None
    )
    sides = recorded, alone, floor
    gradient = next((step for step in range(steps) if _any_gradient_differs(*sides, step)), None)
    in_every_step = all(not mine <= ABOVE_FLOOR * floor for mine, floor in zip(distances, floors, strict=True))
    # The first gradient is of equal weights, so that rounding has not grown yet.
    of_first = (differs(*sides, 0) for differs in (_gradient_differs, _size_differs, _clips_otherwise))
    at_once = not draws(recorded) and any(of_first)
    if ABOVE_FLOOR * floors[-1] > TOO_HIGH and not in_every_step and not at_once:
        reason = (
            f"two runs as one process differ by {floors[-1]:.1%} of what training changes: the model draws random"
            " numbers, rounding grows fast, or the script resumes from files of an earlier run"
        )
        return untold(reason, found, distances[-1], floors[-1], table)
    if first is None and gradient is None:
        wrong = wrong_of(found)
        if not wrong and (reason := size_unknown(recorded, alone)):
            return untold(reason, found, distances[-1], floors[-1], table)
        if len(ends := {len(rank["steps"]) for rank in recorded.ranks}) > 1 and not wrong:  # as within join()
            counts = _listed(map(str, sorted(ends)))
            reason = f"ranks end after {counts} steps; only the first {steps}, which are the same, can be compared"
            return untold(reason, found, distances[-1], floors[-1], table)
        within = f" within {ABOVE_FLOOR * max(floors[-1], smallest):.1g} of what training changed"
        reason = wrong[0].says if wrong else f"{steps} steps on the same samples came to the same weights,{within}"
        parameters = _by_parameter(recorded, alone, floor, 0)
        answer = DIFFERENT if wrong else EQUAL
        found += _judged_coarsely(smallest)
        return Verdict(answer, reason, found, distances[-1], floors[-1], table, 1, parameters)
    at = min(step for step in (first, gradient) if step is not None)
    cause = _cause(recorded, alone, floor, at, gradient == at)
    if cause.kind in OF_SCALE:
        found.append(cause)
    elif not any(finding.kind in (*EXPLAIN, *OF_STEP.get(cause.kind, ())) for finding in found):
        found.insert(0, cause)
    reason, parameters = wrong_of(found)[0].says, _by_parameter(recorded, alone, floor, at)
    return Verdict(DIFFERENT, reason, found, distances[-1], floors[-1], table, at + 1, parameters)


def may_be_of_a_sum(verdict: Verdict, recorded: Recording, alone: Recording) -> bool:
    """Whether a gradient that seems to be divided by the number of ranks twice may only be that of a sum over samples.

    That of twice the samples is twice as large, as the loss itself is. A division by the number of ranks looks alike.
    """
    if "averaged_twice" not in {finding.kind for finding in verdict.findings}:
        return False
    mine, its = _mean_loss(recorded, 0), _mean_loss(alone, 0)
    return bool(mine and its and np.isclose(its / mine, recorded.world, rtol=0.02))


def unless_of_a_sum(verdict: Verdict, recorded: Recording, in_turn: Recording) -> Verdict:
    """The verdict, but "not told" if the loss of rank 0's first batch by itself does not depend on the number of ranks.

    in_turn: a replay that gets the ranks' batches one after the other. With a loss that is a sum over samples, or such
    a sum divided by a fixed number, larger batches mean larger steps, so one process is no measure.
    """
    mine, its = (each.ranks[0]["steps"][0]["losses"] for each in (recorded, in_turn))
    if not (mine and its and np.isclose(mine[0], its[0], rtol=SAME_SIZE, atol=0)):
        return verdict
    reason = (
        "the loss is a sum over samples, or a sum divided by a fixed number, so that one process, whose batches are"
        f" {recorded.world} times as large, takes larger steps; divide by the number of samples in the batch"
    )
    found = [finding for finding in verdict.findings if finding.kind != "averaged_twice"]
    return untold(
        reason, found, verdict.distance, verdict.floor, verdict.table, verdict.compared_in, verdict.parameters
    )


def severity(finding: Finding) -> int:
    """The key that sorts findings: those that mean another model come first."""
    return (DIFFERENT, CAUTION, NOTE).index(finding.level)


def wrong_of(found: list[Finding]) -> list[Finding]:
    """The findings that mean that another model is trained."""
    return [finding for finding in found if finding.level == DIFFERENT]


def untold(reason: str, found: list[Finding], *more) -> Verdict:
    """The verdict if nothing can be compared. Findings from the ranks alone still count."""
    if wrong := wrong_of(found):
        note = Finding("not_compared", NOTE, f"not compared with one process: {reason}")
        return Verdict(DIFFERENT, wrong[0].says, [*found, note], *more)
    return Verdict(UNTOLD, reason, found, *more)


def idle(error: OthersIdle) -> Verdict:
    """The verdict on ranks of which only some step."""
    do = "call optimizer.step() on all ranks: each has a copy of the weights of its own."
    return Verdict(DIFFERENT, str(error), [Finding("idle", DIFFERENT, str(error), do, error.line, 1)])


def rounding_of(alone: Recording, floor: Recording) -> list[tuple[float, float]]:
    """How far rounding alone moves each step's gradient and the weights after it: two replays, one of them reversed."""
    steps = min(alone.steps, floor.steps)
    gradients = [_gradient_distance(floor, alone, step, _common(floor, alone, step)) for step in range(steps)]
    return [(gradients[step], _distance(floor, alone, step)) for step in range(steps)]


def measured(rounding: Callable[[], list[tuple[float, float]]]) -> tuple[list[tuple[float, float]], str]:
    """What `rounding` returns, how far rounding goes in each step, and why that is not known; empty if it is."""
    try:
        steps = rounding()
    except RunFailed as error:
        return [], str(error)
    if max(map(max, steps), default=0.0) in (0.0, np.inf):
        return steps, "reversing its batches changes nothing"
    return steps, ""


def two_scripts(one: Recording, other: Recording, rounding: list[tuple[float, float]] | None = None) -> list[Finding]:
    """What two scripts, each with its own samples, do differently in the first step in which they differ.

    Gradients and weights are compared as long as all samples so far are the same. rounding: for each step, how far
    rounding alone moves the gradient and the weights (rounding_of); without it, they may differ as ranks in half
    precision do.
    """
    found = []
    one, other = map(_with_mean_gradients, (one, other))
    if names := _renamed(one, other):
        other = _with_names(other, names)
        new, old = next((new, old) for old, new in names.items() if new != old)
        found.append(Finding("renamed", NOTE, f"parameters have other names, as {new} for {old}"))
    start = _other_start(one, other)
    found += start
    for step in range(min(one.steps, other.steps)):
        smallest = SMALLEST_ELSE if rounding else _smallest(one)
        floors = rounding[min(step, len(rounding) - 1)] if rounding else (0.0, 0.0)
        limits = [ABOVE_FLOOR * max(smallest, floor) for floor in floors]
        different = _other_step(one, other, step, limits, comparable=not start)
        found += [each for each in different if each.kind not in {earlier.kind for earlier in found}]
        if wrong_of(different):
            break
    for step in range(min(one.steps, other.steps)):
        rates = [each.ranks[0]["steps"][step]["rates"] for each in (one, other)]
        if not _same_value(*(rate[:1] for rate in rates)):
            says = f"learning rate {_number(rates[0][0], 4)} against {_number(rates[1][0], 4)}"
            found.append(Finding("rate", DIFFERENT, says, step=step + 1, line=_line(one, step)))
            break
    return found


def two_commits(one: Recording, other: Recording, rounding: list[tuple[float, float]] | None = None) -> list[Finding]:
    """What a change does differently from its base: as two_scripts, but like with like, and on every rank.

    rounding: as there; without it, gradients and weights must be equal.
    """
    rounding = rounding or [(0.0, 0.0)]
    found = two_scripts(one, other, rounding)
    found += [each for each in other_settings(one, other) if each.kind not in {earlier.kind for earlier in found}]
    found.sort(key=lambda finding: finding.kind == "step")  # after its cause, which a setting is
    if not wrong_of(found):
        found += _other_buffers(one, other, rounding)
    kinds = [sorted(each.ranks[0]["notes"].get("precisions", [])) for each in (one, other)]
    if kinds[0] != kinds[1]:
        says = " against ".join(", ".join(each).replace("torch.", "") for each in kinds)
        found.append(Finding("precision", DIFFERENT, f"they compute in {says}"))
    if one.world != other.world:
        found.append(Finding("world", NOTE, f"{one.world} ranks against {other.world}"))
    elif one.steps != other.steps:
        says = f"training ends after {one.steps} steps, against {other.steps}"
        found.append(Finding("length", DIFFERENT, says))
    elif not wrong_of(found):  # ranks may hold other parts of the model than rank 0
        for rank in range(1, one.world):
            mine, theirs = (replace(each, ranks=[each.ranks[rank]]) for each in (one, other))
            if all(_same_samples_in(mine, theirs, step) for step in range(one.steps)):
                wrong = wrong_of(two_scripts(mine, theirs, rounding))
                found += [replace(each, says=f"rank {rank}: {each.says}") for each in wrong]
    earlier = {(each.kind, each.says) for each in between_ranks(other)}
    return found + [each for each in between_ranks(one) if (each.kind, each.says) not in earlier]


def size_unknown(one: Recording, other: Recording) -> str:
    """Why gradients of different sizes, such as a sum over ranks and a mean, may look the same; empty if they can't."""
    if any(_always_as_large(each) and not _factors(each, 0).size for each in (one, other)):
        return (
            "gradients come to the same norm in each step, as where a script clips them itself, so that a sum over"
            " ranks looks like a mean; clip by torch.nn.utils.clip_grad_norm_, or set a limit that none reaches"
        )
    if not any(_gradient_is_known(one, other, step) for step in range(min(one.steps, other.steps))):
        return "gradients are not seen, and weights alone don't show their size: Adam and clipping hide it"
    return ""


def not_finite(recorded: Recording) -> int | None:
    """The first step, from 1, after which a weight of any rank is not a finite number."""
    for step in range(recorded.steps):
        if not all(np.isfinite(_sketches(rank["steps"][step]["weights"])).all() for rank in recorded.ranks):
            return step + 1
    return None


def _other_start(one: Recording, other: Recording) -> list[Finding]:
    if names := _other_names(one, other):
        return [Finding("parameters", DIFFERENT, f"they train other parameters: {_listed(sorted(names))}")]
    if not _initial_distance(one, other) <= SMALLEST_ELSE:
        return [Finding("beginning", DIFFERENT, "they begin with other weights", "seed both alike.")]
    return []


def other_settings(one: Recording, other: Recording) -> list[Finding]:
    """Which settings of optimizers differ, in the first step with such a difference.

    In so few steps, a setting such as a slightly different weight decay may move weights by less than rounding may.
    Groups of parameters are not compared one by one, since a change may reorder or divide them.
    """
    for step in range(min(one.steps, other.steps)):
        mine, theirs = (_settings(each, step) for each in (one, other))
        found = [
            Finding(
                "rate" if name == "lr" else "setting",
                DIFFERENT,
                f"{'learning rate' if name == 'lr' else name.replace('_', ' ')}"
                f" {_listed(map(_number, mine[name]))} against {_listed(map(_number, theirs[name]))}",
                step=step + 1,
                line=_line(one, step),
            )
            for name in mine
            if name in theirs and not (_among(mine[name], theirs[name]) and _among(theirs[name], mine[name]))
        ]
        if found:
            return found
    return []


def _other_buffers(one: Recording, other: Recording, rounding: list[tuple[float, float]]) -> list[Finding]:
    """Buffers of the same name that differ although the weights do not, as if batch normalisation has another momentum.

    Together, they may differ as much as weights may, relative to how far they have moved. Only rank 0's are compared.
    """
    for step in range(min(one.steps, other.steps)):
        mine, its = (each.ranks[0]["steps"][step].get("buffers", {}) for each in (one, other))
        began = other.ranks[0]["initial"].get("buffers", {})
        names = sorted(mine.keys() & its.keys() & began.keys())
        differing = [name for name in names if not np.array_equal(mine[name], its[name], equal_nan=True)]
        if not differing:  # also where both have a mask of infinities
            continue
        distance = np.linalg.norm([np.subtract(mine[name], its[name])[1:] for name in differing])
        movements = np.nan_to_num([np.subtract(its[name], began[name])[1:] for name in names], posinf=0, neginf=0)
        moved = np.linalg.norm(movements) or np.linalg.norm([its[name][0] for name in differing])
        limit = ABOVE_FLOOR * max(SMALLEST_ELSE, rounding[min(step, len(rounding) - 1)][1])
        if not distance <= limit * moved:
            says = f"the weights are the same, and buffers are not: {_listed(differing)}"
            return [Finding("buffer", DIFFERENT, says, step=step + 1, line=_line(one, step))]
    return []


def _other_options(recorded: Recording, alone: Recording) -> list[Finding]:
    """Which settings of optimizers differ on one process from the first step on, but for the rate (_other_rates)."""
    do = "set it by what does not depend on the number of ranks."
    return [
        replace(each, says=f"{each.says.replace(' against ', ', and ')} on one process", do=do)
        for each in other_settings(recorded.until(1), alone)
        if each.kind == "setting"
    ]


def _settings(recorded: Recording, step: int) -> dict[str, list]:
    """The distinct values of each setting of rank 0's optimizers, over all groups of parameters with gradients."""
    values: dict[str, list] = {}
    for group in recorded.ranks[0]["steps"][step].get("settings", []):
        for name, value in group.items():
            if value is not None and value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: several for name, several in values.items() if several}


def _among(values: list, others: list) -> bool:
    """Whether each value is among the others, up to the rounding of a schedule that is computed in another way."""
    return all(any(_same_value(value, other) for other in others) for value in values)


def _same_value(value, other) -> bool:
    """Whether two values of a setting are the same; a list may hold None, as Adafactor's eps does."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same_value, value, other))
    if any(each is None or isinstance(each, list) for each in (value, other)):
        return value is other
    return bool(np.isclose(value, other, rtol=1e-6, atol=0))


def _number(value, digits: int = 6) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_number, value))})"
    return "none" if value is None else f"{value:.{digits}g}"


def _same_samples_in(one: Recording, other: Recording, step: int) -> bool:
    mine, theirs = (Counter(_union(each, step)) for each in (one, other))
    return mine == theirs


def _other_step(one: Recording, other: Recording, step: int, limits: list[float], *, comparable: bool) -> list[Finding]:
    """What differs in a step. limits: how far its gradients and weights may be apart; comparable: whether both train
    parameters of the same names, from the same weights."""
    of_gradient, of_weights = limits
    mine, theirs = (Counter(_union(each, step)) for each in (one, other))
    line = _line(one, step)
    ratio, names = _gradient_ratio(one, other, step), _common(one, other, step)
    same_gradient = ratio is None or _gradient_distance(one, other, step, names) <= of_gradient
    if ratio is not None and not names:  # only the norm is known
        same_gradient = abs(ratio - 1) <= max(OTHER_SIZE, of_gradient)
    same_weights = comparable and _distance(one, other, step) <= of_weights
    dropouts = [_dropouts(each, step) for each in (one, other)]
    if mine != theirs:
        if ratio is not None and same_gradient and same_weights and mine.total() == theirs.total():
            return [Finding("samples_written", NOTE, "the same samples are given in another form", step=step + 1)]
        shared = (mine & theirs).total()
        says = f"{mine.total()} samples against {theirs.total()}, {shared} shared"
        return [Finding("samples", DIFFERENT, says, step=step + 1, line=_call_line(one, step))]
    if dropouts[0] != dropouts[1]:
        says = " against ".join(_listed(f"{p:g}" for p in sorted(set(each))) or "none" for each in dropouts)
        return [Finding("dropout", DIFFERENT, f"dropout with other probabilities: {says}", step=step + 1, line=line)]
    if not comparable:
        return []
    differing = [] if same_gradient and same_weights else _other_gradients(one, other, step, of_gradient)
    if differing:
        name, times = differing[-1]
        how = f"{times:.4g} times as large" if times is not None else "which has none in the other"
        if times is not None and abs(times - 1) < SAME_SIZE:
            how = "in another direction"
        weights = in_weights(len(differing), len(names), name)
        says = f"on the same samples the gradient differs in {weights}, {how}"
        return [Finding("gradient", DIFFERENT, says, step=step + 1, line=line)]
    if not same_gradient:
        says = f"on the same samples the gradient is {ratio:.4g} times as large"
        return [Finding("gradient", DIFFERENT, says, step=step + 1, line=line)]
    if abs((hidden := _hidden_by_clipping(one, other, step)) - 1) > of_gradient:
        says = f"on the same samples the gradient before clipping is {hidden:.4g} times as large"
        return [Finding("gradient", DIFFERENT, says, step=step + 1, line=line)]
    if not same_weights:
        says = "the gradients are the same, and the weights after the step are not"
        return [Finding("step", DIFFERENT, says, step=step + 1, line=line)]
    return []


def _other_gradients(one: Recording, other: Recording, step: int, limit: float) -> list[tuple[str, float | None]]:
    """The weights whose own gradient differs by more than this share of its norm, in the model's order.

    Each has the norm of its gradient divided by the other's, or None if the other's is zero. A gradient that is zero
    but for rounding does not count.
    """
    names = _common(one, other, step)
    least = ROUNDED * float(np.linalg.norm(_gradients(other, step, names)[:, 1:]))
    differing = []
    for name in one.ranks[0]["initial"]["weights"]:
        if name in names:
            mine, its = (_gradients(each, step, {name})[0] for each in (one, other))
            if not np.linalg.norm(mine[1:] - its[1:]) <= max(limit * float(np.linalg.norm(its[1:])), least):
                differing.append((name, float(mine[0] / its[0]) if its[0] else None))
    return differing


def _dropouts(recorded: Recording, step: int) -> list[float]:
    """The probabilities of all dropouts that rank 0 computed in a step; none are noted in compiled code."""
    return sorted(recorded.ranks[0]["steps"][step].get("dropout", []))


# --- Findings from the ranks alone ------------------------------------------------------------------------------


def _other_beginning(recorded: Recording) -> list[Finding]:
    if divided(recorded) == FLAT:
        return []
    first, own = recorded.ranks[0]["initial"], own_parameters(recorded)
    for rank in recorded.ranks[1:]:
        hashes = rank["initial"]["hashes"]
        if hashes.keys() != first["hashes"].keys():
            return []
        if names := [name for name in hashes if hashes[name] != first["hashes"][name] and name not in own]:
            says = f"rank {rank['rank']} begins with other weights than rank 0: {_listed(names)}"
            do = "seed all ranks alike before the model is made, or broadcast rank 0's weights."
            return [Finding("beginning", DIFFERENT, says, do)]
    return []


def _of_each_rank(recorded: Recording) -> list[Finding]:
    if not (own := own_parameters(recorded)):
        return []
    says = f"each rank holds parameters of its own, which are not averaged: {_listed(own)}"
    do = "nothing if ranks divide experts or tables; otherwise begin alike on all ranks, and average."
    return [Finding("own_parameters", CAUTION, says, do)]


def _same_samples(recorded: Recording) -> list[Finding]:
    if recorded.world == 1 or divided(recorded) not in (None, FLAT):
        return []
    if _indices_disjoint(recorded):  # equal samples are then duplicates in the data
        return []
    level, do = DIFFERENT, OWN_PART
    if own_parameters(recorded):
        level, do = (
            CAUTION,
            f"nothing if ranks divide layers, so that each computes a part of each sample; otherwise {do}",
        )
    for step in range(recorded.steps):
        steps = [rank["steps"][step] for rank in recorded.ranks]
        # What else a step's models are called with, as the noise for a generator, may differ by rank.
        models = sorted({call["model"] for call in steps[0]["calls"]}) if _handed_alike(recorded) else []
        for each in [[Counter(_rows(noted, model)) for noted in steps] for model in (None, *models)]:
            if not all(each):
                continue
            union = sum(each, Counter())
            distinct, every = len(union), sum(union.values())
            if all(rows == each[0] for rows in each):
                says = f"every rank trains the same samples: {every}, of which {len(each[0])} are distinct"
                return [Finding("same_samples", level, says, do, _call_line(recorded, step), step + 1)]
            several = [row for row in union if sum(row in rows for rows in each) > 1]
            if len(several) > MANY * distinct:
                says = f"{len(several)} of {distinct} samples are trained by more than one rank"
                return [Finding("shared_samples", level, says, do, _call_line(recorded, step), step + 1)]
    if shared := _always_shared(recorded):
        says = f"{shared} samples are trained by more than one rank in each step"
        return [Finding("shared_samples", level, says, do, _call_line(recorded, 0), 1)]
    return []


def _always_shared(recorded: Recording) -> int:
    """How many samples of each step more than one rank trains, if the number is the same in each step, as if by a rule.

    By chance it would vary. Samples that occur in several steps, such as a constant input, do not count.
    """
    steps = [[set(_rows(rank["steps"][step])) for rank in recorded.ranks] for step in range(recorded.steps)]
    seen_in = Counter(row for ranks in steps for row in set().union(*ranks))
    counts = [
        sum(number > 1 and seen_in[row] == 1 for row, number in Counter(row for rows in ranks for row in rows).items())
        for ranks in steps
    ]
    return counts[0] if len(counts) >= FEW and len(set(counts)) == 1 else 0


def _divided_otherwise(recorded: Recording) -> list[Finding]:
    """Find samplers that divide an epoch among ranks in a different order on each rank, so that their parts overlap."""
    for same in loaders_alike(recorded.ranks):
        if len(same) < recorded.world or not _of_one_data(same) or _has_own_data(recorded, same):
            continue
        if len({len(loader["divisions"]) for loader in same}) > 1:  # one rank has looked at a batch before
            continue
        for divisions in zip(*(loader["divisions"] for loader in same), strict=True):
            if all(each.get("shuffle") is False for each in divisions):  # a seed then has no effect
                continue
            names = dict.fromkeys(name for each in divisions for name in each)
            values = {name: dict.fromkeys(str(each.get(name)) for each in divisions) for name in names}
            if name := next((name for name in names if len(values[name]) > 1), None):
                says = (
                    f"ranks divide an epoch in orders of their own, as their samplers' {name.replace('_', ' ')} is"
                    f" {_listed(values[name])}: some samples are handed out more than once, others never"
                )
                level = DIFFERENT if same[0]["trains"] else CAUTION
                do = "only the sampler's rank may differ between ranks."
                return [Finding("divided_otherwise", level, says, do, _call_line(recorded, 0))]
    return []


def _handed_alike(recorded: Recording) -> bool:
    """Whether a loader gave all ranks the same indices in the same order."""
    return any(
        len(same) == recorded.world and all(loader["batches"][0] == same[0]["batches"][0] for loader in same)
        for same in loaders_alike(recorded.ranks)
        if same[0]["trains"]
    )


def _a_step_later(recorded: Recording) -> list[Finding]:
    """Find a rank whose batches, drawn without a DataLoader, are those of another rank one step later."""
    if any(rank["loaders"] for rank in recorded.ranks) or recorded.steps < 3:
        return []
    rows = [[_rows(step) for step in rank["steps"][: recorded.steps]] for rank in recorded.ranks]
    for rank, late in enumerate(rows):
        for other, early in enumerate(rows):
            if late[1:] == early[:-1] and all(late) and late[0] != early[0]:
                says = f"rank {rank} trains in each step what rank {other} has trained in the step before"
                do = "seed by step * ranks + rank, not by step + rank."
                return [Finding("step_later", CAUTION, says, do, _call_line(recorded, 1), 2)]
    return []


def _indices_disjoint(recorded: Recording) -> bool:
    """Whether no loader gave two ranks the same index at the same position; equal samples are then duplicates."""
    loaders = [same for same in loaders_alike(recorded.ranks) if len(same) == recorded.world and _of_one_data(same)]
    every = [indices for same in loaders for indices in _at_once(same)]
    return bool(loaders) and all(len(indices) == len(set(indices)) for indices in every)


def _at_once(loaders: list[dict]) -> list[list[int]]:
    """The indices that all ranks get at the same position, or those of an epoch if rank 0 draws for all ranks."""
    if loaders[0]["dispatched"]:
        return [_flat(epoch) for epoch in loaders[0]["batches"]]
    epochs = zip(*(loader["batches"] for loader in loaders), strict=False)
    return [_flat(turn) for epoch in epochs for turn in zip(*epoch, strict=False)]


def _that_train(recorded: Recording) -> list[list[dict]]:
    """The loaders of training samples, each with its counterparts on all ranks."""
    return [same for same in loaders_alike(recorded.ranks) if len(same) == recorded.world and same[0]["trains"]]


def _has_own_data(recorded: Recording, loaders: list[dict]) -> bool:
    """Whether ranks got different samples for the same indices, as if each reads a file of its own."""
    shared = _rows_of_both(recorded, loaders)
    return bool(shared) and all(mine != its for mine, its in shared)


def _has_the_same_data(recorded: Recording, loaders: list[dict]) -> bool:
    """Whether ranks got the same samples under the same indices, as far as they got any of these."""
    shared = _rows_of_both(recorded, loaders)
    return bool(shared) and all(mine == its for mine, its in shared)


def _rows_of_both(recorded: Recording, loaders: list[dict]) -> list[tuple[str, str]]:
    """What each index was to rank 0 and to another rank, for all indices that both got in their first epochs."""
    if len(loaders) < recorded.world or recorded.world == 1:
        return []
    rows = [_row_of_index(rank, loader) for rank, loader in zip(recorded.ranks, loaders, strict=True)]
    return [(row, each[index]) for each in rows[1:] for index, row in rows[0].items() if index in each]


def _row_of_index(rank: dict, loader: dict) -> dict[int, str]:
    """The sample of each index in a rank's first epoch, if its model was called once with each batch."""
    calls = [call["rows"] for step in rank["steps"] for call in step["calls"]]
    pairs = [pair for pair in zip(loader["batches"][0], calls, strict=False) if len(pair[0]) == len(pair[1])]
    return {index: row for batch, rows in pairs for index, row in zip(batch, rows, strict=True)}


def _of_one_data(loaders: list[dict]) -> bool:
    """Whether the loaders of all ranks have the same data, so that an index means the same sample on each."""
    return len({loader["subset"] for loader in loaders}) == 1


def _handed_out(recorded: Recording) -> list[Finding]:
    """Find samples twice within an epoch, epochs that do not cover the data, and epochs in the same order."""
    found = []
    for same in loaders_alike(recorded.ranks):
        first = same[0]
        if first["size"] is None:  # a data set need not tell it, if its sampler knows its indices
            continue
        evaluates = first["evaluates"] and not first["trains"]
        epochs = [] if evaluates else [epoch for epoch in first.get("own", first)["batches"] if len(epoch) > 1]
        if len(epochs) > 1 and _shuffled(epochs[0]) and epochs[0][: len(epochs[1])] == epochs[1][: len(epochs[0])]:
            do = "call sampler.set_epoch(epoch) before each epoch."
            found.append(Finding("same_order", CAUTION, "each epoch has the same order", do))
        ranks_alike = recorded.world > 1 and all(each["batches"][:1] == first["batches"][:1] for each in same)
        of_each = [_flat(each["batches"][0]) for each in same]
        if evaluates and (lost := _dropped(same, recorded.world)):
            says = f"an evaluation leaves out {lost} of {first['size']} samples, since drop_last is set"
            found.append(Finding("left_out", CAUTION, says, "leave drop_last=True out where a metric is computed."))
        of_one_rank = any(len(indices) != len(set(indices)) for indices in of_each)
        by_itself = first["repeats"] or (of_one_rank and not _at_the_end(same))
        if first["trains"] and _has_own_data(recorded, same):
            continue
        if ranks_alike or by_itself or not _of_one_data(same) or len(same) < recorded.world:
            continue
        together = _flat(of_each)
        again = len(together) - len(set(together)) + first.get("filled", 0)
        if again and evaluates and first.get("left_out"):
            continue
        if again:
            within = "an evaluation; a metric over all ranks counts them twice, unless it leaves them out"
            within = within if evaluates else "an epoch"
            says = f"{again} of {first['size']} samples are handed out more than once within {within}"
            padded = again < recorded.world or _at_the_end(same)
            do = (
                "a sampler repeats some so that all ranks have the same number; drop_last=True leaves them out instead."
            )
            found.append(Finding("repeated", CAUTION, says, do if padded else OWN_PART))
            continue
        if recorded.world == 1 or not first["length"]:
            continue
        handed = sum((each["length"] or 0) * len(each["batches"][0][0]) for each in same if each["batches"][0])
        meant, whose = _meant(same)
        says = f"an epoch of all ranks hands out {handed} samples, and {whose} {meant}"
        if handed > 1.4 * meant:
            do = "each rank goes through all of the data; if that is not intended, divide it among the ranks."
            found.append(Finding("epoch_too_long", CAUTION, says, do))
        elif max(handed, len(together)) < 0.6 * meant:
            found.append(Finding("epoch_too_short", CAUTION, says, "was the sampler told the right number of ranks?"))
    return found


def _parts_by_hand(recorded: Recording, proven: bool) -> list[Finding]:
    """Find parts into which a script divided its data by itself, and that overlap, or leave out samples.

    All ranks must have the same data. That is `proven` if one process has trained on the same samples; otherwise
    samples that several ranks have trained must show it.
    """
    found = []
    for same in loaders_alike(recorded.ranks):
        first, world, line = same[0], recorded.world, _call_line(recorded, 0)
        if not first.get("divided") or not (proven or _has_the_same_data(recorded, same)):
            continue
        size, parts = first["size"], [recorded.indices(loader) for loader in same]
        ranks = np.bincount(np.concatenate(parts), minlength=size)  # of each sample, how many have it
        shared, lost = int((ranks > 1).sum()), int((ranks == 0).sum())
        evaluates = first["evaluates"] and not first["trains"]
        steps = {int(step) for part in parts for step in np.unique(np.diff(part))}
        if shared:
            none = _in_no_part(recorded, size)
            says = f"{shared} of {size} samples are in the parts of more than one rank, and {none} in none"
            # Otherwise it may be meant, as to have as many on each rank, or more of a rare kind.
            level = DIFFERENT if min(shared, none) >= world and not evaluates else CAUTION
            do = "all ranks must divide the same order, as by range(rank, len(data), ranks)."
            found.append(Finding("divided_otherwise", level, says, do, line))
        elif evaluates and 0 < lost < world:
            says = f"an evaluation leaves out {lost} of {size} samples, as all ranks have as many"
            do = "let one rank have more where a metric is computed, as by range(rank, len(data), ranks)."
            found.append(Finding("left_out", CAUTION, says, do))
        elif len(steps) == 1 and min(steps) > world and _in_no_part(recorded, size):
            says = f"{world} ranks take one of {min(steps)} samples each: an epoch hands out {size - lost} of {size}"
            found.append(Finding("epoch_too_short", CAUTION, says, "was the script told the right number of ranks?"))
    return found


def _in_no_part(recorded: Recording, size: int) -> int:
    """How many samples of data of this size are in no part of it for which any rank has a loader."""
    loaders = [loader for rank in recorded.ranks for loader in rank["loaders"] if loader.get("part")]
    parts = [recorded.indices(loader) for loader in loaders if loader["part"]["size"] == size]
    return size - len(np.unique(np.concatenate(parts)))


def _meant(loaders: list[dict]) -> tuple[int, str]:
    """How many samples an epoch of all ranks should have, and where that number comes from, in words."""
    chosen = [loader.get("chosen") for loader in loaders]
    if not all(chosen):
        return loaders[0]["size"], "the data has"
    alike = len({digest for _, digest in chosen}) == 1
    return chosen[0][0] if alike else sum(count for count, _ in chosen), "samplers were given"


def _dropped(loaders: list[dict], world: int) -> int:
    """The number of samples that drop_last leaves out of a whole epoch; 0 if that can't be told."""
    if len(loaders) < world or not (loaders[0].get("drop_last") and _whole(loaders) and _of_one_data(loaders)):
        return 0
    each = [_flat(loader["batches"][0]) for loader in loaders]
    # A batch of each rank, and what the ranks can't divide; more is left out on purpose.
    most = sum(len(batch) for loader in loaders for batch in loader["batches"][0][:1]) + world
    lost = loaders[0]["size"] - len(set(_flat(each)))
    return lost if lost < most else 0


def _whole(loaders: list[dict]) -> bool:
    """Whether all of each rank's first epoch was recorded."""
    return all(len(loader["batches"][0]) == loader["length"] for loader in loaders)


def _at_the_end(loaders: list[dict]) -> bool:
    """Whether only the last batches of an epoch repeat samples, as if a sampler pads them."""
    epochs = [loader["batches"][0] for loader in loaders]
    earlier = _flat([_flat(epoch[:-1]) for epoch in epochs])
    return _whole(loaders) and len(earlier) == len(set(earlier))


def _flat(batches: list) -> list[int]:
    return [index for batch in batches for index in batch]


def _shuffled(batches: list) -> bool:
    return _flat(batches) != sorted(_flat(batches))


def _drifting(recorded: Recording) -> list[Finding]:
    """Find ranks whose weights were equal at the beginning, and differ later, or that step at rates of their own.

    Of a sharded model each rank notes the whole weights, in which rates of their own don't show, as each rank updates
    another part. Where ranks divide layers, only rates are compared, as what they compute twice may be rounded apart.
    """
    if recorded.world == 1 or _other_beginning(recorded):
        return []
    in_parts, own = divided(recorded) is not None, own_parameters(recorded)
    for step in range(recorded.steps):
        first = recorded.ranks[0]["steps"][step]
        for rank in recorded.ranks[1:]:
            hashes = rank["steps"][step]["hashes"]
            names = [name for name in hashes if hashes[name] != first["hashes"].get(name) and name not in own]
            names = [] if in_parts else names
            rates = [each["rates"] for each in (first, rank["steps"][step])]
            other_rates = len(rates[0]) == len(rates[1]) and not _same_value(*rates)
            if not names and not other_rates:
                continue
            gradients = rank["steps"][step]["gradients"]
            differing = [name for name in gradients if not _alike(gradients[name], first["gradients"].get(name))]
            theirs = [name for name in differing if name not in own]
            if theirs and names:
                says = f"gradients are not averaged over ranks, so their weights drift apart: {_listed(theirs)}"
                do = (
                    "call the wrapped model (DistributedDataParallel's), not the one inside it; or all-reduce them."
                    " Local SGD drifts by design."
                )
            elif other_rates:
                says, do = "ranks step with different learning rates", "schedule by what all ranks share."
            else:
                says = f"weights of rank {rank['rank']} drift apart from rank 0's: {_listed(names)}"
                do = "all ranks must take the same step: look for what only one of them does."
            return [Finding("apart", DIFFERENT, says, do, _line(recorded, step), step + 1)]
    return []


def _not_cleared(recorded: Recording) -> list[Finding]:
    about = recorded.ranks[0]["notes"].get("not_cleared")
    if not about:
        return []
    says = "gradients of the step before are not cleared, so new ones are added to them"
    do = "call optimizer.zero_grad() once a step. One process makes the same mistake, so comparing does not show it."
    return [Finding("not_cleared", DIFFERENT, says, do, about["line"], about["step"])]


def _clipped_while_scaled(recorded: Recording) -> list[Finding]:
    about = recorded.ranks[0]["notes"].get("clipped_while_scaled")
    if not about:
        return []
    says = "gradients are clipped while they are still multiplied by GradScaler's scale"
    return [
        Finding(
            *("clipped_while_scaled", DIFFERENT, says, "call scaler.unscale_(optimizer) before clip_grad_norm_."),
            *(about["line"], about["step"]),
        )
    ]


def _clipped_apart(recorded: Recording) -> list[Finding]:
    """Find ranks that clip by different factors, although all of them step along the same gradients in the end."""
    if divided(recorded):
        return []
    for step in range(recorded.steps):
        first, *others = (rank["steps"][step] for rank in recorded.ranks)
        factors = [each.get("factors", []) for each in (first, *others)]
        together = bool(first["gradients"]) and all(
            each["gradients"].keys() == first["gradients"].keys()
            and all(_alike(gradient, first["gradients"][name]) for name, gradient in each["gradients"].items())
            for each in others
        )
        as_often = len(set(map(len, factors))) == 1
        if together and as_often and not np.allclose(factors, factors[0], rtol=1e-3, atol=0, equal_nan=True):
            says = "each rank clips by the norm of its own gradients, before they are averaged"
            do = "clip after they are averaged over ranks, by the norm of all of them."
            return [Finding("clipped_apart", DIFFERENT, says, do, first["clip"][0], step + 1)]
    return []


def _no_gradient(recorded: Recording) -> list[Finding]:
    steps = recorded.ranks[0]["steps"][: recorded.steps]
    norms = [[sketch[0] for sketch in step["gradients"].values()] for step in steps]
    if not all(norms) or any(map(any, norms)):
        return []
    says = "every gradient is zero in each step, so nothing is learnt"
    do = "check the loss: it may not depend on the weights, as cross-entropy over a single class does not."
    return [Finding("no_gradient", CAUTION, says, do, steps[0].get("backward_line", ""), 1)]


def _evaluating(recorded: Recording) -> list[Finding]:
    """Find ranks that train with layers in evaluation mode, as after a validation on rank 0 only."""
    names_of_each = [rank["initial"]["hashes"].keys() for rank in recorded.ranks]
    if any(names != names_of_each[0] for names in names_of_each):  # each may have other layers
        return []
    for step in range(recorded.steps):
        calls = [rank["steps"][step]["calls"] for rank in recorded.ranks]
        for each in zip(*calls, strict=False) if len(set(map(len, calls))) == 1 else ():
            off = [set(call.get("evaluating", ())) for call in each]
            if len({call["model"] for call in each}) > 1 or all(names == off[0] for names in off):
                continue
            rank = max(range(len(off)), key=lambda place: len(off[place]))
            names = sorted(off[rank] - set.intersection(*off))
            says = f"rank {rank} trains with layers in evaluation mode, unlike other ranks: {_listed(names)}"
            do = "call model.train() on it after its evaluation: dropout and batch normalisation depend on it."
            return [Finding("evaluating", DIFFERENT, says, do, each[rank]["line"], step + 1)]
    return []


def _every_micro_batch(recorded: Recording) -> list[Finding]:
    for step, noted in enumerate(recorded.ranks[0]["steps"][: recorded.steps]):
        of_one_model = len({call["model"] for call in noted["calls"]}) == 1
        early = [call for call in noted["calls"][:-1] if call["synchronised"]]
        # Each must have a backward pass of its own: others are several views of a batch, or evaluations of a closure.
        in_turn = len(noted["losses"]) == len(noted["calls"]) and noted.get("evaluations", 1) == 1
        if early and of_one_model and in_turn and recorded.world > 1:
            says = f"gradients are averaged over ranks in each of {len(noted['calls'])} micro-batches: time, no error"
            do = "enter model.no_sync() in all but the last."
            return [Finding("every_micro_batch", NOTE, says, do, early[0]["line"], step + 1)]
    return []


def _one_device(recorded: Recording) -> list[Finding]:
    devices = [rank["initial"]["devices"] for rank in recorded.ranks]
    if recorded.world > 1 and devices[0] != ["cpu"] and all(each == devices[0] for each in devices):
        says = f"all {recorded.world} ranks compute on {', '.join(devices[0])}"
        return [Finding("one_device", CAUTION, says, "call torch.cuda.set_device(local_rank) first.")]
    return []


def _same_random_numbers(recorded: Recording) -> list[Finding]:
    if recorded.world == 1:
        return []
    states = [(rank["initial"]["random"], rank["notes"].get("drawing")) for rank in recorded.ranks]
    of_model, of_samples = (len(set(each)) == 1 for each in zip(*states, strict=True))
    effects = []
    if of_model and recorded.ranks[0]["initial"]["dropout"]:
        effects.append("dropout drops the same units on each")
    if of_samples and (states[0][1] or "").endswith("whatever the index"):
        says = "every rank draws the same samples: they come from random numbers alone, which begin alike on all ranks"
        do = "torch.manual_seed(seed + rank) before the DataLoader, or choose a sample by its index."
        return [Finding("same_samples", DIFFERENT, says, do)]
    if of_samples and states[0][1]:
        effects.append("augmentation changes the samples of each in the same way")
    if not effects:
        return []
    says = f"all ranks draw the same random numbers: {', and '.join(effects)}"
    return [Finding("random", NOTE, says, "torch.manual_seed(seed + rank), after the model is made.")]


def _without_gradient(recorded: Recording) -> list[Finding]:
    steps = recorded.ranks[0]["steps"][: recorded.steps]
    if not all(step["gradients"] for step in steps) or divided(recorded) == FLAT:
        return []
    first = recorded.ranks[0]["initial"]
    trained = first["hashes"].keys() - first["frozen"]
    never = [name for name in first["hashes"] if name in trained and not any(name in s["gradients"] for s in steps)]
    if not never:
        return []
    return [Finding("without_gradient", NOTE, f"parameters that never get a gradient: {_listed(never)}")]


def _saved_as_module(recorded: Recording) -> list[Finding]:
    about = next(
        (rank["notes"][key] for rank in recorded.ranks for key in ("saved_as_module",) if key in rank["notes"]), None
    )
    if not about:
        return []
    says = f"a checkpoint is saved under names as {about['name']}, which the model alone does not have"
    return [Finding("saved_as_module", NOTE, says, "save model.module.state_dict().", about["line"])]


# --- Against one process ----------------------------------------------------------------------------------------


def _judged_coarsely(smallest: float) -> list[Finding]:
    """Say which differences do not count in half precision, such as those of means over unequal numbers of tokens."""
    if smallest == SMALLEST_ELSE:
        return []
    says = f"in half precision differences of up to {ABOVE_FLOOR * smallest:.2g} of what training changes do not count"
    return [Finding("half_precision", NOTE, says, "run the script once in float32, where far smaller ones are seen.")]


def _other_data(recorded: Recording, alone: Recording) -> Finding | None:
    """Find ranks whose data set has other samples for the same indices than rank 0's, which the replay uses."""
    mine = [Counter(_rows(rank["steps"][0])) for rank in recorded.ranks]
    its = Counter(_union(alone, 0))
    as_many = its.total() == sum(rows.total() for rows in mine)
    if recorded.world == 1 or not as_many or not recorded.ranks[0]["loaders"]:
        return None
    lacking = [rank for rank, rows in enumerate(mine) if not rows & its]
    if mine[0] - its or not lacking or 0 in lacking:
        return None
    says = f"rank {lacking[0]}'s data set holds other samples than rank 0's under the same numbers"
    do = "use the same seed on all ranks for data that is drawn or divided at random, and sort lists of files."
    return Finding("other_data", DIFFERENT, says, do, _call_line(recorded, 0), 1)


def _same_in_part(rank: dict, alone: dict) -> bool:
    """Whether a part of each of a rank's samples is that of one process, and a part is not; not by chance, as far as
    a few samples tell."""
    mine, its = (each.get("parts", {}) for each in (rank, alone))
    pairs = [(mine[key], its[key]) for key in mine.keys() & its.keys() if len(mine[key]) == len(its[key])]
    if len(pairs) < FEW:
        return False
    of_each_part = zip(*(zip(*pair, strict=True) for pair in pairs), strict=False)
    alike = [all(one == other for one, other in part) and len(set(part)) > 1 for part in map(list, of_each_part)]
    return any(alike) and any(one != other for one, other in pairs)


def _other_samples(recorded: Recording, alone: Recording, steps: int) -> str:
    """Why a replay did not train the same samples; empty if it did."""
    if not _union(recorded, 0):  # a later step may train on what models made before it
        return "no batch of samples went into the model as tensors"
    for step in range(steps):
        mine, its = Counter(_union(recorded, step)), Counter(_union(alone, step))
        if mine != its:
            if not recorded.ranks[0]["loaders"]:
                return (
                    "its samples do not come from a DataLoader, and its loss is not the model's own output, so one"
                    " process can't be given those of all ranks"
                )
            says = (
                f"in step {step + 1} one process trained {sum(its.values())} samples, of which"
                f" {sum((mine & its).values())} are among the {sum(mine.values())} of the ranks"
            )
            if any(loader["trains"] and not loader["indexed"] for loader in recorded.ranks[0]["loaders"]):
                says += "; its DataLoader has no indices by which to ask for them (IterableDataset, batch_size=None)"
            return says
    return ""


def _renamed(one: Recording, other: Recording) -> dict[str, str]:
    """The new name (one's) of each parameter of the other; empty unless only names differ.

    Only names differ if both have equally many parameters that begin with the same values in the same order.
    """
    mine, theirs = (each.ranks[0]["initial"]["hashes"] for each in (one, other))
    if list(mine) == list(theirs) or list(mine.values()) != list(theirs.values()):
        return {}
    return dict(zip(theirs, mine, strict=True))


def _with_names(recorded: Recording, names: dict[str, str] | dict[str, None]) -> Recording:
    """A recording with its parameters renamed wherever they occur. Those whose new name is None are left out."""

    def renamed(by_name: dict) -> dict:
        new = {name: names.get(name, name) for name in by_name}
        return {new[name]: value for name, value in by_name.items() if new[name] is not None}

    ranks = []
    for rank in recorded.ranks:
        steps = [
            step | {key: renamed(step[key]) for key in ("weights", "hashes", "gradients") if key in step}
            for step in rank["steps"]
        ]
        initial = rank["initial"] | {key: renamed(rank["initial"][key]) for key in ("weights", "hashes")}
        ranks.append(rank | {"steps": steps, "initial": initial})
    return replace(recorded, ranks=ranks)


def _alike_beside(*recordings: Recording) -> list[Recording]:
    """Recordings without parameters outside the model that begin unlike on ranks, if they are copies of the model's.

    Each rank may hold a part of them. They are copies if no optimizer holds any of the model's own parameters.
    """
    if "unstepped" in recordings[0].ranks[0]["steps"][0]:
        return list(recordings)
    beginnings = [rank["initial"]["hashes"] for recorded in recordings for rank in recorded.ranks]
    beside = {name for hashes in beginnings for name in hashes if BESIDE in name}
    unlike = {name for name in beside if len({hashes.get(name) for hashes in beginnings}) > 1}
    return [_with_names(recorded, dict.fromkeys(unlike)) for recorded in recordings]


def _with_mean_gradients(recorded: Recording) -> Recording:
    """A recording with the mean of all ranks' gradients, where they are averaged only after they were recorded.

    That is so where they differ and the weights after the step do not: an optimizer averages gradients within its
    step, or a script the weights after it. Sketches are linear, so their mean is that of the mean; its norm is not
    known.
    """
    steps = []
    for number, step in enumerate(recorded.ranks[0]["steps"][: recorded.steps]):
        each = [rank["steps"][number] for rank in recorded.ranks]
        same = all(other["hashes"] == step["hashes"] for other in each)
        names = set(step["gradients"]).intersection(*(other["gradients"] for other in each)) if same else set()
        unlike = {
            name
            for name in names
            if not all(_alike(other["gradients"][name], step["gradients"][name]) for other in each)
        }
        means = {name: np.mean([other["gradients"][name] for other in each], axis=0).tolist() for name in unlike}
        steps.append(step | {"gradients": step["gradients"] | means, "averaged_later": bool(unlike)})
    first = recorded.ranks[0] | {"steps": steps + recorded.ranks[0]["steps"][recorded.steps :]}
    return replace(recorded, ranks=[first, *recorded.ranks[1:]])


def _other_names(one: Recording, other: Recording) -> set[str]:
    """The parameters that only one of them trains, in the first step with any."""
    noted = [[each.ranks[0]["initial"], *each.ranks[0]["steps"]] for each in (one, other)]
    each = (mine["weights"].keys() ^ its["weights"].keys() for mine, its in zip(*noted, strict=False))
    return next(filter(None, each), set())


def _other_rates(recorded: Recording, alone: Recording, steps: int) -> list[Finding]:
    """Find learning rates of parameter groups that differ on one process."""
    for step in range(steps):
        mine, its = recorded.ranks[0]["steps"][step]["rates"], _own_rates(alone, step)
        if len(mine) != len(its):
            return [Finding("groups", DIFFERENT, f"{len(mine)} groups of parameters, and {len(its)} on one process")]
        differing = [group for group in range(len(mine)) if not _same_value(mine[group], its[group])]
        if not differing:
            continue
        rate, other, line = mine[differing[0]], its[differing[0]], _line(recorded, step)
        says = f"learning rate {_number(rate, 4)}, and {_number(other, 4)} on one process"
        stepped, once = (
            sum(each.ranks[0]["steps"][at]["schedule_steps"] for at in range(1, step + 1)) for each in (recorded, alone)
        )
        if step == 0 and rate and other and np.isclose(rate / other, recorded.world):
            says += f": it is multiplied by the number of ranks ({recorded.world})"
            do = "nothing if that is intended (the linear scaling rule); otherwise leave the factor out."
            return [Finding("rate_scaled", CAUTION, says, do, line, step + 1)]
        if stepped != once:
            says += f"; the schedule was stepped {stepped} times since the first step, there {once}"
            return [Finding("schedule", DIFFERENT, says, "step it once in each step.", line, step + 1)]
        do = (
            "right if the schedule is planned for this number of ranks; a scheduler that Accelerate prepared is"
            " stepped once for each rank, and must be planned for the steps of one process."
        )
        return [Finding("schedule_planned", CAUTION, says, do, line, step + 1)]
    return []


def _cause(recorded: Recording, alone: Recording, floor: Recording, step: int, of_gradient: bool) -> Finding:
    """The cause of a difference that begins in step `step`, counted from 0."""
    world, line = recorded.world, recorded.ranks[0]["steps"][step].get("backward_line") or _line(recorded, step)
    ratio, hidden = _gradient_ratio(recorded, alone, step), _hidden_by_clipping(recorded, alone, step)
    what = "the gradient before clipping" if hidden != 1 else "the gradient"
    ratio = ratio and ratio * hidden
    counts = [len(_rows(rank["steps"][step])) for rank in recorded.ranks]
    at = {"line": line, "step": step + 1}
    seen = bool(_common(recorded, alone, step))
    if of_gradient and ratio is not None and _same_direction(recorded, alone, step) and abs(ratio - 1) > 1e-3:
        if np.isclose(ratio, world, rtol=0.02):
            says = f"{what} is {ratio:.3g} times what it is on one process: it is summed over ranks, not averaged"
            do = f"divide by the number of ranks ({world})."
            if recorded.ranks[0]["initial"]["trainer"]:
                do = (
                    "a model whose loss is a mean already (a classifier's) needs"
                    " TrainingArguments(average_tokens_across_devices=False); otherwise divide by the number of ranks."
                )
            return Finding("summed", DIFFERENT, says, do, **at)
        if np.isclose(ratio, 1 / world, rtol=0.02):
            says = (
                f"{what} is {ratio:.3g} of what it is on one process: it is divided by the number of ranks twice,"
                " or the loss is a sum over samples"
            )
            do = (
                "DistributedDataParallel averages already: leave the other division out; a loss that is a sum must be"
                f" multiplied by the number of ranks ({world}). A division by a fixed number is right."
            )
            return Finding("averaged_twice", DIFFERENT, says, do, **at)
        if seen:
            says = f"{what} is {ratio:.4g} times what it is on one process"
            do = "check what the loss is divided by: micro-batches, ranks, scale."
            if recorded.ranks[0]["steps"][step]["clip"] and hidden == 1:
                do = "gradients are clipped: clip after they are averaged over ranks, and by the norm of all of them."
            return Finding("gradient_scale", DIFFERENT, says, do, **at)
    of_gradient = of_gradient and seen
    if hook := recorded.ranks[0]["notes"].get("communication"):
        says = f"a communication hook changes what ranks average: {hook}"
        do = "nothing if fewer bytes are worth it; fp16 makes small gradients zero, of which Adam makes whole steps."
        return Finding("communication", DIFFERENT, says, do, **at)
    throughout = not of_gradient or _gradient_differs(recorded, alone, floor, step)
    if throughout and recorded.ranks[0]["initial"]["batch_norm"] and world > 1:
        says = "batch normalisation takes the statistics of each rank's samples alone"
        do = "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), before it is wrapped."
        return Finding("batch_norm", DIFFERENT, says, do, **at)
    if throughout and len(set(counts)) > 1:
        says = f"ranks with {_listed(map(str, counts))} samples count alike: a mean of means is not the mean"
        do = "drop_last=True, or weigh each rank's loss by its samples."
        return Finding("mean_of_means", DIFFERENT, says, do, **at)
    parts = _other_parts(recorded, alone, floor, step) if of_gradient else []
    others = _compared(recorded, alone, floor, step) - set(parts)
    if parts and others and not _gradient_differs(recorded, alone, floor, step, others):
        mine, its = _sizes(recorded, alone, step, parts)
        ratio = mine / max(its, 1e-30)
        how = "has another direction than on one process"
        if abs(ratio - 1) > SAME_SIZE:
            how = f"is {ratio:.3g} times what it is on one process"
        says = f"the gradient of {_listed(parts)} {how}, and those of all others are the same"
        do = "average it over ranks as the others; DistributedDataParallel knows only the parameters that it wraps."
        return Finding("own_gradient", DIFFERENT, says, do, **at)
    if of_gradient:
        lines = _by_parameter(recorded, alone, floor, step)
        name = next((line["name"] for line in lines if line["differs"]), lines[0]["name"])
        says = f"the gradient of {name} is the first to differ from what it is on one process"
        do = "if batches differ in their number of terms (tokens), a mean of means is not the mean."
        return Finding("gradient", DIFFERENT, says, do, **at)
    if not seen and ratio is not None and abs(ratio - 1) > OTHER_SIZE:
        says = f"the norm of the gradient is {ratio:.4g} times what it is on one process"
        return Finding("gradient_scale", DIFFERENT, says, "check what the loss is divided by.", **at)
    if not seen:
        ratio = _update_ratio(recorded, alone, step)
        how = "change the weights otherwise than on one process"
        if ratio is not None:
            how = f"change the weights {ratio:.3g} times as much as on one process"
        says = f"the steps up to here {how}; gradients are not seen in DeepSpeed's engine"
        do = "check what the loss is divided by, and what is clipped; SGD steps in proportion to the gradient."
        return Finding("step", DIFFERENT, says, do, **at)
    if recorded.ranks[0]["steps"][step]["averaged_later"]:
        says = "ranks have other gradients and come to the same weights, but they are not those of the mean gradient"
        do = "average the gradients over ranks before the optimizer steps."
        return Finding("step", DIFFERENT, says, do, line=_line(recorded, step), step=step + 1)
    says = "the gradients are the same, and the weights after the step are not"
    do = "check what happens between backward and step: partial clipping, another optimizer state, weight decay."
    return Finding("step", DIFFERENT, says, do, line=_line(recorded, step), step=step + 1)


# --- Numbers ----------------------------------------------------------------------------------------------------


def _smallest(recorded: Recording) -> float:
    """The floor for the lowest precision in a training, as a share of its update."""
    return max(SMALLEST.get(kind, SMALLEST_ELSE) for kind in recorded.ranks[0]["notes"].get("precisions", ["-"]))


def _rows(step: dict, model: int | None = None) -> list[str]:
    """The samples of a step, or if a model is named by its number, those that it was called with."""
    return [row for call in step["calls"] if model in (None, call["model"]) for row in call["rows"]]


def _union(recorded: Recording, step: int) -> list[str]:
    return [row for rank in recorded.ranks for row in _rows(rank["steps"][step])]


def _own_rates(alone: Recording, step: int) -> list[float | None]:
    noted = alone.ranks[0]["steps"][step]
    return noted.get("own_rates") or noted["rates"]


def _mean_loss(recorded: Recording, step: int) -> float | None:
    """The mean over ranks of the loss that each has differentiated in a step, over all of its micro-batches."""
    losses = [sum(rank["steps"][step]["losses"]) for rank in recorded.ranks if rank["steps"][step]["losses"]]
    return float(np.mean(losses)) if losses else None


def _alike(one: list[float], other: list[float] | None) -> bool:
    known = other is not None and np.isfinite(one[0])
    return bool(known) and np.allclose(one, other, rtol=1e-5, atol=1e-6 * max(one[0], 1e-30))


def _sketches(noted: dict) -> np.ndarray:
    """All sketches as one array: [parameters, 1 + 61], where column 0 is the norm."""
    return np.array([noted[name] for name in sorted(noted)])


def _distance(one: Recording, other: Recording, step: int) -> float:
    """The distance of two recordings' weights after a step, as a share of the update so far."""
    mine, its = (_sketches(each.ranks[0]["steps"][step]["weights"])[:, 1:] for each in (one, other))
    began = _initial_sketches(other, step)
    changed = np.linalg.norm(its - began)
    return float(np.linalg.norm(mine - its) / changed) if changed else float(not np.array_equal(mine, its))


def _initial_sketches(recorded: Recording, step: int) -> np.ndarray:
    """Sketches of the initial weights of those parameters that were trained by this step: [parameters, 61]."""
    names = recorded.ranks[0]["steps"][step]["weights"]
    return _sketches({name: recorded.ranks[0]["initial"]["weights"][name] for name in names})[:, 1:]


def _initial_distance(one: Recording, other: Recording) -> float:
    mine, its = (_sketches(each.ranks[0]["initial"]["weights"])[:, 1:] for each in (one, other))
    return float(np.linalg.norm(mine - its) / max(np.linalg.norm(its), 1e-30))


def _gradients(recorded: Recording, step: int, names: Collection[str]) -> np.ndarray:
    noted = recorded.ranks[0]["steps"][step]["gradients"]
    return np.array([noted[name] for name in sorted(names)]).reshape(-1, 62)


def _common(recorded: Recording, alone: Recording, step: int) -> set[str]:
    """The parameters that both update in a step; a discriminator has gradients in its generator's step, too."""
    mine, its = (each.ranks[0]["steps"][step] for each in (recorded, alone))
    return (mine["gradients"].keys() & its["gradients"].keys()) - set(mine.get("unstepped", ()))


def _compared(recorded: Recording, alone: Recording, floor: Recording, step: int) -> set[str]:
    """The parameters whose gradients are compared in a step; the floor must have them, too."""
    return _common(recorded, alone, step) & floor.ranks[0]["steps"][step]["gradients"].keys()


def _gradient_is_known(recorded: Recording, alone: Recording, step: int) -> bool:
    """Whether a step's gradients were recorded on both sides, or at least their norm."""
    norms = all("norm" in each.ranks[0]["steps"][step] for each in (recorded, alone))
    return norms or bool(_common(recorded, alone, step))


def _gradient_ratio(recorded: Recording, alone: Recording, step: int) -> float | None:
    names = _common(recorded, alone, step)
    if not names:  # of DeepSpeed's ZeRO only the norm is known
        mine, its = (each.ranks[0]["steps"][step].get("norm") for each in (recorded, alone))
        return mine / its if mine and its else None
    mine, its = _sizes(recorded, alone, step, names)
    return mine / its if its else None


def _sizes(one: Recording, other: Recording, step: int, names: Collection[str]) -> list[float]:
    """The norms of two recordings' gradients, or of their sketches where a norm is not known (_with_mean_gradients)."""
    later = any(each.ranks[0]["steps"][step].get("averaged_later") for each in (one, other))
    columns = slice(1, None) if later else slice(0, 1)
    return [float(np.linalg.norm(_gradients(each, step, names)[:, columns])) for each in (one, other)]


def _update_ratio(recorded: Recording, alone: Recording, step: int) -> float | None:
    """How many times as large the update of all steps so far is; None if it goes in another direction."""
    began = _initial_sketches(alone, step)
    mine, its = (
        (_sketches(each.ranks[0]["steps"][step]["weights"])[:, 1:] - began).ravel() for each in (recorded, alone)
    )
    norms = [float(np.linalg.norm(each)) for each in (mine, its)]
    return norms[0] / norms[1] if float(mine @ its) > 0.999 * norms[0] * norms[1] > 0 else None


def _same_direction(recorded: Recording, alone: Recording, step: int) -> bool:
    names = _common(recorded, alone, step)
    if not names:
        return True  # as far as is known
    mine, its = (_gradients(each, step, names)[:, 1:].ravel() for each in (recorded, alone))
    return float(mine @ its) > 0.999 * float(np.linalg.norm(mine) * np.linalg.norm(its))


def _gradient_distance(one: Recording, other: Recording, step: int, names: set[str]) -> float:
    mine, its = (_gradients(each, step, names)[:, 1:] for each in (one, other))
    return float(np.linalg.norm(mine - its) / max(np.linalg.norm(its), 1e-30))


def _gradient_differs(
    recorded: Recording, alone: Recording, floor: Recording, step: int, names: set[str] | None = None
) -> bool:
    """Whether the whole gradient differs, or that of the parameters with these names."""
    names = _compared(recorded, alone, floor, step) if names is None else names
    if not names:
        return False
    rounding = max(_gradient_distance(floor, alone, step, names), _smallest(recorded))
    return not _gradient_distance(recorded, alone, step, names) <= ABOVE_FLOOR * rounding


def _any_gradient_differs(recorded: Recording, alone: Recording, floor: Recording, step: int) -> bool:
    """Whether the gradient differs, as a whole, in a single parameter, or in what clipping has made equal."""
    sides = recorded, alone, floor
    whole = _gradient_differs(*sides, step) or _size_differs(*sides, step)
    return whole or bool(_other_parts(*sides, step)) or _clips_otherwise(*sides, step)


def _size_differs(recorded: Recording, alone: Recording, floor: Recording, step: int) -> bool:
    """Whether the norm differs of gradients of which only the norm is known.

    Unlike a distance, the difference of two norms may be zero by chance; so may the one that is due to rounding.
    """
    if _common(recorded, alone, step):
        return False
    mine, rounding = (_gradient_ratio(each, alone, step) for each in (recorded, floor))
    if mine is None or rounding is None:
        return False
    return abs(mine - 1) > max(OTHER_SIZE, ABOVE_FLOOR * max(abs(rounding - 1), _smallest(recorded)))


def _factors(recorded: Recording, step: int) -> np.ndarray:
    """The factors by which rank 0's gradients were clipped in a step, one for each call."""
    noted = recorded.ranks[0]["steps"][step]
    by_hand = [noted["by_hand"]] if "by_hand" in noted and _always_as_large(recorded) else []
    return np.array(noted.get("factors") or by_hand)


def _always_as_large(recorded: Recording) -> bool:
    """Whether gradients have the same norm in each step, as they have if a script clips them by itself.

    The norm may be that of all parameters that a step updates, or of each of them.
    """
    norms: dict[tuple, list[list[float]]] = {}
    for step in recorded.ranks[0]["steps"][: recorded.steps]:
        names = sorted(step["gradients"].keys() - set(step.get("unstepped", ())))
        if names and not step["clip"]:
            norms.setdefault(tuple(names), []).append([step["gradients"][name][0] for name in names])
    for several in map(np.array, norms.values()):
        for each in (np.linalg.norm(several, axis=1), several):
            if len(several) > 1 and each.any() and np.allclose(each, each[0], rtol=ALWAYS, atol=0):
                return True
    return False


def _clips_otherwise(recorded: Recording, alone: Recording, floor: Recording, step: int) -> bool:
    """Whether clipping uses another factor than on one process, so that different gradients look alike afterwards."""
    mine, its, reversed_ = (_factors(each, step) for each in (recorded, alone, floor))
    if not mine.shape == its.shape == reversed_.shape:
        return False
    names = _compared(recorded, alone, floor, step)
    rounding = max(_smallest(recorded), _gradient_distance(floor, alone, step, names) if names else 0.0)
    least = max(SAME_SIZE, ABOVE_FLOOR * rounding) * its
    return bool((np.abs(mine - its) > np.maximum(least, ABOVE_FLOOR * np.abs(reversed_ - its))).any())


def _hidden_by_clipping(recorded: Recording, alone: Recording, step: int) -> float:
    """How large the gradient was before clipping, relative to that on one process; 1 if the factors do not tell."""
    mine, its = (_factors(each, step) for each in (recorded, alone))
    if not mine.size or mine.shape != its.shape or not mine.all() or not its.all():
        return 1.0
    ratios = its / mine
    alike = np.allclose(ratios, ratios[0], rtol=SAME_SIZE, atol=0) and not np.isclose(ratios[0], 1, rtol=SAME_SIZE)
    return float(ratios[0]) if alike else 1.0


def _other_parts(recorded: Recording, alone: Recording, floor: Recording, step: int) -> list[str]:
    """The parameters whose own gradient differs, however small a share of the whole gradient it is.

    A gradient that is zero but for rounding, such as that of a key's bias in attention, has no direction to differ in.
    In half precision, reversing a batch does not tell how far rounding moves it, so only differences count that the
    whole gradient would show by itself.
    """
    names = sorted(_compared(recorded, alone, floor, step))
    mine, its, reversed_ = (_gradients(each, step, names)[:, 1:] for each in (recorded, alone, floor))
    own, distance, rounding = (np.linalg.norm(each, axis=1) for each in (its, mine - its, reversed_ - its))
    smallest = _smallest(recorded)
    least = np.linalg.norm(its) * (ROUNDED if smallest == SMALLEST_ELSE else ABOVE_FLOOR * smallest)
    differs = distance > np.maximum(np.maximum(PART * own, ABOVE_FLOOR * rounding), least)
    return [name for name, each in zip(names, differs, strict=True) if each]


def _by_parameter(recorded: Recording, alone: Recording, floor: Recording, step: int) -> list[dict]:
    """Each parameter's gradient beside that on one process, in the model's order (Verdict.parameters)."""
    compared = _compared(recorded, alone, floor, step)
    lines = []
    for name in recorded.ranks[0]["initial"]["weights"]:
        if name not in compared:
            continue
        mine, its = _sizes(recorded, alone, step, {name})
        distance = _gradient_distance(recorded, alone, step, {name})
        rounding = _gradient_distance(floor, alone, step, {name})
        differs = distance > ABOVE_FLOOR * max(rounding, _smallest(recorded))
        ratio = mine / its if its else None
        lines.append({"name": name, "ratio": ratio, "distance": distance, "floor": rounding, "differs": differs})
    return lines


def _line(recorded: Recording, step: int) -> str:
    return recorded.ranks[0]["steps"][step].get("line", "")


def _call_line(recorded: Recording, step: int) -> str:
    calls = recorded.ranks[0]["steps"][step]["calls"]
    return calls[0]["line"] if calls else ""
