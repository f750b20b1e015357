"""The verdicts of the proof, as its trials left them. Without PyTorch, which the report need not import for them."""

from pathlib import Path

from lockstep import paths
from lockstep.analysis import staleness
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.files import read_object
from lockstep.run import record_files

PROVEN = ("equal", "within-tolerance")  # the verdicts that say: the same model
WRONG = ("unequal", "failed")  # those that say: another one, or none


def read(config: Config, row: Row, results: Path) -> dict | None:
    """The stored verdict on a row, or `failed` with its trial's reason; None if there was no trial yet.

    A trial has few steps. If a timed run trained other samples, or with other learning rates, the verdict is unequal,
    too.
    """
    trial = config.trial(row)
    folder = results / trial.folder(1)
    if (folder / paths.VERDICT).is_file():
        verdict = read_object(folder / paths.VERDICT, ("proof", "reason", "distances", "steps", "world_size"))
        files = paths.run_files(results, paths.RECORD, row=row.name) if row.may_depart else ()
        finished = [record_files.read_run(file.parent) for file in files]
        departed = [reason for made in finished if not staleness.written(config, made) for reason in made.departed]
        if departed and verdict["proof"] != "unequal":
            verdict |= {"proof": "unequal", "by_nature": row.other_model, "reason": f"{row.other_model}: {departed[0]}"}
        return verdict
    if (folder / paths.FAILED).is_file():
        return failed(config, row, read_object(folder / paths.FAILED, ("reason",))["reason"])
    return None


def multiple(times: float) -> str:
    """A multiple as it is shown, with a decimal where it is below ten."""
    return f"{times:,.0f}" if times >= 10 else f"{times:.1f}"


def failed(config: Config, row: Row, reason: str) -> dict:
    """The verdict on a row whose trial failed."""
    return dict.fromkeys(("distances", "fp64", "steps"), None) | {
        "row": row.name,
        "world_size": config.trial(row).hardware.devices,
        "proof": "failed",
        "reason": reason,
        "lossy": row.lossy,
        "no_fp64": row.no_fp64,
    }
