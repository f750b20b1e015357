"""Places, speed-ups and ratios: how the rows' times compare, and what so many runs can tell."""

from collections.abc import Callable
from dataclasses import asdict

from lockstep import stats
from lockstep.config.configuration import Config
from lockstep.config.hardware import device_count
from lockstep.report.reading import good_runs, trusted

BASELINE = "single"  # the strategy of the row that all others are compared with


def compare(rows: list[dict], runs: dict[str, list[dict]], config: Config) -> tuple[dict, dict | None, list[str]]:
    """Fill in ranks, and speed-up over the baseline; return each row's ratios to every other row of its kind.

    And of the ranked rows (of the kind that has most of them) what they can show: `sigma`, the spread of a row's log
    times; `resolution`, how much longer a row must take to be shown slower; whether rows have `unlike_spreads`. And
    the rows that no block connects with the rest.

    Rows are compared that do the same work on the same kind of device. One that was found to train another model is
    not. Of the rest, those are ranked that train by the same recipe, undisturbed. A row whose every run was disturbed
    is compared with the others, but is no part of what they are compared by.
    """
    kinds: dict[tuple, dict[str, dict[stats.Block, float]]] = {}
    for row in rows:
        if row["train_seconds"] is not None and row["proof"] not in ("unequal", "failed"):
            kind = (row["device"], config.rows[row["row"]].plan_name)
            seconds = {stats.block(run): run["clock"]["train_seconds"] for run in good_runs(runs[row["row"]])}
            kinds.setdefault(kind, {})[row["row"]] = seconds
    by_name = {row["row"]: row for row in rows}
    ratios: dict[str, dict[str, dict]] = {}
    most, unconnected = None, []
    for members in kinds.values():
        sound = {name: seconds for name, seconds in members.items() if trusted(runs[name])}
        fit = stats.Fit(sound)
        baseline = next((name for name in members if by_name[name]["strategy"] == BASELINE), None)
        closed = _together({name: sound[name] for name in sound if by_name[name]["division"] == "closed"}, baseline)
        ranked = closed.ranks()
        most = max(most, closed, key=lambda fit: len(fit.rows)) if most else closed
        for name in members:
            row = by_name[name]
            row["place"] = row["rank"] = ranked.get(name)
            against = {other: fitted(fit, members, name, other) for other in members}
            ratios[name] = {other: asdict(ratio) for other, ratio in against.items() if ratio}
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


def capacity(runs: list[dict]) -> int:
    """How many GPUs a row's runs had, or on a CPU how many cores: one process may have several."""
    hardware = good_runs(runs)[0]["asked"]["hardware"]
    return device_count(hardware) * (hardware["threads"] if hardware["device"] == "cpu" else 1)


def _together(seconds: dict[str, dict[stats.Block, float]], baseline: str | None) -> stats.Fit:
    """The fit of the most rows that blocks connect; of two groups as large, of the baseline's."""
    fit = stats.Fit(seconds)
    groups = fit.groups()
    largest = max(groups, key=lambda group: (len(group), baseline in group), default=[])
    return fit if len(groups) < 2 else stats.Fit({name: seconds[name] for name in largest})


def fitted(fit: stats.Fit, members: dict[str, dict[stats.Block, float]], ours: str, theirs: str) -> stats.Ratio | None:
    """The ratio of two rows by the `fit` of all undisturbed ones; a disturbed one is fitted beside those by itself."""
    disturbed = {name: members[name] for name in (ours, theirs) if name not in fit.seconds}
    return (stats.Fit(fit.seconds | disturbed) if disturbed else fit).ratio(ours, theirs)


def between(
    rows: list[dict], runs: dict[str, list[dict]], ratios: dict[str, dict[str, dict]]
) -> Callable[[str | None, str | None], dict | None]:
    """The ratio of any two rows, as `ratios` has it; None where a row has no results, or no blocks tell.

    Rows that `compare` keeps apart, as they train by other plans, have theirs by the same model, fitted to all rows.
    """
    seconds = {
        row["row"]: {stats.block(run): run["clock"]["train_seconds"] for run in good_runs(runs[row["row"]])}
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
