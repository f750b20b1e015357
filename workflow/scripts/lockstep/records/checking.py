"""Checks a record anywhere: every hash, the rules of a fair comparison, and acceptance's verdicts.

What a record shows is read from its runs and trials. Its report is not trusted, but compared with them.
"""

import contextlib
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jsonschema
import numpy as np

from lockstep import paths, stats
from lockstep.errors import BadInput
from lockstep.files import read_json, read_object
from lockstep.proof import fairness
from lockstep.proof.verdicts import PROVEN, WRONG
from lockstep.records import packing
from lockstep.report.ranking import BASELINE
from lockstep.run import record_files
from lockstep.run.record import Record

WORDS = {"type": "string"}
MACHINE = {
    "type": "object",
    "required": ["cpu", "cores", "gpus", "packages"],
    "properties": {
        "cpu": {"type": ["string", "null"]},
        "cores": {"type": "integer"},
        "gpus": {"type": "array", "items": WORDS},
        "packages": {"type": "object", "required": ["torch"], "properties": {"torch": WORDS}},
    },
}
NUMBER = {"type": "integer"}
OF_TRAIN = {"type": "object", "required": ["texts"], "properties": {"texts": NUMBER}}
DATA = {
    "type": "object",
    "required": ["unit", "parameters", "splits"],
    "properties": {
        "unit": WORDS,
        "parameters": NUMBER,
        "splits": {"type": "object", "required": ["train"], "properties": {"train": OF_TRAIN}},
    },
}


@dataclass(frozen=True)
class Checked:
    """A record whose files are as they were packed.

    runs: the records of its runs; proofs: the verdict on each row; machine: the environment that all were made in.
    data: its size in words; breaches: where, and which rule is broken.
    """

    file: Path
    identity: str
    manifest: dict
    machine: dict
    runs: list[Record] = field(default_factory=list)
    proofs: dict[str, str] = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    breaches: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_benchmark(self) -> bool:
        return self.manifest["kind"] == "benchmark"

    @property
    def sound(self) -> list[Record]:
        """The runs that nothing disturbed, and that kept to their plan."""
        return [run for run in self.runs if not run.watch.disturbed and not run.departed]

    @cached_property
    def compared(self) -> list[Record]:
        """The undisturbed runs of proven rows of the closed division that trained the same work as `single`."""
        work = self.question
        good = [run for run in self.sound if run.division == "closed"]
        return [run for run in good if self.proofs.get(run.row) in PROVEN and _work(run) == work]

    @cached_property
    def by_block(self) -> stats.Times:
        """The training seconds of those runs, by row and block."""
        return _by_block(self.compared)

    @property
    def seconds(self) -> dict[str, list[float]]:
        """The same without blocks."""
        return {row: list(times.values()) for row, times in self.by_block.items()}

    @property
    def fastest(self) -> str | None:
        """The row among them with the least median."""
        return min(self.seconds, key=lambda row: np.median(self.seconds[row]), default=None)

    @property
    def baseline(self) -> str | None:
        """The row among them that trains as one process on one device; with the fewest threads, if several do."""
        alone = [run for run in self.compared if run.strategy == BASELINE]
        fewest = min(alone, key=lambda run: run.asked["hardware"]["threads"], default=None)
        return fewest and fewest.row

    @property
    def speedup(self) -> stats.Ratio | None:
        """How many times as fast as the baseline the fastest row is, by the runs in their blocks.

        As in the report, all rows of the same plan that are not proven wrong say how much times vary.
        """
        if not self.fastest or not self.baseline or self.fastest == self.baseline:
            return None
        plan = self.compared[0].hashes["plan"]
        beside = [run for run in self.sound if run.hashes["plan"] == plan]
        right = [run for run in beside if self.proofs.get(run.row) not in WRONG]
        return stats.Fit(_by_block(right)).ratio(self.baseline, self.fastest)

    @property
    def proven(self) -> str:
        """How many verdicts say: the same model, as in `11 of 12`."""
        return f"{sum(verdict in PROVEN for verdict in self.proofs.values())} of {len(self.proofs)}"

    @property
    def sessions(self) -> set[str]:
        """The calls of Snakemake in which its runs were made."""
        return {run.session for run in self.runs}

    @property
    def steps(self) -> set[str]:
        """The hashes of its runs' seconds per step, which no other measurement has."""
        return {file["sha256"] for name, file in self.manifest["files"].items() if name.endswith(paths.STEPS)}

    @property
    def question(self) -> tuple:
        """The work of `single`, or of most closed runs: data, initial weights, plan and precision."""
        closed = [run for run in self.runs if run.division == "closed"]
        work = Counter(map(_work, [run for run in closed if run.strategy == BASELINE] or closed))
        return work.most_common(1)[0][0] if work else ()


def _by_block(runs: list[Record]) -> stats.Times:
    seconds = defaultdict(dict)
    for run in runs:
        seconds[run.row][stats.block(run)] = run.clock.train_seconds
    return dict(seconds)


def check(file: Path, keep: Path | None = None) -> Checked:
    """Check a record. Raises BadInput if it is none, or if a file in it is not as it was packed.

    keep: a new folder in which its files stay, as a results folder.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        folder = Path(temporary) / "record"
        folder.mkdir()
        unpacked = packing.unpack(file, folder)
        try:
            with contextlib.chdir(folder):
                checked = _checked(file, unpacked)
        except Exception as error:  # files from elsewhere may be damaged in any way
            raise BadInput(f"{file}: its content is damaged ({error!r:.200}).") from None
        if keep:
            shutil.copytree(folder, keep)
            keep.chmod(keep.parent.stat().st_mode & 0o777)
    return checked


def _checked(file: Path, unpacked: packing.Record) -> Checked:
    if unpacked.manifest["kind"] == "acceptance":
        found = read_object(Path(paths.ACCEPT), ("machine", "proofs", "times", "finished", "not_reached"))
        proofs = {row: verdict["proof"] for row, verdict in found["proofs"].items()}
        machine, breaches = found["machine"], [*_accepted(found, Path()), *_told(unpacked)]
        jsonschema.validate(machine, MACHINE)
        return Checked(file, unpacked.identity, unpacked.manifest, machine, proofs=proofs, breaches=breaches)
    here = Path()
    runs = [record_files.read_run(each.parent) for each in paths.run_files(here, paths.RECORD)]
    if not runs:
        raise BadInput("no run with a record")
    machines = [read_json(each) for each in paths.run_files(here, paths.ENVIRONMENT)]
    for machine in machines:
        jsonschema.validate(machine, MACHINE)
    machine = max(machines, key=lambda machine: len(machine["gpus"]))  # a row sees its own GPUs only
    rows = {run.row for run in runs}
    trials = [each for each in paths.run_files(here, paths.VERDICT, paths.PARITY) if paths.row_of(each.parent) in rows]
    proofs = {paths.row_of(each.parent): read_json(each)["proof"] for each in trials}
    breaches = [*fairness.check(here).breaches, *_told(unpacked)]
    if len(proofs) < len(trials):
        breaches.append(("parity", "a row has two verdicts"))
    about = read_json(paths.data_file(here))
    jsonschema.validate(about, DATA)
    return Checked(file, unpacked.identity, unpacked.manifest, machine, runs, proofs, about, breaches)


def _told(unpacked: packing.Record) -> Iterator[tuple[str, str]]:
    """What the manifest tells must be what the files say."""
    for name, value in packing.about(Path()).items():
        if unpacked.manifest[name] != value:
            yield packing.MANIFEST, f"{name} is {unpacked.manifest[name]}, but the files say {value}"


def _work(run: Record) -> tuple:
    return (*sorted(run.hashes.items()), run.precision)


def _accepted(found: dict, folder: Path) -> Iterator[tuple[str, str]]:
    """The verdicts of an acceptance must be those of its trials, and none may be wrong; nor may a timed row fail."""
    if found["machine"].get("changed"):
        yield paths.ACCEPT, "it was made by files that differ from their commit"
    if not found["finished"]:
        yield paths.ACCEPT, "it was interrupted"
    if not found["proofs"]:
        yield paths.ACCEPT, "nothing was proven"
    for row, told in found["proofs"].items():
        files = paths.run_files(folder / "proofs", paths.VERDICT, paths.PARITY, row)
        verdicts = [read_json(file) for file in files]
        if not verdicts:
            yield row, "no verdict of its trial is in the record"
        for verdict in verdicts:
            if verdict["proof"] != told["proof"]:
                yield row, f"{paths.ACCEPT} says {told['proof']}, but its trial {verdict['proof']}"
            elif not (verdict["proof"] == "unequal" and verdict.get("by_nature")):
                yield from ((row, what) for what in fairness.contradictions(verdict))
    yield from ((line["name"], f"it failed: {line['failed']}") for line in found["times"] if "failed" in line)
