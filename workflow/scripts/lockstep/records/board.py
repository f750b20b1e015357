"""The page of records: by hardware and question, the fastest proven row of each, and how far each record is confirmed.

States: `verified` if another record of the same hardware and question, made in another session, has the same times;
`reported` if there is none; `stale` if it was made with an older PyTorch than the one that this version pins. In each
table a later record is the new best only if its fastest row is faster than the best one's with p < .01.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from lockstep.paths import PROJECT
from lockstep.records import packing
from lockstep.records.checking import Checked, check

SURE = 0.01  # the largest probability of so large an advantage by chance, for a new best
AGREE = 1.05  # the largest factor between two records' times of a row that confirm each other


def read(folder: Path) -> list[Checked]:
    """Check all records in a folder, the oldest first. Raises BadInput if one is damaged."""
    records = [check(file) for file in sorted(folder.glob(f"*{packing.ENDING}"))]
    return sorted(records, key=lambda record: (record.manifest["made"] or "", record.identity))


def state(record: Checked, others: list[Checked], pinned: str) -> str:
    """verified, reported or stale, given the other records of its hardware and question."""
    if _version(record.machine["packages"].get("torch") or "0") < _version(pinned):
        return "stale"
    return "verified" if any(_confirms(other, record) for other in others) else "reported"


def bests(records: list[Checked]) -> list[Checked]:
    """Of benchmarks of one hardware and question, the oldest first, those that were the best when they came."""
    found: list[Checked] = []
    for record in records:
        if fastest(record) and (not found or probability(record, found[-1]) < SURE):
            found.append(record)
    return found


def fastest(record: Checked) -> str | None:
    """The proven closed row with the least median of its training times."""
    return min(record.seconds, key=lambda row: np.median(record.seconds[row]), default=None)


def probability(ours: Checked, theirs: Checked) -> float:
    """How probable so large an advantage of our fastest row over theirs is by chance: one-sided, by Welch's t-test of
    the logarithms (1947, Biometrika 34: 28). 1 if one of the two has fewer than two runs."""
    times = [np.log(record.seconds[fastest(record)]) for record in (ours, theirs)]
    if min(map(len, times)) < 2:
        return 1.0
    return float(stats.ttest_ind(*times, equal_var=False, alternative="less").pvalue)


def markdown(records: list[Checked], pinned: str) -> str:
    """Tables of all records, by hardware and question."""
    groups = defaultdict(list)
    for record in records:
        groups[_hardware(record), record.question].append(record)
    said = []
    for (hardware, question), group in sorted(groups.items(), key=lambda item: item[0][0]):
        said += [f"### {hardware}", *(_benchmarks if question else _acceptances)(group, pinned)]
    return "\n\n".join(said) + "\n" if said else "There is none yet.\n"


def pinned_torch() -> str:
    """The version of PyTorch in requirements.txt."""
    text = (PROJECT / "requirements.txt").read_text(encoding="utf-8")
    return re.search(r"^torch==(\S+)", text, re.MULTILINE)[1]


def _benchmarks(group: list[Checked], pinned: str) -> Iterator[str]:
    first = group[0].report
    unit = first["data"]["unit"]
    yield (
        f"{first['data']['splits']['train']['texts']} {unit}, a model of {first['data']['parameters']:,} weights,"
        f" {first['rows'][0]['steps']} steps of {first['rows'][0]['global_batch']}."
    )
    best = bests(group)
    lines = [
        "| record | fastest proven row | seconds | of `single` | proven | state | best | repeat it by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in reversed(group):
        row = fastest(record)
        line = next((line for line in record.report["rows"] if line["row"] == row), {})
        cells = [
            _name(record),
            f"`{row}`" if row else "–",
            f"{line['train_seconds']:.3g}" if line else "–",
            _speedup(line),
        ]
        cells.append(f"{len(record.seconds)} of {len(record.report['rows'])}")
        cells.append(state(record, [other for other in group if other is not record], pinned))
        cells.append("yes" if best and record is best[-1] else "once" if record in best else "")
        cells.append(f"`{record.manifest['command']}`")
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)


def _speedup(line: dict) -> str:
    """How many times as fast as single, with its interval if there is one."""
    if not line.get("speedup"):
        return "–"
    interval = f" ({line['speedup_low']:.2f} to {line['speedup_high']:.2f})" if line["speedup_low"] else ""
    return f"{line['speedup']:.2f}{interval}"


def _acceptances(group: list[Checked], pinned: str) -> Iterator[str]:
    lines = ["| record | proofs | right | PyTorch | state |", "|---|---|---|---|---|"]
    for record in reversed(group):
        proofs = record.report["proofs"]
        wrong = len({where for where, _ in record.breaches})
        lines.append(
            f"| {_name(record)} | {len(proofs)} | {len(proofs) - wrong} | {record.machine['packages'].get('torch')}"
            f" | {state(record, [], pinned)} |"
        )
    yield "\n".join(lines)


def _name(record: Checked) -> str:
    commit = str(record.manifest["commit"] or "")[:10]
    return f"`{record.identity}`, {(record.manifest['made'] or '')[:10]}, commit {commit or 'unknown'}"


def _hardware(record: Checked) -> str:
    machine = record.machine
    gpus = machine.get("gpus") or []
    named = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)]
    return ", ".join([*named, f"{machine.get('cores')} cores of {machine.get('cpu')}"])


def _confirms(other: Checked, record: Checked) -> bool:
    """Whether another session has the same times, for every row that both have."""
    sessions = [
        {run.get("session") for runs in each.report.get("runs", {}).values() for run in runs}
        for each in (other, record)
    ]
    rows = other.seconds.keys() & record.seconds.keys()
    if sessions[0] & sessions[1] or not rows:
        return False
    ratios = [np.median(other.seconds[row]) / np.median(record.seconds[row]) for row in rows]
    return all(1 / AGREE <= ratio <= AGREE for ratio in ratios)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
