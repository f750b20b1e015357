"""The verdicts of the proof, as its trials left them. Without PyTorch, which the report need not import for them."""

from pathlib import Path

from lockstep import paths
from lockstep.analysis import staleness
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.files import read_json, read_object
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


def missing(config: Config, row: Row, verdict: dict | None, results: Path) -> str:
    """Why a verdict, as `read` returns it, says nothing of its row as it is now; empty if it does, or can't be made."""
    if verdict:
        return staleness.folder(config, config.trial(row), results)
    return "" if row.unavailable else "it was not proven yet"


def another_model(row: Row, trial: Row, results: Path) -> str:
    """Why a row trains another model than `single` by design rather than by mistake; empty if it does not."""
    return row.other_model or (trial.splits_batch_statistics if has_batch_statistics(results) else "")


def has_batch_statistics(results: Path) -> bool:
    """Whether the prepared model normalises over the batch."""
    return read_json(paths.data_file(results))["batch_statistics"]


def not_compared(config: Config, results: Path) -> list[str]:
    """The rows whose times are compared with no others: they train another model, by design or by their verdict."""
    names = []
    for name, row in config.rows.items():
        trial, verdict = config.trial(row), read(config, row, results)
        wrong = verdict and verdict["proof"] in WRONG and not staleness.folder(config, trial, results)
        if wrong or another_model(row, trial, results):
            names.append(name)
    return names


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
