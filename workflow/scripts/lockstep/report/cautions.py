"""The last line: what not to conclude from the other ones."""

import math

from lockstep.analysis import blocks
from lockstep.config import registry
from lockstep.config.hardware import shares_cores, shares_gpus
from lockstep.config.qualities import QUALITIES
from lockstep.proof.fairness import alike, other_versions
from lockstep.proof.verdicts import PROVEN
from lockstep.report import ladder
from lockstep.report.conditions import of_images
from lockstep.report.reading import good_runs, trusted
from lockstep.report.summary import Summary
from lockstep.report.words import Text, join, say, some
from lockstep.run.record import Tested

SAME = ("cpu", "cores", "gpus", "python", "commit")


def warning(summary: Summary) -> Text | None:
    """The last line: what not to conclude from the other lines."""
    warnings = _warnings(summary) if summary.finished_rows else []
    return say("mind", warnings=join(warnings, say("semicolon"))) if warnings else None


def count(summary: Summary) -> int:
    return len(_warnings(summary)) if summary.finished_rows else 0


def _warnings(summary: Summary) -> list[Text]:
    rows, done = summary.rows, summary.finished_rows

    def named(key: str, names: list[str], **figures: int) -> list[Text]:
        return [say(key, rows=some(names), **figures)] if names else []

    lost = [row["row"] for row in done if not trusted(summary.runs[row["row"]])]
    disturbed = sum(row["disturbed"] for row in done if row["row"] not in lost)
    runs = summary.succeeded_runs
    warnings = [say("warn_quick")] if summary.config["quick"] else []
    warnings += named("warn_unequal", [row["row"] for row in done if row["proof"] == "unequal"])
    warnings += named("warn_proof_failed", [row["row"] for row in done if row["proof"] == "failed"])
    warnings += named("warn_not_run", [row["row"] for row in done if row["proof"] == "not-run"])
    blunt = [name for name, verdict in summary.verdicts.items() if verdict and _is_blunt(verdict)]
    warnings += named("warn_blunt", blunt)
    warnings += named("warn_failed", [row["row"] for row in rows if row["status"] == "failed"])
    warnings += named("warn_stale", [row["row"] for row in rows if row["status"] == "stale"])
    warnings += named("warn_unavailable", [row["row"] for row in rows if row["status"] == "unavailable"])
    warnings += named("warn_only_disturbed", lost)
    warnings += named("warn_apart", summary.apart)
    used = {row["row"]: _hardware(row, summary) for row in done}
    warnings += named("warn_shared", [name for name, asked in used.items() if shares_gpus(asked)])
    crowded = [name for name, asked in used.items() if shares_cores(asked, summary.environment["cores"])]
    warnings += named("warn_shared_cores", crowded)
    if summary.statistics and summary.statistics["unlike_spreads"]:
        warnings.append(say("warn_spreads"))
    if disturbed:
        warnings.append(say("warn_disturbed", n=disturbed, all=len(runs)))
    if mixed := mixed_conditions(runs):
        warnings.append(say("warn_mixed", what=", ".join(mixed)))
    figure = QUALITIES[registry.deciding_quality(summary.config["task"])]
    if not any(ladder.learnt(good_runs(summary.runs[row["row"]]), figure) for row in done):
        warnings.append(say("warn_nothing_learnt"))
    if summary.data["synthetic"]:
        warnings.append(say(f"warn_synthetic{of_images(summary)}"))
    if all(row["device"] == "cpu" for row in done):
        warnings.append(say("warn_cpu"))
    if len(done) > 1 and not summary.config["vary_seed"]:
        warnings.append(say("warn_seed"))
    asked = {name: len(several) for name, several in summary.runs.items()}
    needed = {name: blocks.needed(summary.blocks, name, count) for name, count in asked.items()}
    few = [row["row"] for row in done if row["repeats"] < needed[row["row"]]]
    key = "warn_repeats"
    if few and all(row["repeats"] < blocks.ENOUGH_REPETITIONS for row in done):
        key = "warn_repeats_all"
    elif summary.blocks:
        key = "warn_repeats_contending"
    warnings += named(key, few, enough=blocks.ENOUGH_REPETITIONS)
    if len(precisions := list(dict.fromkeys(row["precision"] for row in done))) > 1:
        warnings.append(say("warn_precision", precisions=", ".join(precisions)))
    if any(row["division"] == "open" for row in done):
        warnings.append(say("warn_open"))
    return warnings


def _is_blunt(verdict: dict) -> bool:
    """Whether a row was proven within limits that are so wide that the milder deliberate mistake would pass, too."""
    return verdict["proof"] in PROVEN and (verdict.get("mistake_of_limit") or math.inf) <= 1


def mixed_conditions(runs: list[Tested]) -> list[str]:
    """What differs between runs though it should not: machine, commit, versions, data or initial weights."""
    same = (*SAME, "in_container")
    environments = [{name: run.environment.get(name) for name in same} | run.hashes | {"plan": ""} for run in runs]
    mixed = [
        name
        for name in environments[0]
        if not all(alike(name, environment, environments[0]) for environment in environments)
    ]
    first = runs[0].environment
    mixed += sorted({name for run in runs for name in other_versions(run.environment, first)})
    builds = {(run.environment.get("image"), run.environment.get("image_digest")) for run in runs}
    return mixed + ["build of an image"] * (len(builds) > len({image for image, _ in builds}))


def _hardware(row: dict, summary: Summary) -> dict:
    """The hardware that a row asked for (config/hardware.py)."""
    return good_runs(summary.runs[row["row"]])[0].asked["hardware"]
