"""What all runs of a results folder come to: medians, ratios, places, and which runs they are made of.

It can be made at any moment: rows that have not run, or failed, keep their line, with the reason.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import columns, paths
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.files import read_json, read_object
from lockstep.report import ladder, ranking, scaling, studies
from lockstep.report.environments import merge_environments
from lockstep.report.reading import (
    good_runs,
    read_optional,
    read_run,
    read_verdict,
    succeeded,
    take_out_stale,
)
from lockstep.report.variance import variance
from lockstep.run import blocks

# What is read of files that others may have changed.
PROFILE = ("seconds", "step_seconds", "exposed_by_difference")
PEAK, MANIFEST = ("cores", "flops_per_second"), ("time", "host", "command", "commit")
DATA = ("hash", "weights", "splits", "labels")


@dataclass(frozen=True)
class Summary:
    """All that the report says, as plain values. Its fields, in this order, are the keys of summary.json.

    Users script against those keys, and report/comparison.py reads them: add freely and rename never. Where a comment
    says by row, the key is the row's name.
    """

    rows: list[dict]  # the lines of summary.csv (lockstep/columns.py)
    runs: dict[str, list[dict]]  # by row: one of each repetition, as its record has it, with its test and environment
    ratios: dict[str, dict[str, dict]]  # by row, and by each that it is compared with: its time over that one's
    statistics: dict | None  # what the ranked rows can show (ranking.compare); None where too few runs tell
    apart: list[str]  # the rows that no block connects with the rest
    blocks: dict | None  # the newest decision on further blocks of runs (run/blocks.py); None without one
    variance: dict | None  # how runs of a row differ (variance.py); None where nothing tells
    verdicts: dict[str, dict | None]  # by row: whether it trains the same model; None where that is not known, or stale
    not_in_trials: dict[str, list[str]]  # by row: the settings of its own that the proof is without
    scaling: list[dict]  # rows that differ in the number of devices only, as families (report/scaling.py)
    ladder: dict | None  # the open division (report/ladder.py); None without one
    profiles: dict[str, dict | None]  # by row: where a step's time goes; None where that is not known, or stale
    stale: dict[str, dict[str, str]]  # of `proof` and of `profile`: by row, why it is of other settings and left out
    data: dict  # what data/data.json says
    peak: dict | None  # what this machine's CPU computes at most, by precision; None where that was not measured
    network: list[dict] | None  # what communication costs (lockstep/network.py); None where that was not measured
    plans: dict[str, dict]  # by a plan's name: what is known of it; of the texts it dropped, only how many
    environment: dict | None  # one for all runs (environments.py); None without any
    manifest: dict | None  # when, where and by which command the results were asked for; None where that is not known
    damaged: list[str]  # the files beside the runs that can't be read, and why
    config: dict  # the configuration as plain values, defaults filled in
    studies: dict[str, dict]  # what each study found (report/studies.py); in summary.json each is a key of its own

    def as_json(self) -> dict:
        """Everything by the keys of summary.json."""
        return {name: value for name, value in vars(self).items() if name != "studies"} | self.studies

    @property
    def compared(self) -> "Summary":
        """Without the rows that make again what others have published, which have a section of their own.

        It is all where there are none of the one or of the other.
        """
        names = {row["row"] for row in self.rows if row["division"] != "published"}
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
        """The rows that have results, though some of their runs may have failed."""
        return [row for row in self.rows if row["train_seconds"] is not None]

    @property
    def succeeded_runs(self) -> list[dict]:
        """The runs of all rows that succeeded, disturbed ones among them."""
        return [run for runs in self.runs.values() for run in succeeded(runs)]


def gather(config: Config, results: Path) -> Summary:
    """The summary of what is in a results folder by now."""
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
    environments = [run["environment"] for several in runs.values() for run in several if run.get("environment")]
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


def _line(row: Row, runs: list[dict], verdict: dict | None) -> dict:
    """A row's line of summary.csv; how it compares with others is filled in by ranking.py."""
    good, bad = good_runs(runs), [run for run in runs if run["status"] != "ok"]
    return columns.line(row, good) | {
        "repeats": len(good),
        "disturbed": sum(bool(run["watch"]["disturbed"]) for run in succeeded(runs)),
        "proof": verdict["proof"] if verdict else "not-run",
        "status": bad[0]["status"] if bad else "ok",
        "reason": "; ".join(dict.fromkeys(run["reason"] for run in bad)),
    }


def _without_ids(plan: dict) -> dict:
    return plan | {"dropped": len(plan["dropped"])}
