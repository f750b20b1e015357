"""The registry: a strategy is a file in lockstep/strategies, and a task one in lockstep/tasks, found by its name.

A strategy file defines a class `Strategy`, and may hold literals that are read without importing it (and so
without importing torch or its framework):

    OPTIONS        its own keys in a configuration row, as JSON-schema properties with defaults; a key of the
                   configuration's train or hardware section here narrows it for this strategy, or widens it;
                   without a default, such a key keeps that of the section
    DEFAULTS       its own defaults of options that it takes over
    INHERITS       which options it takes over from the strategies that its class extends; without this, all
    ONE_DEVICE_ON  the device types on which it trains with one device, however many are asked for
    ONE_PROCESS_ON the device types on which one process drives all devices; on others each device has its own
    NEEDS          package -> (version, command that installs it); without it, rows of this strategy are unavailable;
                   where option -> values come third, only rows that have one of the values under each
    DIVISION       open where the strategy changes what a step computes, so that its rows are not ranked; published
                   where it makes again what others have published, flaws and all; else closed
    REFUSED        (values, reason) pairs: a row whose settings have one of these values under each key is refused;
                   in place of a list of values, a JSON schema may say which, as {"minimum": 2}
    LOSSY          the same: such a row can't train exactly the same model, by its nature
    OTHER_MODEL    the same: such a row trains another model than single, as the proof then finds, which is expected
    EQUAL_SHARES   the same: all ranks of such a row must train as many samples, so that the global batch is a multiple
    WHOLE_BATCH    the same: every rank of such a row trains the whole of each batch, so that its ledger has it so often
    RANKS_PER_REPLICA  its options of which the product is how many ranks hold one replica of the model together, and
                   see the same samples; without this, each rank has a replica of its own
                   of it and no failure; ({}, reason) is true of every row
    CONFIG_FILE    deepspeed where its option config_file names one for that engine; without this, it is its launcher's
    NO_FP64        why the strategy can't train in float64, in which the proof would look for mistakes; empty if it can

A task file defines a class `Task` (tasks/_task.py has what it must answer), and may hold the literal

    MODELS         the names of the models that it can make by itself, besides scratch
    EMBEDDED       the files, from the project's folder, that it reads where no data is named
    QUALITY        the columns of the table that say how good its models are; the last one is what rows are compared by
    TERMS          the names of the terms that its loss is the sum of; none where it has one only
    TAKES          keys of `train` that not every task takes (config/sections.py: of_some_tasks)
"""

import ast
import importlib
import importlib.metadata
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.paths import PROJECT, STRATEGIES, TASKS

# Literals that are lists of pairs: settings, and what is so where a row has them.
PAIRS = ("REFUSED", "LOSSY", "OTHER_MODEL", "EQUAL_SHARES", "WHOLE_BATCH")


@dataclass(frozen=True)
class Need:
    """A package that something needs which not all rows have: a strategy, or where its figures go."""

    package: str
    version: str  # with which Lockstep was tested
    command: str  # that installs it
    only: dict[str, list]  # which rows need it: those that have one of the values under each key; empty: all

    @property
    def installed(self) -> str | None:
        """The version that is installed here; None where none is."""
        return version(self.package)


def version(package: str) -> str | None:
    """The version of a package that is installed here, without a build's name; None where none is."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def names() -> list[str]:
    return sorted(file.stem for file in STRATEGIES.glob("[a-z]*.py"))


def path(name: str) -> Path:
    return STRATEGIES / f"{name}.py"


@cache
def literals(name: str) -> dict:
    """The literals of a strategy, read from its source."""
    values = {"OPTIONS": {}, "DEFAULTS": {}, "INHERITS": None, "ONE_DEVICE_ON": (), "ONE_PROCESS_ON": (), "NEEDS": {}}
    values |= {name: [] for name in PAIRS} | {"RANKS_PER_REPLICA": []}
    values |= {"DIVISION": "", "NO_FP64": "", "CONFIG_FILE": ""}
    statements = ast.parse(path(name).read_text(encoding="utf-8")).body
    _read_literals(statements, values)
    for statement in statements:
        if isinstance(statement, ast.ClassDef) and statement.name == "Strategy":
            for parent in statement.bases:  # class Strategy(ddp.Strategy)
                _inherit(values, literals(ast.unparse(parent).removesuffix(".Strategy")))
    for key, default in values["DEFAULTS"].items():
        values["OPTIONS"][key] = values["OPTIONS"][key] | {"default": default}
    return values | {"DIVISION": values["DIVISION"] or "closed"}


def _inherit(values: dict, parent: dict) -> None:
    """Add to a strategy's literals what it takes over from those of a strategy that its class extends."""
    kept = parent["OPTIONS"] if values["INHERITS"] is None else values["INHERITS"]
    values["OPTIONS"] = {key: parent["OPTIONS"][key] for key in kept if key in parent["OPTIONS"]} | values["OPTIONS"]
    values["NEEDS"] = parent["NEEDS"] | values["NEEDS"]
    values |= {name: parent[name] + values[name] for name in PAIRS}
    values |= {name: values[name] or parent[name] for name in ("DIVISION", "NO_FP64", "CONFIG_FILE")}
    within = dict.fromkeys([*parent["RANKS_PER_REPLICA"], *values["RANKS_PER_REPLICA"]])
    values["RANKS_PER_REPLICA"] = [key for key in within if key in values["OPTIONS"]]


def matches(name: str, literal: str, settings: dict) -> list[tuple[str, str]]:
    """Which of the pairs in a strategy's `literal` (one of PAIRS) hold for `settings`: what was asked, and why."""
    return [
        (", ".join(f"{key}: {settings[key]}" for key in values), reason)
        for values, reason in literals(name)[literal]
        if all(key in settings and _is_one_of(settings[key], allowed) for key, allowed in values.items())
    ]


def _is_one_of(value, allowed: list | dict) -> bool:
    """Whether a setting is among those that a pair names: in a list, or by a JSON schema."""
    if isinstance(allowed, list):
        return value in allowed
    from jsonschema import Draft202012Validator  # which a rank needs for nothing else

    return Draft202012Validator(allowed).is_valid(value)


def ranks_per_replica(name: str, options: dict) -> int:
    """How many ranks hold one replica of the model together, in a row of a strategy with these options."""
    return math.prod(options[key] for key in literals(name)["RANKS_PER_REPLICA"])


def needs(name: str) -> list[Need]:
    """What a strategy's NEEDS say."""
    return [
        Need(package, version, command, only[0] if only else {})
        for package, (version, command, *only) in literals(name)["NEEDS"].items()
    ]


def load(name: str) -> type:
    """The strategy's class; imports its framework."""
    return importlib.import_module(f"lockstep.strategies.{name}").Strategy


def tasks() -> list[str]:
    return sorted(file.stem.replace("_", "-") for file in TASKS.glob("[a-z]*.py"))


def task_path(name: str) -> Path:
    return TASKS / f"{name.replace('-', '_')}.py"


@cache
def task_literals(name: str) -> dict:
    """The literals of a task, read from its source."""
    values = {"MODELS": (), "EMBEDDED": (), "QUALITY": ("accuracy", "macro_f1"), "TERMS": (), "TAKES": ()}
    _read_literals(ast.parse(task_path(name).read_text(encoding="utf-8")).body, values)
    return values


def qualities() -> list[str]:
    """The columns of the table that say how good models are, of all tasks; a task has some of them."""
    return list(dict.fromkeys(name for task in tasks() for name in task_literals(task)["QUALITY"]))


def deciding_quality(task: str) -> str:
    """The figure by which models of a task are compared: the last of its QUALITY."""
    return task_literals(task)["QUALITY"][-1]


def format_scores(scores: dict) -> str:
    """The results of a test, in one line."""
    figures = (f"{name} {scores[name]:.4f}" for name in qualities() if name in scores)
    return f"support {scores['support']}, {', '.join(figures)}"


def _read_literals(statements: list[ast.stmt], values: dict) -> None:
    """Fill `values` with the literals that these statements assign to the names in it."""
    for statement in statements:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in values:
            values[ast.unparse(statement.targets[0])] = ast.literal_eval(statement.value)


def load_task(name: str) -> type:
    """The task's class."""
    return importlib.import_module(f"lockstep.tasks.{name.replace('-', '_')}").Task


def own_scripts() -> dict[str, Path]:
    """The whole scripts that train by a strategy, without anything of Lockstep's (docs/scripts), by the strategy."""
    # A script that is called as its framework would be imported in place of it.
    return {file.stem.removeprefix("with_"): file for file in (PROJECT / "docs" / "scripts").glob("*.py")}
