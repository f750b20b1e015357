"""Whether results were made with the settings and the data that their row has now."""

from dataclasses import asdict
from pathlib import Path

from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.keys import keys
from lockstep.config.nested import ABSENT, differing, without
from lockstep.config.row import Row
from lockstep.config.sections import Train
from lockstep.config.settings import deciding
from lockstep.errors import BadInput
from lockstep.files import read_json, read_object
from lockstep.paths import SETTINGS, data_file, plan_summary_file
from lockstep.run import record_files
from lockstep.run.record import Begun, Record

LISTED = 4  # how many settings a reason lists at most


def run(config: Config, row: Row, record: Begun, results: Path) -> str:
    """Why the record of a run does not match its row as it is now; empty if it does."""
    return _listed(differences(record.asked, _now(config, row)) + _data(config, row, _hashes(record), results))


def folder(config: Config, row: Row, results: Path) -> str:
    """Why the row's first repetition, proof or profile does not match the row as it is now; empty if it does.

    The comparison is by its settings.json, and by the hashes in its record.
    """
    own = results / row.folder(1)
    try:
        hashes = _hashes(record_files.read_run(own))
    except BadInput as error:
        return str(error)
    return _listed(differences(_read(own / SETTINGS), _now(config, row)) + _data(config, row, hashes, results))


def written(config: Config, record: Begun) -> str:
    """Why a record does not match its row in the configuration, on any machine; empty if it does.

    The values of settings that are `auto` or `all` may differ between machines.
    """
    row = config.repetition(config.rows[record.row], record.repeat)
    asked, train = asdict(row.asked), asdict(row.train)
    # A device has one process, and a record's folder is named by the number of processes.
    by_machine = {"hardware": ["processes", *(key for key, value in asked.items() if value in ("auto", "all"))]}
    recorded = record.asked.get("hardware", {})
    if registry.on_one_machine(row.strategy, recorded.get("device", "")):
        by_machine["hardware"] += ["nodes", "interface"]  # what is asked for all rows has no meaning for this one
    if asked["gpus"]:  # a row takes the first of them that it needs
        asked["gpus"] = sorted(asked["gpus"])[: recorded.get("gpu_count")]
    now = deciding({"strategy": row.strategy, "options": row.options, "train": train, "hardware": asked})
    if row.train.device_batch and record.asked["train"].get("device_batch"):
        # The global batch depends on the number of devices, and so on the machine.
        by_machine["train"] = ["global_batch"]
        now["train"]["device_batch"] = row.train.device_batch
    return _listed(differences(record.asked, without(now, by_machine) | {"dropout": config.model.dropout}))


def differences(recorded: dict, now: dict) -> list[str]:
    """The differences between settings that both have, such as `train.epochs 3, now 30`."""
    return [
        f"{name} {_word(before)}, now {_word(after)}"
        for name, before, after in differing(_complete(recorded), now)
        if ABSENT not in (before, after)
        and name != "plan"  # the plan is named by settings that are compared themselves
    ]


def _complete(asked: dict) -> dict:
    """Settings as this version has them: what an earlier one did not know was at its default.

    activation_checkpointing was an option of DeepSpeed's alone.
    """
    if "train" not in asked:
        return asked
    options = asked.get("options", {})
    moved = {name: options[name] for name in ("activation_checkpointing",) if name in options}
    return asked | {"train": {name: key.default for name, key in keys(Train).items()} | moved | asked["train"]}


def _hashes(record: Begun | None) -> dict[str, str]:
    """The hashes of what a run trained; empty if it has not succeeded."""
    return record.hashes if isinstance(record, Record) else {}


def _read(file: Path) -> dict:
    """The content of a file; empty if it is missing or damaged, which is reported elsewhere."""
    try:
        return read_object(file, ()) if file.is_file() else {}
    except BadInput:
        return {}


def _now(config: Config, row: Row) -> dict:
    return row.deciding() | ({"dropout": config.model.dropout} if row.kind.dropout else {})


def _data(config: Config, row: Row, hashes: dict, results: Path) -> list[str]:
    """How the present data differs from what the configuration asks for, and from that of a run with `hashes`."""
    about = read_json(data_file(results))
    differing = differences(about.get("asked", {}), config.data_settings)
    plan = plan_summary_file(results, row.plan_name)
    there = {"data": about["hash"], "weights": about["weights"]}
    there |= {"plan": read_json(plan)["hash"]} if plan.is_file() else {}
    other = [name for name, wanted in there.items() if hashes.get(name, wanted) != wanted]
    return differing + ([f"{' and '.join(other)} that have changed since"] if other else [])


def _listed(differing: list[str]) -> str:
    if not differing:
        return ""
    more = [f"and {len(differing) - LISTED} more"] if len(differing) > LISTED else []
    return f"made with other settings: {'; '.join(differing[:LISTED] + more)}"


def _word(value) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
