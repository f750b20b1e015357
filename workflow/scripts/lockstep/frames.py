"""A results folder as tidy pandas frames, for notebooks: `lockstep.load("results")`. No PyTorch is imported.

Everything is read from the folder, so it may be another machine's. Seconds are seconds, and a `step` counts from 1.
"""

from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.run import record_files


class Results:
    """The frames of one results folder. Each is read when it is first asked for."""

    def __init__(self, folder: Path):
        from lockstep.report import comparison

        self.folder = folder
        self.report = comparison.read_report(folder)  # summary.json, whose runs are records

    def __repr__(self) -> str:
        return f"<results of {len(self.rows)} rows in {self.folder}>"

    @cached_property
    def rows(self) -> pd.DataFrame:
        """A line for each row of the table: the columns of summary.csv, by the row's name."""
        return pd.DataFrame(self.report["rows"]).set_index("row")

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A line for each run: the columns of runs.csv. `disturbed` says by what; it is empty if by nothing."""
        file = paths.report_folder(self.folder) / paths.RUNS_TABLE
        if not file.is_file():
            raise BadInput(f"{file} does not exist. Make the report again: python workflow/scripts/report.py")
        return pd.read_csv(file, keep_default_na=True).astype({"disturbed": "string"}).fillna({"disturbed": ""})

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A line for each step of each rank of each run: `seconds` by the rank's clock, and the global batch's `loss`.

        It is read from the runs' own folders, so kept results (history/) may have none.
        """
        frames = []
        for file in paths.run_files(self.folder, paths.RECORD):
            record, seconds = record_files.read_run(file.parent), np.load(file.with_name(paths.STEPS))
            ranks, steps = seconds.shape
            frame = pd.MultiIndex.from_product([range(ranks), range(1, steps + 1)], names=["rank", "step"])
            frame = frame.to_frame(index=False).assign(seconds=seconds.ravel(), loss=np.tile(record.losses, ranks))
            frames.append(frame.assign(row=record.row, repetition=record.repeat))
        columns = ["row", "repetition", "rank", "step", "seconds", "loss"]
        return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)

    @cached_property
    def proofs(self) -> pd.DataFrame:
        """A line for each proven row: the verdict, the largest distance in float64, and distances in its precision."""
        lines = []
        for row, verdict in self.report["verdicts"].items():
            if verdict:
                exact = verdict.get("fp64") or {}
                lines.append(
                    {name: verdict.get(name) for name in ("proof", "reason", "world_size", "steps", "precision")}
                    | {"row": row, "fp64": max(exact.values(), default=np.nan)}
                    | (verdict.get("distances") or {})
                    | {name: verdict.get(name) for name in ("above_floor", "below_mistake")}
                )
        return pd.DataFrame(lines).set_index("row") if lines else pd.DataFrame()

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Seconds of a profiled step, by row and by what they go to."""
        profiles = {row: profile["seconds"] for row, profile in self.report["profiles"].items() if profile}
        return pd.DataFrame.from_dict(profiles, orient="index").rename_axis("row")

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """A line for each pair of rows that can be compared: the row's time over `against`'s, with a 95 % interval.

        n: the number of blocks that have both. Without enough runs for an interval, `low` and `high` are empty.
        """
        lines = [
            {"row": row, "against": against, "ratio": ratio["value"], "n": ratio["n"]}
            | {end: ratio[end] if ratio["kind"] else np.nan for end in ("low", "high")}
            for row, others in self.report["ratios"].items()
            for against, ratio in others.items()
            if against != row
        ]
        return pd.DataFrame(lines, columns=["row", "against", "ratio", "low", "high", "n"])

    @cached_property
    def scaling(self) -> pd.DataFrame:
        """A line for each row that differs from others in the number of devices only (report/scaling.py)."""
        lines = [
            {"family": family["name"], "kind": family["kind"], "against": family["against"]} | size
            for family in self.report.get("scaling", ())
            for size in family["sizes"]
        ]
        return pd.DataFrame(lines)

    def compare(self, other: "Results | Path | str", across: tuple[str, ...] = ()) -> pd.DataFrame:
        """The rows of another results folder beside these: its time over this one's, with a 95 % interval.

        Raises BadInput if the two can't be compared, as `lockstep compare` does, or hold the same runs; across:
        differences that are allowed all the same (report/comparison.py: KINDS).
        """
        from lockstep.report import comparison
        from lockstep.report.words import say

        theirs = other.folder if isinstance(other, Results) else Path(other)
        compared = comparison.compare(self.folder, theirs, set(across))
        if compared.copied:
            raise BadInput(say("compare_copied", first=self.folder, other=theirs).en)
        lines = [
            {
                "row": line.row,
                "seconds": line.seconds[0],
                "other_seconds": line.seconds[1],
                "ratio": line.ratio.value,
                "low": line.ratio.low if line.ratio.kind else np.nan,
                "high": line.ratio.high if line.ratio.kind else np.nan,
                "distinct": line.ratio.distinct,
            }
            for line in compared.lines
        ]
        return pd.DataFrame(lines).set_index("row")

    @property
    def pictures(self) -> list[str]:
        """The names of the pictures that there is something to draw for."""
        return list(self._drawings())

    @property
    def plot(self) -> "Plots":
        """The page's pictures: `r.plot("memory")`, or `r.plot.memory()`."""
        return Plots(self)

    def _drawings(self) -> dict:
        from lockstep.report import charts
        from lockstep.report.summary import Summary

        known = {field.name: self.report.get(field.name) for field in fields(Summary)}
        # What an earlier version's report lacks.
        empty = {
            field.name: () for field in fields(Summary) if field.name in ("scaling", "apart", "damaged", "foretold")
        }
        summary = Summary(
            **empty | {name: value for name, value in known.items() if value is not None or name not in empty}
        )
        return dict(charts.drawings(summary))


class Plots:
    """The page's pictures as matplotlib Figures, by name: a call, or a method of that name."""

    def __init__(self, results: Results):
        self._results = results

    def __call__(self, name: str):
        """A picture of the page. Raises BadInput if there is none of this name."""
        from lockstep.report import charts

        drawings = self._results._drawings()
        if name not in drawings:
            raise BadInput(f"plot: there is no picture {name!r} here. There are: {', '.join(drawings)}.")
        figure = drawings[name]().figure
        charts.plt.close(figure)  # a notebook would show it twice, and keep every one
        return figure

    def __getattr__(self, name: str):
        if name.startswith("_"):  # asked for by copies and by notebooks
            raise AttributeError(name)
        if name not in self._results.pictures:
            raise AttributeError(f"there is no picture {name!r} here. There are: {', '.join(self._results.pictures)}.")
        return partial(self, name)

    def __dir__(self) -> list[str]:
        return self._results.pictures  # what a notebook completes


def load(folder: Path | str = paths.RESULTS) -> Results:
    """The results in a folder, such as `results` or `history/monday`. Raises BadInput if it has no report."""
    return Results(Path(folder))
