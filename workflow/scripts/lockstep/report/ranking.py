"""Places, speed-ups and ratios: how the rows' times compare, and what the runs can show."""

from collections.abc import Callable
from dataclasses import asdict

from lockstep import stats
from lockstep.config.configuration import Config
from lockstep.config.hardware import cores_of, device_count
from lockstep.proof.verdicts import WRONG
from lockstep.report.reading import Run, good_runs, trusted

BASELINE = "single"  # the strategy of the row that all others of its kind are compared with: the first one


def compare(rows: list[dict], runs: dict[str, list[Run]], config: Config) -> tuple[dict, dict | None, list[str]]:
    """Fill in places, and speed-ups over the baseline; return ratios, statistics and unconnected rows.

    The ratios are those of each row to every other row of its kind; `shown` is whether one of the two is shown to be
    faster when all ranked rows are compared at once, and None unless both are ranked. The statistics describe the kind
    with the most ranked rows: `sigma`, the standard deviation of a row's log times; `resolution`, by which share a row
    must be slower to be shown slower; and whether rows have `unlike_spreads`. They are None if there are too few runs.
    The unconnected rows have no block in common with the others.

    Rows are of one kind if they do the same work on the same kind of device; a row that trains another model is not
    compared. Ranked are rows of the closed division with an undisturbed run. A row whose runs were all disturbed is
    compared with the others, but does not enter the fit by which they are compared. Where the baseline failed, no other
    row takes its place, such as one with other threads: the report's words are about the baseline.
    """
    kinds: dict[tuple, dict[str, dict[stats.Block, float]]] = {}
    baselines: dict[tuple, str] = {}
    for row in rows:
        kind = (row["device"], config.rows[row["row"]].plan_name)
        if row["strategy"] == BASELINE:
            baselines.setdefault(kind, row["row"])
        if row["train_seconds"] is not None and row["proof"] not in WRONG:
            seconds = {stats.block(run): run.clock.train_seconds for run in good_runs(runs[row["row"]])}
            kinds.setdefault(kind, {})[row["row"]] = seconds
    by_name = {row["row"]: row for row in rows}
    ratios: dict[str, dict[str, dict]] = {}
    most, unconnected = None, []
    for kind, members in kinds.items():
        sound = {name: seconds for name, seconds in members.items() if trusted(runs[name])}
        fit = stats.Fit(sound)
        baseline = baselines.get(kind) if baselines.get(kind) in members else None
        closed = _together({name: sound[name] for name in sound if by_name[name]["division"] == "closed"}, baseline)
        ranked = closed.ranks()
        most = max(most, closed, key=lambda fit: len(fit.rows)) if most else closed
        for name in members:
            row = by_name[name]
            row["place"] = row["rank"] = ranked.get(name)
            against = {other: fitted(fit, members, name, other) for other in members}
            ratios[name] = {
                other: asdict(ratio) | {"shown": _shown(closed, name, other)}
                for other, ratio in against.items()
                if ratio
            }
            alone = not any(against[other] for other in closed.rows or members if other != name)
            if alone and len(members) > 1 and name not in closed.rows:
                unconnected.append(name)
            if baseline and (ratio := against[baseline]):
                row["speedup"] = 1 / ratio.value
                if ratio.kind:
                    row["speedup_low"], row["speedup_high"] = 1 / ratio.high, 1 / ratio.low
                row["efficiency"] = row["speedup"] * capacity(runs[baseline]) / capacity(runs[name])
    if not most or most.sigma is None:
        return ratios, None, unconnected
    names = ("sigma", "resolution", "unlike_spreads")
    return ratios, dict(zip(names, (most.sigma, most.resolution(), most.unlike_spreads()), strict=True)), unconnected


def _shown(closed: stats.Fit, ours: str, theirs: str) -> bool | None:
    if not {ours, theirs} <= set(closed.rows):
        return None
    return closed.shown_faster(ours, theirs) or closed.shown_faster(theirs, ours)


def capacity(runs: list[Run]) -> int:
    """The number of GPUs of a row's runs or, on a CPU, of cores, as one process may have several."""
    run = good_runs(runs)[0]
    hardware = run.asked["hardware"]
    return cores_of(hardware, run.environment["cores"]) if hardware["device"] == "cpu" else device_count(hardware)


def _together(seconds: dict[str, dict[stats.Block, float]], baseline: str | None) -> stats.Fit:
    """The fit of the largest group of rows that blocks connect; of equally large groups, the baseline's."""
    fit = stats.Fit(seconds)
    groups = fit.groups()
    largest = max(groups, key=lambda group: (len(group), baseline in group), default=[])
    return fit if len(groups) < 2 else stats.Fit({name: seconds[name] for name in largest})


def fitted(fit: stats.Fit, members: dict[str, dict[stats.Block, float]], ours: str, theirs: str) -> stats.Ratio | None:
    """The ratio of two rows by the `fit` of the undisturbed rows, to which a disturbed one of the two is added."""
    disturbed = {name: members[name] for name in (ours, theirs) if name not in fit.seconds}
    return (stats.Fit(fit.seconds | disturbed) if disturbed else fit).ratio(ours, theirs)


def between(
    rows: list[dict], runs: dict[str, list[Run]], ratios: dict[str, dict[str, dict]]
) -> Callable[[str | None, str | None], dict | None]:
    """A function that returns the ratio of any two rows; None if a row has no results, or no block connects them.

    Ratios are taken from `ratios`. For rows that `compare` does not compare, because they train by other plans, the
    same model is fitted to all rows.
    """
    seconds = {
        row["row"]: {stats.block(run): run.clock.train_seconds for run in good_runs(runs[row["row"]])}
        for row in rows
        if row["train_seconds"] is not None
    }
    sound = {name: times for name, times in seconds.items() if trusted(runs[name])}
    fits: list[stats.Fit] = []

    def told(ours: str | None, theirs: str | None) -> dict | None:
        if ours not in seconds or theirs not in seconds:
            return None
        if known := ratios.get(ours, {}).get(theirs):
            return known
        if not fits:
            fits.append(stats.Fit(sound))
        found = fitted(fits[0], seconds, ours, theirs)
        return asdict(found) if found else None

    return told
