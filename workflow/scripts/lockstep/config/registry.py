"""The registry: a strategy is a file in lockstep/strategies, and a task a file in lockstep/tasks, found by its name.

A study (report/studies.py) may have strategies of its own, in `strategies` in its folder.

A strategy file defines a class `Strategy`. It may define literals, which are read without importing the file, and so
without importing torch or its framework. docs/adding-a-strategy.md says what each of them means. A message of SENDS has

    collective     one of rank/network.py
    numbers        how many numbers it has: weights (one for each weight of the model), trained (one for each that is
                   trained, with LoRA a few of them), powersgd, or a number for each piece
    bytes          the size of each number
    pieces         one, parameters, layers, or the option that sets the MiB of a bucket
    where          optional: the settings with which it is sent
    per            optional: micro_batch, or the option that sets the steps from one to the next; by default each step
    during         optional: the pass that it may overlap with, forward or backward, on the device types `hidden_on`
    in_a_row       optional: True where ranks compute nothing between its pieces

A task file defines a class `Task` (the interface is in tasks/_task.py), and may define the literals that
docs/adding-a-task.md explains.
"""

import ast
import importlib
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.errors import BadInput
from lockstep.paths import PROJECT, STRATEGIES, STUDIES, TASKS

DIVISIONS = ("closed", "open")  # of rows that are compared with each other; any other one is a study's name
# Literals that are lists of pairs: settings, and a reason that applies to rows with these settings.
PAIRS = ("REFUSED", "LOSSY", "OTHER_MODEL", "EQUAL_SHARES", "WHOLE_BATCH", "UNCOUNTED")
PAIRS += ("A_MICRO_BATCH_EACH", "ROUNDS_OF_MICRO_BATCHES")
PAIRS += ("OWN_BATCHES", "OWN_SCHEDULE", "OWN_OPTIMIZER", "COMPILES", "AWAITS_GRADIENTS")
# Literals that are lists of pairs, of which only the first that applies to a row counts. A strategy does not inherit
# them, since one that extends another may send something else.
FIRSTS = ("SENDS", "SHARDS")
# Literals that are lists of options, whose values are multiplied.
PRODUCTS = ("RANKS_PER_REPLICA", "DIVIDES_RANKS", "DIVIDES_HEADS", "DIVIDES_LAYERS")
# All literals that are lists of options.
OF_OPTIONS = (*PRODUCTS, "RESUMES_WITH_OTHER", "NUMBERS_DEVICE", "FILES", "SYNCS_BATCH_NORM")


@dataclass(frozen=True)
class Need:
    """An optional package, which a strategy, a launcher or a tracker needs."""

    package: str
    version: str  # the one that Lockstep was tested with
    command: str  # installs it
    only: dict[str, list]  # the rows that need it: those with one of the values for each key; empty: all

    @property
    def installed(self) -> str | None:
        """The installed version; None if there is none."""
        return version(self.package)


def version(package: str) -> str | None:
    """The installed version of a package, without the name of a build; None if it is not installed."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def folders() -> list[Path]:
    """The folders that strategies are in: the first is Lockstep's own, each of the others a study's."""
    return [STRATEGIES, *sorted(STUDIES.glob("*/strategies"))]


def studies() -> list[str]:
    return sorted(file.parent.name for file in STUDIES.glob("*/study.py"))


def names() -> list[str]:
    return sorted(file.stem for folder in folders() for file in folder.glob("[a-z]*.py"))


def ours() -> list[str]:
    """The strategies without those of studies."""
    return sorted(file.stem for file in STRATEGIES.glob("[a-z]*.py"))


def path(name: str) -> Path:
    """A strategy's file, which need not exist."""
    files = [folder / f"{name}.py" for folder in folders()]
    return next((file for file in files if file.is_file()), files[0])


def study(name: str) -> str:
    """The study in whose folder a strategy is; empty for Lockstep's own."""
    folder = path(name).parent
    return "" if folder == STRATEGIES else folder.parent.name


@cache
def literals(name: str) -> dict:
    """The literals of a strategy, read from its source."""
    values = {"OPTIONS": {}, "DEFAULTS": {}, "INHERITS": None, "ONE_DEVICE_ON": (), "ONE_PROCESS_ON": (), "NEEDS": {}}
    values |= {name: [] for name in PAIRS + FIRSTS + OF_OPTIONS}
    values |= {"DIVISION": study(name), "NO_FP64": "", "CHECKED": {}, "PLAIN_ON": (), "TRIES": []}
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
    """Add to a strategy's literals those that it inherits from a strategy that its class extends."""
    kept = parent["OPTIONS"] if values["INHERITS"] is None else values["INHERITS"]
    values["OPTIONS"] = {key: parent["OPTIONS"][key] for key in kept if key in parent["OPTIONS"]} | values["OPTIONS"]
    values |= {name: parent[name] | values[name] for name in ("NEEDS", "CHECKED")}
    values |= {name: parent[name] + values[name] for name in PAIRS}
    values |= {name: values[name] or parent[name] for name in ("DIVISION", "NO_FP64")}
    for name in OF_OPTIONS:
        within = dict.fromkeys([*parent[name], *values[name]])
        values[name] = [key for key in within if key in values["OPTIONS"]]


def on_one_machine(name: str, device: str) -> bool:
    """Whether rows of a strategy use one machine, however many there are, if they train on devices of this type."""
    return device in (*literals(name)["ONE_DEVICE_ON"], *literals(name)["ONE_PROCESS_ON"])


def matches(name: str, literal: str, settings: dict) -> list[tuple[str, str]]:
    """The pairs in a strategy's `literal` (one of PAIRS) that apply to `settings`: the settings, and the reason."""
    return [
        (", ".join(f"{key}: {settings[key]}" for key in values), reason)
        for values, reason in literals(name)[literal]
        if _apply(values, settings)
    ]


def first(name: str, literal: str, settings: dict) -> list | None:
    """The value of the first pair in a strategy's `literal` (one of FIRSTS) that applies to `settings`, or None.

    The literal may also be the name of another strategy, whose pairs are then used.
    """
    pairs = literals(name)[literal]
    if isinstance(pairs, str):
        return first(pairs, literal, settings)
    return next((found for values, found in pairs if _apply(values, settings)), None)


def sends(name: str, settings: dict) -> list[dict] | None:
    """The messages that a strategy's ranks send with these settings, by its SENDS; None if it does not declare them."""
    declared = first(name, "SENDS", settings)
    return declared and [message for message in declared if _apply(message.get("where", {}), settings)]


def _apply(values: dict, settings: dict) -> bool:
    """Whether `settings` has one of the allowed values for every key of `values`."""
    return all(key in settings and _is_one_of(settings[key], allowed) for key, allowed in values.items())


def _is_one_of(value, allowed: list | dict) -> bool:
    """Whether a setting has one of the allowed values, which are a list or a JSON schema."""
    if isinstance(allowed, list):
        return value in allowed
    from jsonschema import Draft202012Validator  # imported here, as ranks rarely need it

    return Draft202012Validator(allowed).is_valid(value)


def ranks_per_replica(name: str, options: dict) -> int:
    """The number of ranks that hold one replica of the model together, in a strategy's row with these options."""
    return product(name, "RANKS_PER_REPLICA", options)


def product(name: str, literal: str, options: dict) -> int:
    """The product of the options that a strategy's `literal` (one of PRODUCTS) names, in a row with these options."""
    return math.prod(options[key] for key in literals(name)[literal])


def needs(name: str) -> list[Need]:
    """The packages in a strategy's NEEDS."""
    return [
        Need(package, version, command, only[0] if only else {})
        for package, (version, command, *only) in literals(name)["NEEDS"].items()
    ]


def checks(name: str) -> dict[str, Callable]:
    """By option: the function that raises BadInput where the option's value contradicts the row."""
    checked = literals(name)["CHECKED"].items()
    return {option: importlib.import_module(f"lockstep.config.{file}").refuse for option, file in checked}


def load(name: str) -> type:
    """The strategy's class; imports its framework. Raises BadInput if it has a method by its earlier name."""
    strategy = importlib.import_module(f"lockstep.strategies.{name}").Strategy
    if hasattr(strategy, "prepare"):
        raise BadInput(f"{path(name)}: the method `prepare` is called `set_up` now, and would not be used. Rename it.")
    return strategy


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
    """The figures of a model's quality that tasks have, of all tasks together (config/qualities.py)."""
    return list(dict.fromkeys(name for task in tasks() for name in task_literals(task)["QUALITY"]))


def deciding_quality(task: str) -> str:
    """The figure by which models of a task are compared: the last of its QUALITY."""
    return task_literals(task)["QUALITY"][-1]


def format_scores(scores: dict) -> str:
    """The scores of a test in one line."""
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
    """Complete training scripts that do not use Lockstep (docs/scripts), by the strategy with which each trains."""
    # A script with its framework's name would be imported in place of the framework, so it is called with_deepspeed.py.
    return {file.stem.removeprefix("with_"): file for file in (PROJECT / "docs" / "scripts").glob("*.py")}
