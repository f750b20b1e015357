"""Checks a record anywhere: every hash, the rules of a fair comparison, and acceptance's verdicts."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import paths
from lockstep.files import read_json
from lockstep.proof import fairness
from lockstep.proof.verdicts import PROVEN
from lockstep.records import packing
from lockstep.report.reading import good_runs, trusted

WRONG = ("unequal", "failed")  # verdicts of a proof


@dataclass(frozen=True)
class Checked:
    """A record whose files are as they were packed.

    report: summary.json of a benchmark, or accept.json. breaches: where, and which rule is broken.
    """

    file: Path
    identity: str
    manifest: dict
    report: dict
    breaches: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_benchmark(self) -> bool:
        return "rows" in self.report

    @property
    def machine(self) -> dict:
        """The environment that it was made in."""
        return self.report["environment" if self.is_benchmark else "machine"] or {}

    @property
    def seconds(self) -> dict[str, list[float]]:
        """The training seconds of each row's runs that count, of rows that are proven and in the closed division."""
        rows = self.report["rows"] if self.is_benchmark else []
        proven = [row["row"] for row in rows if row["division"] == "closed" and row["proof"] in PROVEN]
        runs = {name: self.report["runs"][name] for name in proven if trusted(self.report["runs"][name])}
        return {name: [run["clock"]["train_seconds"] for run in good_runs(several)] for name, several in runs.items()}

    @property
    def sessions(self) -> set[str]:
        """The calls of Snakemake in which its runs were made."""
        return {run.get("session") for runs in self.report.get("runs", {}).values() for run in runs}

    @property
    def question(self) -> tuple:
        """What was asked: records with the same data, initial weights, plan and precision can be compared."""
        runs = [run for several in self.report.get("runs", {}).values() for run in several if run["status"] == "ok"]
        return tuple(sorted({(*sorted(run["hashes"].items()), run["precision"]) for run in runs}))


def check(file: Path, keep: Path | None = None) -> Checked:
    """Check a record. Raises BadInput if it is none, or if a file in it is not as it was packed.

    keep: a new folder in which its files stay, as a results folder.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        record = packing.unpack(file, Path(temporary))
        if keep:
            shutil.copytree(temporary, keep)
        if (record.folder / packing.ACCEPT).is_file():
            report = read_json(record.folder / packing.ACCEPT)
            breaches = list(_accepted(report, record.folder))
        else:
            report = read_json(paths.report_folder(record.folder) / paths.SUMMARY)
            breaches = fairness.check(record.folder).breaches
            breaches = [tuple(part.replace(f"{temporary}/", "") for part in breach) for breach in breaches]
        return Checked(file, record.identity, record.manifest, report, breaches)


def _accepted(report: dict, folder: Path):
    """The verdicts of an acceptance must be those of its trials, and none may be wrong."""
    for row, verdict in report["proofs"].items():
        files = paths.run_files(folder / "proofs", paths.VERDICT, paths.PARITY, row)
        told = {read_json(file)["proof"] for file in files}
        if told and told != {verdict["proof"]}:
            yield row, f"{packing.ACCEPT} says {verdict['proof']}, but its trial {' and '.join(sorted(told))}"
        if verdict["proof"] in WRONG and not verdict["nature"]:
            yield row, f"it is {verdict['proof']}" + (f": {verdict['reason']}" if verdict["reason"] else "")
    if not report["proofs"]:
        yield packing.ACCEPT, "nothing was proven"
