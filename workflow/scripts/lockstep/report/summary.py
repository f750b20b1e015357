"""The summary of all runs of a results folder: medians, ratios, places, and the runs that they are made of.

It can be made at any time: rows that have not run yet, or have failed, have a line with the reason.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import columns, paths
from lockstep.analysis import blocks
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.files import read_json, read_object
from lockstep.report import foretold, ladder, ranking, scaling, studies
from lockstep.report.environments import merge_environments
from lockstep.report.reading import (
    Run,
    as_json,
    good_runs,
    read_optional,
    read_run,
    read_verdict,
    succeeded,
    take_out_stale,
)
from lockstep.report.variance import variance
from lockstep.run.record import Tested

# The keys that are read from files which may have been changed.
PROFILE = ("seconds", "step_seconds", "exposed_by_difference")
PEAK, MANIFEST = ("cores", "flops_per_second"), ("time", "host", "command", "commit")
DATA = ("hash", "weights", "splits", "labels")


@dataclass(frozen=True)
class Summary:
    """All content of the report as plain values. Its fields, in this order, are the keys of summary.json.

    Users' scripts and report/comparison.py read these keys, so add freely and never rename. In the comments, "by row"
    means that the keys are row names.
    """

    rows: list[dict]  # the lines of summary.csv (lockstep/columns.py)
    runs: dict[str, list[Run]]  # by row: the record of each repetition, with its test and environment
    ratios: dict[str, dict[str, dict]]  # by row, then by the row that it is compared with: the ratio of their times
    statistics: dict | None  # what the ranked rows can show (ranking.compare); None if there are too few runs
    apart: list[str]  # the rows that no block connects with the rest
    blocks: dict | None  # the newest decision on further blocks of runs (analysis/blocks.py); None if there is none
    variance: dict | None  # the variance between runs of a row (variance.py); None if it is unknown
    verdicts: dict[str, dict | None]  # by row: whether it trains the same model; None if unknown or stale
    not_in_trials: dict[str, list[str]]  # by row: its own settings that the proof leaves out
    scaling: list[dict]  # rows that differ in the number of devices only, as families (report/scaling.py)
    ladder: dict | None  # the open division (report/ladder.py); None if there is none
    profiles: dict[str, dict | None]  # by row: where a step's time goes; None if unknown or stale
    stale: dict[str, dict[str, str]]  # for `proof` and `profile`, by row: why it is stale, and so left out
    data: dict  # the content of data/data.json
    peak: dict | None  # the peak rates of this machine's CPU, by precision; None if not measured
    network: list[dict] | None  # what communication costs (lockstep/network.py); None if not measured
    foretold: dict | None  # sealed forecasts beside what was measured (report/foretold.py); None if there are none
    plans: dict[str, dict]  # by plan: its description, with only the number of dropped texts
    environment: dict | None  # merged over all runs (environments.py); None without runs
    manifest: dict | None  # when, where and by which command the results were requested; None if unknown
    damaged: list[str]  # messages on files, other than runs', that can't be read
    config: dict  # the configuration as plain values, with defaults
    studies: dict[str, dict]  # each study's findings (report/studies.py); separate keys in summary.json

    def as_json(self) -> dict:
        """Everything, by the keys of summary.json."""
        runs = {row: [as_json(run) for run in several] for row, several in self.runs.items()}
        return {name: value for name, value in vars(self).items() if name != "studies"} | {"runs": runs} | self.studies

    @property
    def compared(self) -> "Summary":
        """The summary without the rows of studies, which have sections of their own.

        If all rows are of studies, or none are, it is the whole summary.
        """
        names = {row["row"] for row in self.rows if row["division"] in registry.DIVISIONS}
        if len(names) in (0, len(self.rows)):
            return self

        def of(by_row: dict) -> dict:
            return {name: value for name, value in by_row.items() if name in names}

        return replace(
            self,
            rows=[row for row in self.rows if row["row"] in names],
            runs=of(self.runs),
            verdicts=of(self.verdicts),
            profiles=of(self.profiles),
            apart=[name for name in self.apart if name in names],
        )

    @property
    def finished_rows(self) -> list[dict]:
        """The rows that have results, even if some of their runs failed."""
        return [row for row in self.rows if row["train_seconds"] is not None]

    @property
    def succeeded_runs(self) -> list[Tested]:
        """The successful runs of all rows, including disturbed ones."""
        return [run for runs in self.runs.values() for run in succeeded(runs)]


def gather(config: Config, results: Path) -> Summary:
    """The summary of a results folder at present. Raises BadInput if its data is not prepared."""
    data = read_object(paths.require(paths.data_file(results), "prepare.py"), DATA)
    damaged: list[str] = []
    peak = read_optional(paths.peak_file(results), PEAK, damaged)
    runs = {
        row.name: [
            read_run(config, config.repetition(row, repeat), repeat, results, peak)
            for repeat in blocks.repetitions(config, row, results)
        ]
        for row in config.rows.values()
    }
    verdicts = {row.name: read_verdict(config, row, results) for row in config.rows.values()}
    profiles = {row.name: None for row in config.rows.values()}
    if config.profile.steps:
        files = {row.name: results / config.profiled(row).folder(1) / paths.PROFILE for row in config.rows.values()}
        profiles = {name: read_optional(file, PROFILE, damaged) for name, file in files.items()}
    stale = {
        "proof": take_out_stale(config, verdicts, config.trial, results),
        "profile": take_out_stale(config, profiles, config.profiled, results),
    }
    manifest = read_optional(paths.manifest_file(results), MANIFEST, damaged)
    rows = [_line(row, runs[row.name], verdicts[row.name]) for row in config.rows.values()]
    ratios, statistics, unconnected = ranking.compare(rows, runs, config)
    between = ranking.between(rows, runs, ratios)
    timed = {name: good_runs(several) for name, several in runs.items()}
    environments = [run.environment for several in runs.values() for run in succeeded(several)]
    return Summary(
        rows=rows,
        runs=runs,
        ratios=ratios,
        statistics=statistics,
        apart=unconnected,
        blocks=blocks.last(config, results),
        variance=variance(config, runs, results),
        verdicts=verdicts,
        not_in_trials={row.name: config.not_in_trial(row) for row in config.rows.values()},
        scaling=scaling.families(rows, runs, between),
        ladder=ladder.climb(
            config,
            rows,
            {name: succeeded(several) for name, several in runs.items()},
            timed,
        ),
        profiles=profiles,
        stale=stale,
        data=data,
        peak=peak,
        network=(read_optional(paths.network_file(results), ("measured",), damaged) or {}).get("measured"),
        foretold=foretold.against(config, rows, results, damaged),
        plans={
            name: _without_ids(read_json(about))
            for name in dict.fromkeys(row.plan_name for row in config.rows.values())
            if (about := paths.plan_summary_file(results, name)).is_file()
        },
        environment=merge_environments(environments),
        manifest=manifest,
        damaged=damaged,
        config=config.source,
        studies=studies.answers(config, rows, timed, verdicts, between),
    )


def _line(row: Row, runs: list[Run], verdict: dict | None) -> dict:
    """A row's line of summary.csv; ranking.py fills in how it compares with others."""
    good, bad = good_runs(runs), [run for run in runs if run.status != "ok"]
    return columns.line(row, good) | {
        "repeats": len(good),
        "disturbed": sum(bool(run.watch.disturbed) for run in succeeded(runs)),
        "proof": verdict["proof"] if verdict else "not-run",
        "status": bad[0].status if bad else "ok",
        "reason": "; ".join(dict.fromkeys(run.reason for run in bad)),
    }


def _without_ids(plan: dict) -> dict:
    return plan | {"dropped": len(plan["dropped"])}
