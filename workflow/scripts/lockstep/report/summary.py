"""What all runs of a results folder come to: medians, ratios, places, and which runs they are made of.

It can be made at any moment: rows that have not run, or failed, keep their line, with the reason.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lockstep import paths, stats
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.hardware import device_count
from lockstep.config.qualities import QUALITIES
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import read_json, read_object
from lockstep.model import metrics
from lockstep.proof import parity
from lockstep.report import ladder, published
from lockstep.run import blocks, record, staleness
from lockstep.run.progress import WARMUP_STEPS

BASELINE = ladder.BASELINE
LOG_LINES = 15
MOST_STEPS = 100_000  # beyond which a window counts as one without end
# What is read of files that others may have changed.
PROFILE = ("seconds", "step_seconds", "exposed_by_difference")
PEAK, MANIFEST = ("cores", "flops_per_second"), ("time", "host", "command", "commit")
ENVIRONMENT = ("cpu", "cores", "gpus", "packages", "image")
LONG = ("installed", "torch_config")  # of an environment: in the report's own file, and not in that of all values
DATA = ("hash", "weights", "splits", "labels")
# summary.csv: users script against these names, so add freely and rename never.
COLUMNS = [
    "row",
    "strategy",
    "division",
    "device",
    "world_size",
    "devices",
    "nodes",
    "precision",
    "global_batch",
    "steps",
    "repeats",
    "train_seconds",
    "step_ms",
    "samples_per_second",
    "tokens_per_second",
    "startup_seconds",
    "speedup",
    "efficiency",
    "accuracy",
    "macro_f1",
    "final_loss",
    "peak_memory_mb",
    "proof",
    "status",
    "reason",
    "rank",
    "disturbed",
    "train_seconds_low",
    "train_seconds_high",
    "speedup_low",
    "speedup_high",
    "total_seconds",
    "mfu",
    "mfu_padded",
    "proportional_memory_mb",
    "reserved_memory_mb",
    "energy_joules",
    "memory_before_mb",
    "memory_by_gpu_mb",
    "reserved_by_gpu_mb",
    "nvml_memory_by_gpu_mb",
    "utilisation_by_gpu",
    "sm_mhz_by_gpu",
    "evaluation_seconds",
    "evaluation_samples_per_second",
    "perplexity",
    "cold_seconds",
    "pixel_accuracy",
    "miou",
]

# What one run measures; the columns of `measured`.
MEASURED = (
    *("train_seconds", "step_ms", "samples_per_second", "tokens_per_second", "startup_seconds", "total_seconds"),
    *("cold_seconds",),
    *("evaluation_seconds", "evaluation_samples_per_second", "accuracy", "macro_f1", "perplexity", "final_loss"),
    *("pixel_accuracy", "miou"),
    *("peak_memory_mb", "memory_before_mb", "reserved_memory_mb", "proportional_memory_mb", "energy_joules"),
)


@dataclass(frozen=True)
class Summary:
    """All that the report says, as plain values. Its fields, in this order, are the keys of summary.json.

    Users script against those keys, and report/comparison.py reads them: add freely and rename never. Where a comment
    says by row, the key is the row's name.
    """

    rows: list[dict]  # the lines of summary.csv, by COLUMNS
    runs: dict[str, list[dict]]  # by row: one of each repetition, as its record has it, with its test and environment
    ratios: dict[str, dict[str, dict]]  # by row, and by each that it is compared with: its time over that one's
    statistics: dict | None  # what the ranked rows can show (_compare); None where too few runs tell
    apart: list[str]  # the rows that no block connects with the rest
    blocks: dict | None  # the newest decision on further blocks of runs (run/blocks.py); None without one
    variance: dict | None  # how runs of a row differ (_variance); None where nothing tells
    verdicts: dict[str, dict | None]  # by row: whether it trains the same model; None where that is not known, or stale
    not_in_trials: dict[str, list[str]]  # by row: the settings of its own that the proof is without
    ladder: dict | None  # the open division (report/ladder.py); None without one
    profiles: dict[str, dict | None]  # by row: where a step's time goes; None where that is not known, or stale
    stale: dict[str, dict[str, str]]  # of `proof` and of `profile`: by row, why it is of other settings and left out
    data: dict  # what data/data.json says
    peak: dict | None  # what this machine's CPU computes at most, by precision; None where that was not measured
    plans: dict[str, dict]  # by a plan's name: what is known of it; of the texts it dropped, only how many
    environment: dict | None  # one for all runs (merge_environments); None without any
    manifest: dict | None  # when, where and by which command the results were asked for; None where that is not known
    damaged: list[str]  # the files beside the runs that can't be read, and why
    published: dict  # the published table, answered (report/published.py)
    config: dict  # the configuration as plain values, defaults filled in

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
    runs = {
        row.name: [
            _run(config, config.repetition(row, repeat), repeat, results)
            for repeat in blocks.repetitions(config, row, results)
        ]
        for row in config.rows.values()
    }
    damaged: list[str] = []
    verdicts = {row.name: _verdict(config, row, results) for row in config.rows.values()}
    profiles = {row.name: None for row in config.rows.values()}
    if config.profile.steps:
        files = {row.name: results / config.profiled(row).folder(1) / paths.PROFILE for row in config.rows.values()}
        profiles = {name: _optional(file, PROFILE, damaged) for name, file in files.items()}
    stale = {
        "proof": _stale(config, verdicts, config.trial, results),
        "profile": _stale(config, profiles, config.profiled, results),
    }
    peak = _optional(paths.peak_file(results), PEAK, damaged)
    manifest = _optional(paths.manifest_file(results), MANIFEST, damaged)
    rows = [_line(row, runs[row.name], verdicts[row.name], peak) for row in config.rows.values()]
    ratios, statistics, apart = _compare(rows, runs, config)
    timed = {name: good_runs(several) for name, several in runs.items()}
    environments = [run["environment"] for several in runs.values() for run in several if run.get("environment")]
    return Summary(
        rows=rows,
        runs=runs,
        ratios=ratios,
        statistics=statistics,
        apart=apart,
        blocks=blocks.last(config, results),
        variance=_variance(config, runs, results),
        verdicts=verdicts,
        not_in_trials={row.name: config.not_in_trial(row) for row in config.rows.values()},
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
        plans={
            name: _without_ids(read_json(about))
            for name in dict.fromkeys(row.plan_name for row in config.rows.values())
            if (about := paths.plan_summary_file(results, name)).is_file()
        },
        environment=merge_environments(environments),
        manifest=manifest,
        damaged=damaged,
        published=published.answer(config, rows, timed, verdicts),
        config=config.source,
    )


def _variance(config: Config, runs: dict[str, list[dict]], results: Path) -> dict | None:
    """How runs of a row differ: between `launch`es, and from `step` to step; of how many `steps` a run is, and which
    number of them would tell most in the same time (`best_steps`, None: as many as can be). None where nothing tells,
    as where every repetition has a seed of its own and so other texts in each step.
    """
    if config.vary_seed:
        return None
    rows, startup, step, counts = [], [], [], []
    for row in config.rows.values():
        good = [run for run in good_runs(runs[row.name]) if row.division == "closed" and trusted([run])]
        times = [_step_seconds(results / row.folder(run["repeat"]) / paths.STEPS) for run in good]
        if len(times) > 1 and len({len(seconds) for seconds in times}) == 1 and len(times[0]) > 1:
            rows.append(np.stack(times))
            startup += [run["wall_seconds"] - run["clock"]["train_seconds"] for run in good]
            step += [run["clock"]["step_seconds_median"] for run in good]
            counts += [run["steps"] for run in good]
    variance = stats.variance(rows)
    if variance is None:
        return None
    best = variance.best_steps(float(np.median(startup)), float(np.median(step)))
    most = round(best) if best < MOST_STEPS else None
    return asdict(variance) | {"steps": int(np.median(counts)), "best_steps": most}


def _step_seconds(file: Path) -> np.ndarray:
    """The steady steps' seconds by the clock of the rank that took longest; none where that is not known."""
    try:
        ranks = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.zeros(0)  # made before steps were kept, or damaged, which check.py tells of
    return ranks[ranks.sum(axis=1).argmax(), WARMUP_STEPS:]


def _stale(config: Config, by_row: dict[str, dict | None], run_of, results: Path) -> dict[str, str]:
    """Which of the verdicts or profiles in `by_row` are of other settings, and why; they are taken out of it."""
    reasons = {
        name: why
        for name, made in by_row.items()
        if made and (why := staleness.folder(config, run_of(config.rows[name]), results))
    }
    by_row |= dict.fromkeys(reasons)
    return reasons


def merge_environments(environments: list[dict]) -> dict | None:
    """One environment for all runs; where they differ, all values beside each other. `images`: each image's digests.

    A row's image lacks what only others need, which is no difference.
    """
    if not environments:
        return None
    names = dict.fromkeys(name for environment in environments for name in environment["packages"])
    versions = {name: _each(environment["packages"].get(name) for environment in environments) for name in names}
    packages = {name: version for name, version in versions.items() if version}
    images: dict[str, list[str]] = {}
    for environment in environments:
        if environment["image"]:
            digests = images.setdefault(environment["image"], [])
            digests += [environment["image_digest"]] * (environment["image_digest"] not in digests)
    told = ("system", "kernel", "python", "cuda", "cudnn", "nccl", "mpi", "governor", "virtual_machine", "compiler")
    values = {name: _each(environment.get(name) for environment in environments) for name in told}
    kinds = [environment.get("in_container") for environment in environments]
    values["in_container"] = _each(kind or "no container" for kind in kinds) if any(kinds) else None
    most = max(environments, key=lambda environment: len(environment.get("gpus") or ()))  # some rows see one GPU only
    return most | values | {"packages": packages, "images": images}


def _each(values) -> str | None:
    """Values that should be one: each that there is, once."""
    return " / ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None


def _optional(file: Path, keys: tuple[str, ...], damaged: list[str]) -> dict | None:
    """What a file says that the table can do without; None without it. What can't be read is added to `damaged`."""
    try:
        return read_object(file, keys) if file.is_file() else None
    except BadInput as error:
        damaged.append(str(error))
        return None


def _verdict(config: Config, row: Row, results: Path) -> dict | None:
    """The verdict on a row; where it can't be read, the row is not proven."""
    try:
        return parity.read(config, row, results)
    except BadInput as error:
        return parity.failed(config, row, str(error))


def _without_ids(plan: dict) -> dict:
    return plan | {"dropped": len(plan["dropped"])}


def _run(config: Config, row: Row, repeat: int, results: Path) -> dict:
    """What is known of one run. One whose files can't be read has failed, and costs the others nothing."""
    try:
        return _read(config, row, repeat, results)
    except (BadInput, OSError) as error:
        return {"status": "failed", "reason": str(error), "repeat": repeat, "log_end": []}


def _read(config: Config, row: Row, repeat: int, results: Path) -> dict:
    folder = results / row.folder(repeat)
    missing = {"status": "skipped", "reason": "not run yet"}
    if row.unavailable:
        missing = {"status": "unavailable", "reason": row.unavailable}
    run = {"log_end": []} | (record.read_run(folder) or missing) | {"repeat": repeat}
    if "asked" in run and (why := staleness.run(config, row, run, results)):
        return run | {"status": "stale", "reason": why}
    if run["status"] == "ok":
        tested = folder / paths.TEST_REPORT
        if not tested.is_file():
            if (folder / paths.UNTESTED).is_file():
                return run | {
                    "status": "failed",
                    "reason": read_object(folder / paths.UNTESTED, ("reason",))["reason"],
                }
            return run | {"status": "skipped", "reason": "trained, but not converted and tested yet"}
        run["test"] = read_object(tested, _tested(config.task))
        run["test"]["text"] = (folder / paths.TEST_TEXT).read_text(encoding="utf-8")
        run["environment"] = read_object(folder / paths.ENVIRONMENT, ENVIRONMENT)
        for name in LONG:
            run["environment"].pop(name, None)
    elif run["status"] == "failed" and Path(run["log"]).is_file():
        log = Path(run["log"]).read_text(encoding="utf-8", errors="replace")
        run["log_end"] = log.splitlines()[-LOG_LINES:]
    return run


def _tested(task: str) -> tuple[str, ...]:
    """What is read of a task's report on the test split."""
    names = registry.task_literals(task)["QUALITY"]
    return tuple(dict.fromkeys([*names, "support", *(key for name in names for key in QUALITIES[name].reads)]))


def good_runs(runs: list[dict]) -> list[dict]:
    """The runs that a row's medians are made of: those that succeeded undisturbed; all that did where none was so."""
    done = succeeded(runs)
    return [run for run in done if not run["watch"]["disturbed"]] or done


def succeeded(runs: list[dict]) -> list[dict]:
    return [run for run in runs if run["status"] == "ok"]


def trusted(runs: list[dict]) -> bool:
    """Whether a row has a run that nothing disturbed."""
    return any(not run["watch"]["disturbed"] for run in succeeded(runs))


def _line(row: Row, runs: list[dict], verdict: dict | None, peak: dict | None) -> dict:
    """One line of summary.csv."""
    good, bad = good_runs(runs), [run for run in runs if run["status"] != "ok"]
    line = dict.fromkeys(COLUMNS) | {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "device": row.hardware.device,
        "world_size": row.hardware.devices,
        "devices": device_count(asdict(row.hardware)),
        "nodes": row.hardware.nodes,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "repeats": len(good),
        "disturbed": sum(bool(run["watch"]["disturbed"]) for run in succeeded(runs)),
        "proof": verdict["proof"] if verdict else "not-run",
        "status": bad[0]["status"] if bad else "ok",
        "reason": "; ".join(dict.fromkeys(run["reason"] for run in bad)),
    }
    if not good:
        return line
    measured = [_figures(row, run, peak) for run in good]
    seconds = stats.spread([figures["train_seconds"] for figures in measured])
    medians = {
        name: stats.spread(values).median if None not in values else None
        for name in measured[0]
        for values in [[figures[name] for figures in measured]]
    }
    return (
        line
        | medians
        # As it ran, whatever the configuration says by now.
        | {name: good[0][name] for name in ("precision", "global_batch", "world_size", "steps")}
        | {"devices": device_count(good[0]["asked"]["hardware"])}
        | {"train_seconds_low": seconds.low, "train_seconds_high": seconds.high}
        | _by_gpu(good[0])
    )


def _by_gpu(run: dict) -> dict[str, str | None]:
    """What one run measured of each of its GPUs, by column; None without GPUs, or where they do not tell."""
    watched = run["watch"].get("gpus", ())
    figures = {
        "memory_by_gpu_mb": run.get("memory_by_gpu", ()),
        "reserved_by_gpu_mb": run.get("reserved_by_gpu", ()),
        "nvml_memory_by_gpu_mb": [gpu["memory_mb"] for gpu in watched],
        "utilisation_by_gpu": [gpu["utilisation"] for gpu in watched],
        "sm_mhz_by_gpu": [gpu["sm_mhz"] for gpu in watched],
    }
    return {
        # Memory adds up, the others do not.
        name: (" + " if name.endswith("_mb") else " / ").join(f"{value:.0f}" for value in values)
        if values and None not in values
        else None
        for name, values in figures.items()
    }


def _figures(row: Row, run: dict, peak: dict | None) -> dict:
    """What one run measured, by column. None where a device does not tell."""
    seconds, work = run["clock"]["train_seconds"], run["work"]
    devices, per_device = peak_of(row, run, peak)
    return measured(run) | {
        "mfu": metrics.utilisation(work["flops"], seconds, devices, per_device),
        "mfu_padded": metrics.utilisation(work["padded_flops"], seconds, devices, per_device),
    }


def measured(run: dict) -> dict:
    """What the record and the test of one run have measured, by column. None where a device does not tell."""
    memory = run["memory"]
    evaluation = run.get("evaluation")
    energy = [run["energy"][name] for name in ("gpu_joules", "cpu_joules") if run["energy"][name] is not None]
    return {
        "train_seconds": run["clock"]["train_seconds"],
        "step_ms": run["clock"]["step_seconds_median"] * 1000,
        "samples_per_second": run["throughput"]["samples_per_second"],
        "tokens_per_second": run["throughput"]["tokens_per_second"],
        "startup_seconds": run["clock"]["first_step_seconds"],
        "total_seconds": run["clock"]["total_seconds"],
        "cold_seconds": run["clock"].get("cold_seconds"),
        "evaluation_seconds": evaluation["seconds"] if evaluation else None,
        "evaluation_samples_per_second": evaluation["samples_per_second"] if evaluation else None,
        **{name: run["test"].get(name) for name in registry.qualities()},
        "final_loss": run["losses"][-1],
        "peak_memory_mb": memory["peak_mb"],
        "memory_before_mb": memory.get("before_mb"),
        "reserved_memory_mb": memory["reserved_mb"],
        "proportional_memory_mb": memory["proportional_mb"],
        "energy_joules": sum(energy) if energy else None,
    }


def peak_of(row: Row, run: dict, peak: dict | None) -> tuple[float, float | None]:
    """How many GPUs or CPU cores a run had, and the peak of each in operations per second."""
    if row.hardware.device == "cuda":
        tf32 = row.precision == "fp32" and run["settings"]["matmul"] != "highest"
        name = (run["environment"]["gpus"] or [""])[0]
        gpus = row.hardware.gpu_count * row.hardware.nodes
        return gpus, metrics.device_peak(name, "tf32" if tf32 else row.precision)
    cores = row.hardware.devices * row.hardware.threads
    rate = (peak or {"flops_per_second": {}})["flops_per_second"].get(row.precision)
    return cores, rate / peak["cores"] if rate else None


def _compare(rows: list[dict], runs: dict[str, list[dict]], config: Config) -> tuple[dict, dict | None, list[str]]:
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
    most, apart = None, []
    for members in kinds.values():
        sound = {name: seconds for name, seconds in members.items() if trusted(runs[name])}
        fit = stats.Fit(sound)
        baseline = next((name for name in members if by_name[name]["strategy"] == BASELINE), None)
        closed = _together({name: sound[name] for name in sound if by_name[name]["division"] == "closed"}, baseline)
        ranked = closed.ranks()
        most = max(most, closed, key=lambda fit: len(fit.rows)) if most else closed
        for name in members:
            row = by_name[name]
            row["rank"] = ranked.get(name)
            against = {other: _ratio(fit, members, name, other) for other in members}
            ratios[name] = {other: asdict(ratio) for other, ratio in against.items() if ratio}
            alone = not any(against[other] for other in closed.rows or members if other != name)
            if alone and len(members) > 1 and name not in closed.rows:
                apart.append(name)
            if baseline and (ratio := against[baseline]):
                row["speedup"] = 1 / ratio.value
                if ratio.kind:
                    row["speedup_low"], row["speedup_high"] = 1 / ratio.high, 1 / ratio.low
                row["efficiency"] = row["speedup"] * by_name[baseline]["devices"] / row["devices"]
    if not most or most.sigma is None:
        return ratios, None, apart
    names = ("sigma", "resolution", "unlike_spreads")
    return ratios, dict(zip(names, (most.sigma, most.resolution(), most.unlike_spreads()), strict=True)), apart


def _together(seconds: dict[str, dict[stats.Block, float]], baseline: str | None) -> stats.Fit:
    """The fit of the most rows that blocks connect; of two groups as large, of the baseline's."""
    fit = stats.Fit(seconds)
    groups = fit.groups()
    largest = max(groups, key=lambda group: (len(group), baseline in group), default=[])
    return fit if len(groups) < 2 else stats.Fit({name: seconds[name] for name in largest})


def _ratio(fit: stats.Fit, members: dict[str, dict[stats.Block, float]], ours: str, theirs: str) -> stats.Ratio | None:
    """The ratio of two rows by the `fit` of all undisturbed ones; a disturbed one is fitted beside those by itself."""
    disturbed = {name: members[name] for name in (ours, theirs) if name not in fit.seconds}
    return (stats.Fit(fit.seconds | disturbed) if disturbed else fit).ratio(ours, theirs)
