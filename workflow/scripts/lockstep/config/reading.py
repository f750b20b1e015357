"""Read the configuration: merge files and overrides, validate them, and build the dataclasses."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from lockstep.config import registry, schema, world_sizes, yaml_text
from lockstep.config.configuration import Config
from lockstep.config.keys import keys
from lockstep.config.machine import visible_gpus
from lockstep.config.resolving import resolve
from lockstep.config.row import read_row, refuse_foreign, with_batch
from lockstep.config.sections import AskedHardware, Data, Model, Predict, Profile, Shared, Train, Tune
from lockstep.errors import BadInput

DEFAULT, ON_GPUS = "config/config.yaml", "config/gpu.yaml"
# An environment variable that tells jobs, perhaps on other machines, whether the workflow uses the one for GPUs.
DECIDED = "LOCKSTEP_CONFIG_FOR_GPUS"
PATHS = (("data", "path"), ("model", "name"), ("predict", "file"))  # keys in which ~ means the user's home


def for_gpus(device: str) -> list[str]:
    """The configuration to read over the default one if none is named: the one for GPUs, if GPUs will train.

    device: hardware.device.
    """
    decided = os.environ.get(DECIDED)
    takes = decided == "yes" if decided else device != "cpu" and visible_gpus() > 0
    if takes and not decided:
        print(
            f"There are GPUs here, so {ON_GPUS} is used; for the small benchmark name {DEFAULT}, as in: lockstep bench"
            f" --configfile {DEFAULT}",
            file=sys.stderr,
        )
    return [ON_GPUS] if takes else []


def read(files: list[Path], overrides: list[str] = ()) -> Config:
    """Read YAML files, of which later ones override earlier ones, then `section.key=value` overrides.

    Of a mapping, in a file or as in `train={epochs: 1}`, only the keys that it has are overridden.
    """
    merged: dict = {}
    for file in files:
        _merge(merged, load_yaml(Path(file)))
    _merge(merged, overridden(overrides))
    return parse(merged, " + ".join(str(file) for file in files))


def overridden(overrides: list[str]) -> dict:
    """The keys that `section.key=value` overrides set, later ones over earlier ones, as in a file; values are text."""
    merged: dict = {}
    for override in overrides:
        path, equals, value = override.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise BadInput(f"--set {override}: expected key=value, as in --set data.limit=600")
        value = _mapping(value, f"--set {override}") if schema.takes_mapping(names) else value
        for key in reversed(names):
            value = {key: value}
        _merge(merged, value)
    return merged


def parse(raw: dict, where: str = "config") -> Config:
    """Validate a merged configuration and build the dataclasses. Raises BadInput, which names every wrong key."""
    values = schema.coerce(raw, schema.of_configuration())
    schema.check(values, schema.of_configuration(), where)
    values = _plain(schema.fill(values, schema.of_configuration()))
    _require_task(values["task"], where)
    _check_data(values["data"], where)
    _check_model(values["model"], values["task"], where)
    if not _order(values["rows"]):
        raise BadInput(f"{where}: rows: no row is left. Name one, as in rows: {{ddp: {{strategy: ddp}}}}.")
    shared = Shared(values["task"], Train(**values["train"]), AskedHardware(**values["hardware"]))
    asked = {name: values["train"][name] for name, key in keys(Train).items() if values["train"][name] != key.default}
    refuse_foreign(shared.train, asked, f"{where}: train")
    shared = replace(
        shared,
        train=with_batch(shared.train, values["train"], lambda: _devices(shared.hardware), f"{where}: train"),
    )
    values["rows"] = world_sizes.expand(values["rows"], shared, where)
    values["hardware"] = values["hardware"] | {"world_sizes": []}
    shared = replace(shared, hardware=replace(shared.hardware, world_sizes=[]))
    return Config(
        task=values["task"],
        data=Data(**values["data"]),
        model=Model(**values["model"]),
        train=shared.train,
        hardware=shared.hardware,
        predict=Predict(**values["predict"]),
        profile=Profile(**values["profile"]),
        tune=Tune(**values["tune"]),
        containers=values["containers"],
        rows={name: read_row(name, values["rows"][name], shared, where) for name in _order(values["rows"])},
        repeats=values["repeats"],
        budget=values["budget"],
        retries=values["retries"],
        trial_processes=values["trial_processes"],
        vary_seed=values["vary_seed"],
        quick=values["quick"],
        source=values,
    )


def _devices(hardware: AskedHardware) -> int:
    """The number of devices of the table, over all nodes."""
    return resolve(hardware).devices * hardware.nodes


def _require_task(task: str, where: str) -> None:
    if task not in registry.tasks():
        known = registry.tasks()
        raise BadInput(f"{where}: task: {task!r} is not one of {', '.join(known)}.{schema.hint(task, known)}")


def _check_data(data: dict, where: str) -> None:
    """Raise BadInput if keys of the section `data` contradict each other, or one lacks what it needs."""
    if abs(sum(data["splits"].values()) - 1) > 1e-6:
        raise BadInput(
            f"{where}: data.splits: train, dev and test must add up to 1, not {sum(data['splits'].values()):g}."
        )
    if data["url"] and not data["path"] and not data["sha256"]:
        raise BadInput(f"{where}: data.sha256: data.url needs it, so that everybody trains on the same data.")
    if data["hub"] and not data["path"] and not data["url"] and not data["revision"]:
        raise BadInput(
            f"{where}: data.revision: data.hub needs it (a commit hash), so that everybody trains on the same data."
        )


def _check_model(model: dict, task: str, where: str) -> None:
    """Raise BadInput if the section `model` names no model, or its sizes contradict each other."""
    name, file = model["name"], Model(**model).file
    if file and not Path(file).is_file():
        raise BadInput(f"{where}: model.name: {file} is not a file. Name an existing one, as in my_model.py:MyModel.")
    if Path(name).is_file():
        raise BadInput(f"{where}: model.name: {name} is a file. Name the class in it too, as in my_model.py:MyModel.")
    names = ["scratch", *registry.task_literals(task)["MODELS"]]
    if not (file or name in names or Path(name).is_dir() or model["revision"]):
        raise BadInput(
            f"{where}: model.revision: model.name {name} is neither a local folder, nor one of {', '.join(names)}, nor"
            " a class in a file (my_model.py:MyModel); a model of the hub needs a revision (a commit hash), so that"
            f" everybody starts from the same weights.{schema.hint(name, names)}"
        )
    if name == "scratch" and model["hidden_size"] % model["heads"]:
        raise BadInput(
            f"{where}: model.heads: {model['heads']} heads can't share model.hidden_size: {model['hidden_size']}"
            " evenly. Make it a multiple of heads."
        )


def _plain(values: dict) -> dict:
    """The configuration with ~ replaced by the user's home, and numbers as labels converted to names."""
    plain = {section: dict(value) if isinstance(value, dict) else value for section, value in values.items()}
    for section, key in PATHS:
        if plain[section][key]:
            plain[section][key] = os.path.expanduser(plain[section][key])
    if plain["data"]["labels"]:
        plain["data"]["labels"] = list(map(str, plain["data"]["labels"]))
    if plain["predict"]["label"] is not None:
        plain["predict"]["label"] = str(plain["predict"]["label"])
    return plain


def _order(rows: dict) -> list[str]:
    """The names of the rows that are not null, the default ones first; Snakemake would put overrides first."""
    default = schema.of_configuration()["properties"]["rows"]["default"]
    return [name for name in [*default, *(name for name in rows if name not in default)] if rows.get(name)]


def load_yaml(file: Path) -> dict:
    """A configuration file's keys and values.

    Raises BadInput if it has none, would run Python, or has a value that YAML reads otherwise than it looks.
    """
    try:
        value = yaml_text.load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}. Name an existing configuration file.") from None
    except yaml_text.Misread as error:
        raise BadInput(f"{file}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected keys and values, as in config/config.yaml.")
    if "__use_yte__" in value:
        raise BadInput(f"{file}: __use_yte__ would run Python from this file. Remove that line.")
    return value


def _mapping(text: str, where: str) -> dict | str:
    """The mapping that an override's value is in YAML; any other value as it is, whose type its key will tell."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = yaml_text.load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    return value if isinstance(value, dict) else text


def _merge(into: dict, update: dict) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
