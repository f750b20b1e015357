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

from lockstep.errors import BadInput, printable
from lockstep.paths import PROJECT
from lockstep.records import packing
from lockstep.records.checking import Checked, check

SURE = 0.01  # the largest probability of so large an advantage by chance, for a new best
AGREE = 1.05  # the largest factor between two records' times of a row that confirm each other
MOST = 1_000_000  # bytes of a record in the project's folder


def read(folder: Path) -> list[Checked]:
    """Check all records in a folder, the oldest first. Raises BadInput if one is damaged, or breaks a rule."""
    records = []
    for file in sorted(folder.glob(f"*{packing.ENDING}")):
        if file.stat().st_size > MOST:
            raise BadInput(f"{file}: has more than {MOST / 1e6:g} MB, which is too much for this folder.")
        record = check(file)
        if record.breaches:
            raise BadInput(f"{file}: breaks a rule ({': '.join(record.breaches[0])}): lockstep record check {file}")
        records.append(record)
    return sorted(records, key=lambda record: (record.manifest["made"], record.identity))


def state(record: Checked, others: list[Checked], pinned: str) -> str:
    """verified, reported or stale, given the other records of its hardware and question."""
    if _version(record.machine["packages"]["torch"]) < _version(pinned):
        return "stale"
    return "verified" if any(_confirms(other, record) for other in others) else "reported"


def bests(records: list[Checked]) -> list[Checked]:
    """Of benchmarks of one hardware and question, the oldest first, those that were the best when they came."""
    best: list[Checked] = []
    for record in records:
        if record.fastest and (not best or probability(record, best[-1]) < SURE):
            best.append(record)
    return best


def probability(ours: Checked, theirs: Checked) -> float:
    """How probable so large an advantage of our fastest row over theirs is by chance: one-sided, by Welch's t-test of
    the logarithms (1947, Biometrika 34: 28). 1 if one of the two has fewer than two runs."""
    times = [np.log(record.seconds[record.fastest]) for record in (ours, theirs)]
    if min(map(len, times)) < 2:
        return 1.0
    return float(stats.ttest_ind(*times, equal_var=False, alternative="less").pvalue)


def markdown(records: list[Checked], pinned: str) -> str:
    """Tables of all records, by hardware and question."""
    hardware = defaultdict(lambda: defaultdict(list))
    for record in records:
        hardware[_hardware(record)][record.is_benchmark, record.question].append(record)
    said = []
    for name, questions in sorted(hardware.items()):
        said.append(f"### {_cell(name)}")
        for (is_benchmark, _), group in sorted(questions.items(), reverse=True):
            said += (_benchmarks if is_benchmark else _acceptances)(group, pinned)
    return "\n\n".join(said) + "\n" if said else "There is none yet.\n"


def pinned_torch() -> str:
    """The version of PyTorch in requirements.txt."""
    text = (PROJECT / "requirements.txt").read_text(encoding="utf-8")
    return re.search(r"^torch==(\S+)", text, re.MULTILINE)[1]


def _benchmarks(group: list[Checked], pinned: str) -> Iterator[str]:
    data, run = group[0].data, group[0].runs[0]
    yield _cell(
        f"{data['splits']['train']['texts']} {data['unit']}, a model of {data['parameters']:,} weights,"
        f" {run.steps} steps of {run.global_batch}, {run.precision}."
    )
    best = bests(group)
    lines = [
        "| record | fastest proven row, in `single`'s precision"
        " | seconds | times `single` | proven | state | best | made by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in reversed(group):
        row, ratio = record.fastest, record.speedup
        others = [other for other in group if other is not record]
        cells = (
            _name(record),
            _code(row) if row else "–",
            f"{np.median(record.seconds[row]):.3g}" if row else "–",
            f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio and ratio.kind else "–",
            record.proven,
            state(record, others, pinned),
            "yes" if best and record is best[-1] else "once" if record in best else "",
            _code(record.manifest["command"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)


def _acceptances(group: list[Checked], pinned: str) -> Iterator[str]:
    lines = ["| record | proofs that say: the same model | PyTorch | state | made by |", "|---|---|---|---|---|"]
    for record in reversed(group):
        torch = _cell(record.machine["packages"]["torch"])
        made = _code(record.manifest["command"])
        lines.append(f"| {_name(record)} | {record.proven} | {torch} | {state(record, [], pinned)} | {made} |")
    yield "\n".join(lines)


def _name(record: Checked) -> str:
    commit = _cell(str(record.manifest["commit"] or "unknown")[:10])
    return f"`{record.identity}`, {record.manifest['made'][:10]}, commit {commit}"


def _hardware(record: Checked) -> str:
    machine = record.machine
    gpus = machine["gpus"]
    named = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)]
    return ", ".join([*named, f"{machine['cores']} cores of {machine['cpu']}"])


def _confirms(other: Checked, record: Checked) -> bool:
    """Whether another session has the same times, for every row that both have."""
    rows = other.seconds.keys() & record.seconds.keys()
    if other.sessions & record.sessions or other.steps & record.steps or not rows:
        return False
    ratios = [np.median(other.seconds[row]) / np.median(record.seconds[row]) for row in rows]
    return all(1 / AGREE <= ratio <= AGREE for ratio in ratios)


def _cell(text: str) -> str:
    """Text of a record for a cell of a table, escaped so that it can be neither markup nor HTML."""
    return re.sub(r"([|`<>\[\]*_])", r"\\\1", printable(text))


def _code(text: str) -> str:
    """Text of a record as code for a cell of a table."""
    return f"`{printable(text).replace('`', ' ').replace('|', '/')}`"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
