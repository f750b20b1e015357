"""Compares two results folders: the same rows on two machines, by two commits, or with two versions of a library."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep import paths, stats
from lockstep.config.nested import ABSENT, differing, flat
from lockstep.errors import BadInput
from lockstep.files import read_object
from lockstep.proof import fairness
from lockstep.report.reading import good_runs, of_json, trusted
from lockstep.run.record import Tested

# Differences that make two times incomparable. Each can be allowed by its name.
KINDS = ("hardware", "precision", "plan", "weights", "data", "rules")
# Keys of env.json; gpu_details includes the driver. Within one folder the keys in fairness.MACHINE must agree.
SAME_HARDWARE = ("machine", "cpu", "cores", "memory_mb", "gpus", "gpu_details")


@dataclass(frozen=True)
class Line:
    row: str
    ratio: stats.Ratio  # B's time over A's
    seconds: tuple[float, float]
    differs: dict[str, str]  # what differs, by KINDS


@dataclass(frozen=True)
class Comparison:
    lines: list[Line]
    environment: list[str]  # what else differs, one line each
    alone: list[str]  # rows that only one of the two has
    copied: bool = False  # whether both contain the same runs, so that nothing can differ


def compare(first: Path, second: Path, allowed: set[str]) -> Comparison:
    """Compare the rows of two results folders.

    Raises BadInput if the folders differ in a kind that is not `allowed`, or if one breaks a rule of a fair run. All
    runs of both are checked first, because a folder with runs of several machines is not comparable with any other.
    """
    ours, theirs = read_report(first), read_report(second)
    quick = [report.get("config", {}).get("quick", False) for report in (ours, theirs)]
    if quick[0] != quick[1]:
        raise BadInput(
            f"{second if quick[1] else first}: is a first look, which can't be compared with a full benchmark."
        )
    unfair = [what for folder in (first, second) if (what := _breaches(folder))]
    if unfair and "rules" not in allowed:
        raise BadInput(f"{'; '.join(unfair)}. To compare them all the same: --across rules")
    rows = [
        {row["row"]: row for row in report["rows"] if row["train_seconds"] is not None} for report in (ours, theirs)
    ]
    lines, refused = [], {}
    for name in (name for name in rows[0] if name in rows[1]):
        runs = [good_runs(report["runs"][name]) for report in (ours, theirs)]
        differs = differences(runs[0][0], runs[1][0])
        refused |= {kind: f"{name}: {what}" for kind, what in differs.items() if kind not in allowed}
        seconds = [[run.clock.train_seconds for run in several] for several in runs]
        lines.append(Line(name, ratio(theirs, ours, name), tuple(map(np.median, seconds)), differs))
    if refused:
        said = "; ".join(f"{kind} differs ({what})" for kind, what in refused.items())
        asked = " ".join(f"--across {kind}" for kind in refused)
        raise BadInput(f"{first} and {second} can't be compared: {said}. To compare them all the same: {asked}")
    if not lines:
        raise BadInput(f"{first} and {second} have no finished row in common.")
    differs = _environment(ours, theirs) + [what for line in lines for what in _asked(line.row, ours, theirs)]
    copied = all(when(ours, line.row) == when(theirs, line.row) for line in lines)
    return Comparison(lines, unfair + differs, sorted(rows[0].keys() ^ rows[1].keys()), copied)


def when(report: dict, row: str) -> list[tuple]:
    """Identifies each of a row's runs by when it began and how long it took."""
    return [(run.session, run.started, run.clock.train_seconds) for run in good_runs(report["runs"][row])]


def ratio(ours: dict, theirs: dict, row: str, confidence: float = stats.CONFIDENCE) -> stats.Ratio:
    """A row's time in one report over that in another, by the model of the reports' own ratios (stats.unpaired_ratio).

    The spread is estimated from all rows of this row's kind: those with the same device and plan, as in the ranking.
    """
    return stats.unpaired_ratio(*(_of_kind(report, row) for report in (ours, theirs)), row, confidence)


def _of_kind(report: dict, row: str) -> stats.Times:
    """The seconds by block of this row, and of the rows of its kind that have undisturbed runs."""
    lines = {line["row"]: line for line in report["rows"]}

    def kind(name: str) -> tuple:
        return lines[name].get("device"), good_runs(report["runs"][name])[0].hashes["plan"]

    names = [name for name, runs in report["runs"].items() if name == row or trusted(runs)]
    return {
        name: {stats.block(run): run.clock.train_seconds for run in good_runs(report["runs"][name])}
        for name in names
        if kind(name) == kind(row)
    }


def read_report(folder: Path) -> dict:
    """A folder's report by the fields of a Summary, as its version of Lockstep had them.

    Raises BadInput if there is none, or if it is damaged.
    """
    file = paths.report_folder(folder) / paths.SUMMARY
    if not file.is_file():
        raise BadInput(f"{file} does not exist. Name a results folder that has a report.")
    report = read_object(file, ("rows", "runs"))
    try:
        runs = {row: [of_json(run) for run in several] for row, several in report["runs"].items()}
    except ValueError as error:
        raise BadInput(f"{file}: is damaged ({error}). Make the report again.") from None
    return report | {"runs": runs}


def _breaches(folder: Path) -> str:
    """The breaches of the rules in a folder's own runs, in a line; empty if there are none."""
    if not paths.run_files(folder, paths.RECORD):
        return f"{folder} has a report only, so that its runs can't be checked"
    breaches = [(where, what) for where, what in fairness.check(folder).breaches if not fairness.is_counted(what)]
    if not breaches:
        return ""
    more = f", and {len(breaches) - 1} more" if len(breaches) > 1 else ""
    return f"{folder} breaks the rules of a fair run ({': '.join(breaches[0])}{more}): check.py {folder} lists them"


def differences(ours: Tested, theirs: Tested) -> dict[str, str]:
    """The differences that make the times of two runs incomparable, by KINDS."""
    differs = {}
    machines = [{name: run.environment.get(name) for name in SAME_HARDWARE} for run in (ours, theirs)]
    if machines[0] != machines[1]:
        named = [name for name in SAME_HARDWARE if machines[0][name] != machines[1][name]]
        differs["hardware"] = ", ".join(f"{name} {machines[0][name]} and {machines[1][name]}" for name in named)
    if ours.world_size != theirs.world_size:
        differs["hardware"] = f"{ours.world_size} and {theirs.world_size} devices"
    if ours.precision != theirs.precision:
        differs["precision"] = f"{ours.precision} and {theirs.precision}"
    for kind in ("plan", "weights", "data"):
        if ours.hashes[kind] != theirs.hashes[kind]:
            differs[kind] = f"{ours.hashes[kind][:12]} and {theirs.hashes[kind][:12]}"
    return differs


def _environment(ours: dict, theirs: dict) -> list[str]:
    """The differences between the environments, besides the hardware."""
    differs = _differs(ours["environment"], theirs["environment"])
    return [said for name, said in differs.items() if name.split(".")[0] not in SAME_HARDWARE]


def beside(reports: list[dict]) -> list[tuple[str, str, list[str]]]:
    """What differs between the reports: (kind, name, the value in each report), hardware first."""
    told = {}
    for report in reports:
        environment = flat(report["environment"] or {})
        config = {key: value for key, value in report["config"].items() if key != "rows"}
        told |= {(_kind(name), name): None for name in environment} | {
            ("settings", name): None for name in flat(config)
        }
    lines = []
    for kind, name in told:
        values = [_value(report, kind, name) for report in reports]
        if len(set(values)) > 1:
            lines.append((kind, name, values))
    order = ("hardware", "commit", "software", "settings")
    return sorted(lines, key=lambda line: order.index(line[0]))


def _kind(name: str) -> str:
    first = name.split(".")[0]
    if first in (*SAME_HARDWARE, "cpu_flags", "governor", "virtual_machine"):
        return "hardware"
    return "commit" if first in ("commit", "changed") else "software"


def _value(report: dict, kind: str, name: str) -> str:
    value = flat(report["config"] if kind == "settings" else report["environment"] or {}).get(name)
    return "–" if value in (None, "", [], {}) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _asked(row: str, ours: dict, theirs: dict) -> list[str]:
    """The other differences in a row's settings, and the folders in which its times can't be trusted."""
    said = asked_otherwise(*(good_runs(report["runs"][row])[0] for report in (ours, theirs)))
    return [f"{row}: {what}" for what in said] + [
        f"{row}: every run of {which} was disturbed"
        for which, report in (("A", ours), ("B", theirs))
        if not trusted(report["runs"][row])
    ]


def asked_otherwise(ours: Tested, theirs: Tested) -> list[str]:
    """The differences between the settings of two runs."""
    return list(_differs(ours.asked, theirs.asked).values())


def _differs(ours: dict, theirs: dict) -> dict[str, str]:
    """The differences between two nested dicts: a line with both values, by name."""
    said = {}
    for name, *both in differing(ours, theirs):
        values = [None if value is ABSENT else value for value in both]
        if values[0] != values[1]:
            said[name] = f"{name}: {values[0]} and {values[1]}"
    return said
