"""The states that a run saves on its way, as its supervisor sees them: which of them it can go on from, and why not.

What they hold, and how they are written and read, is rank/resumption.py's.
"""

import datetime
import json
import shutil
from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.keys import keys
from lockstep.config.nested import ABSENT, differing, without
from lockstep.config.sections import Train
from lockstep.config.settings import Settings, deciding
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, RunFailed
from lockstep.files import hash_arrays, hash_text, read_json, verify
from lockstep.model.schedule import lr_factor
from lockstep.run import lifetime

# What may change, besides what decides nothing, between a state and the run that goes on from it. How long a run is,
# and its schedule, may; the steps and learning rates up to the state may not, and are compared by themselves.
MAY_CHANGE = {"train": [name for name, about in keys(Train).items() if about.may_change]}


def describe(settings: Settings, plan: Plan, step: int) -> dict:
    """What a state after `step` steps was made of, as its manifest.json says it."""
    data = read_json(Path(settings.data) / paths.ABOUT_DATA)
    factor = lr_factor(settings.train, plan.steps, plan.epochs)
    rates = [factor(number) for number in range(step)]
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
    return without(deciding(asked), MAY_CHANGE)


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

    With `anywhere`, the hardware may be another, and how many ranks hold a replica.
    """
    asked, asked_now = (_of_any_layout(about["asked"]) if anywhere else about["asked"] for about in (manifest, now))
    for name, *values in differing(asked, asked_now):
        was, now_is = (None if value is ABSENT else value for value in values)
        return f"it was made with another configuration ({name} was {was}, is {now_is})"
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


def _of_any_layout(asked: dict) -> dict:
    """Settings without the hardware, and without what says how ranks are laid out."""
    layout = {key for literal in registry.PRODUCTS for key in registry.literals(asked["strategy"])[literal]}
    options = {key: value for key, value in asked["options"].items() if key not in layout}
    return asked | {"hardware": None, "options": options}


def remove(folder: Path, but: Path | None = None) -> None:
    """Remove a run's states, whole and half-written, but one."""
    for state in (folder / paths.SAVED).glob("*"):
        if state != but:
            shutil.rmtree(state, ignore_errors=True)
    if but is None:
        shutil.rmtree(folder / paths.SAVED, ignore_errors=True)
