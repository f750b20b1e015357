"""The saved states of a run, as its supervisor sees them: from which one the run can continue, and why not from others.

rank/resumption.py defines their content, and writes and reads them.
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

# Settings that may differ between a state and the run that continues from it, besides those that do not affect results.
# The length of a run and its schedule may differ; the steps and learning rates up to the state may not, and are
# compared by themselves.
# A run goes on from it on machines whose networks have other names, too.
MAY_CHANGE = {"train": [name for name, about in keys(Train).items() if about.may_change], "hardware": ["interface"]}


def describe(settings: Settings, plan: Plan, step: int) -> dict:
    """What a state after `step` steps depends on, for its manifest.json."""
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
    """The latest complete state in a run's `folder` from which this run can continue; None if there is none.

    `say` is called with a sentence about each state that can't be used. A state from other hardware, such as another
    number of processes, is used only with `anywhere`. A state is complete if every file is as it was written. A state
    after the plan's last step belongs to a finished run; only a longer run continues from it.
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
            say(f"{state} is not used: {why}")
            continue
        return state
    return None


def find_elsewhere(run: Path, settings: Settings, plan: Plan) -> Path:
    """The latest state of another run, on any hardware, from which this run can continue.

    Raises BadInput if `run` is not a folder of a run, is running, or has no such state.
    """
    paths.must_be_run(run)
    lifetime.refuse_held([run])
    reasons: list[str] = []
    state = find(run, settings, plan, reasons.append, anywhere=True)
    if state:
        return state
    if not reasons and paths.saved_states(run):
        reasons = ["the run is finished; raise train.epochs, or train.max_steps"]
    elif not reasons:
        reasons = ["it has none; set train.checkpoint_every"]
    raise BadInput(f"--resume {run}: it has no state from which this run could continue: {'; '.join(reasons)}.")


def difference(manifest: dict, now: dict, anywhere: bool = False) -> str:
    """Why the run that `now` describes can't continue from the state of `manifest`; empty if it can.

    With `anywhere`, the hardware and the number of ranks per replica may differ.
    """
    asked, asked_now = (_of_any_layout(about["asked"]) if anywhere else about["asked"] for about in (manifest, now))
    for name, *values in differing(asked, asked_now):
        was, now_is = (None if value is ABSENT else value for value in values)
        return f"it was made with another configuration ({name} was {was}, is {now_is})"
    if manifest["data"] != now["data"]:
        return "data or initial weights have changed since"
    if manifest["plan"] != now["plan"]:
        return f"the plan's first {manifest['step']} steps have changed since"
    if manifest["rates"] != now["rates"]:
        return (
            f"the learning rates of its {manifest['step']} steps would differ now, because the schedule depends on the"
            " number of all steps; with schedule: constant, and warmup 0 or a number of steps, a run can be made longer"
        )
    return ""


def _of_any_layout(asked: dict) -> dict:
    """Settings without the hardware, and without the options that determine the layout of ranks."""
    literals = registry.literals(asked["strategy"])
    layout = {key for literal in (*registry.PRODUCTS, "RESUMES_WITH_OTHER") for key in literals[literal]}
    options = {key: value for key, value in asked["options"].items() if key not in layout}
    return asked | {"hardware": None, "options": options}


def remove(folder: Path, but: Path | None = None) -> None:
    """Remove a run's states, complete or not, except `but`."""
    for state in (folder / paths.SAVED).glob("*"):
        if state != but:
            shutil.rmtree(state, ignore_errors=True)
    if but is None:
        shutil.rmtree(folder / paths.SAVED, ignore_errors=True)
