"""The states that a run saves on its way, as its supervisor sees them: which of them it can go on from, and why not.

What they hold, and how they are written and read, is rank/resumption.py's.
"""

import datetime
import json
import shutil
from pathlib import Path

from lockstep import paths
from lockstep.config.settings import NOT_DECIDING, NOT_DECIDING_OF_TRAIN, Settings
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, RunFailed
from lockstep.files import hash_arrays, hash_text, read_json, verify
from lockstep.model.schedule import lr_factor
from lockstep.run import lifetime

# What may change of `train`, besides what decides nothing, between a state and the run that goes on from it. How long a
# run is, and its schedule, may; the plan's steps and the learning rates up to the state may not, and are compared by
# themselves.
FREE = ("epochs", "max_steps", "schedule", "power", "step_epochs", "gamma", "constant_epochs")
FREE += ("warmup", "warmup_start")
FREE += ("snapshot_every",)  # what is kept of the model on the way


def describe(settings: Settings, plan: Plan, step: int) -> dict:
    """What a state after `step` steps was made of, as its manifest.json says it."""
    data = read_json(Path(settings.data) / paths.ABOUT_DATA)
    share = lr_factor(settings.train, plan.steps, plan.epochs)
    rates = [share(number) for number in range(step)]
    return {
        "step": step,
        "steps": plan.steps,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "asked": _asked(settings),
        "data": {"data": data["hash"], "weights": data["weights"]},
        "plan": hash_arrays({"ids": plan.ids[: plan.starts[step]], "widths": plan.widths[:step]}),
        "rates": hash_text(json.dumps(rates)),
    }


def _asked(settings: Settings) -> dict:
    asked = settings.of_row() | {"dropout": settings.dropout}
    for key in ("row", "division", "plan"):
        del asked[key]
    asked["train"] = {key: value for key, value in asked["train"].items() if key not in FREE + NOT_DECIDING_OF_TRAIN}
    asked["hardware"] = {key: value for key, value in asked["hardware"].items() if key not in NOT_DECIDING}
    return asked


def find(folder: Path, settings: Settings, plan: Plan, say, anywhere: bool = False) -> Path | None:
    """The latest state in a run's `folder` that is whole, and that this run can go on from; None if there is none.

    `say` is told, in a sentence, of each that is there and is not taken. One made on other hardware, as by another
    number of processes, is taken only with `anywhere`. States are whole when every file is as it was
    written; one of the plan's last step is a finished run's, from which only a longer one goes on.
    """
    for state in paths.saved_states(folder):
        try:
            manifest = verify(state, "It is left out.")
            now = describe(settings, plan, manifest["step"]) if manifest["step"] <= plan.steps else None
        except (RunFailed, BadInput, KeyError, TypeError) as error:
            say(f"a saved state is damaged: {error}")
            continue
        if manifest["step"] >= plan.steps:
            continue
        if why := difference(manifest, now, anywhere):
            say(f"{state} is not gone on from: {why}")
            continue
        return state
    return None


def find_elsewhere(run: Path, settings: Settings, plan: Plan) -> Path:
    """The latest state of another run, on whatever hardware, that this one can go on from.

    Raises BadInput where `run` is not a folder of a run, is at work, or has none.
    """
    paths.must_be_run(run)
    lifetime.refuse_held([run])
    reasons: list[str] = []
    state = find(run, settings, plan, reasons.append, anywhere=True)
    if state:
        return state
    if not reasons:
        there = paths.saved_states(run)
        reasons = ["it is at its end; raise train.epochs" if there else "none is there; set train.checkpoint_every"]
    raise BadInput(f"--resume {run}: there is no state to go on from: {'; '.join(reasons)}.")


def difference(manifest: dict, now: dict, anywhere: bool = False) -> str:
    """Why the state of one manifest is not on the way of a run that another one describes; empty if it is.

    With `anywhere`, the hardware may be another.
    """
    asked, asked_now = (
        {**about["asked"], "hardware": None} if anywhere else about["asked"] for about in (manifest, now)
    )
    if asked != asked_now:
        return f"it was made with another configuration ({_first_difference(asked, asked_now)})"
    if manifest["data"] != now["data"]:
        return "data or initial weights have changed since"
    if manifest["plan"] != now["plan"]:
        return f"the plan's first {manifest['step']} steps are others now"
    if manifest["rates"] != now["rates"]:
        return (
            f"the learning rates of its {manifest['step']} steps would be others now, as the schedule is by the number"
            " of all steps; with schedule: constant, and warmup 0 or a number of steps, a run can be made longer"
        )
    return ""


def _first_difference(before: dict, now: dict, prefix: str = "") -> str:
    for key in sorted(before.keys() | now.keys()):
        ours, theirs = before.get(key), now.get(key)
        if ours != theirs:
            if isinstance(ours, dict) and isinstance(theirs, dict):
                return _first_difference(ours, theirs, f"{prefix}{key}.")
            return f"{prefix}{key} was {ours}, is {theirs}"
    return ""


def remove(folder: Path, but: Path | None = None) -> None:
    """Remove a run's states, whole and half-written, but one."""
    for state in (folder / paths.SAVED).glob("*"):
        if state != but:
            shutil.rmtree(state, ignore_errors=True)
    if but is None:
        shutil.rmtree(folder / paths.SAVED, ignore_errors=True)
