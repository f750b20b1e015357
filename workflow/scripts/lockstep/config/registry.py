"""The registry: a strategy is a file in lockstep/strategies, and a task a file in lockstep/tasks, found by its name.

A study (report/studies.py) may have strategies of its own, in `strategies` in its folder.

A strategy file defines a class `Strategy`. It may define these literals, which are read without importing the file, and
so without importing torch or its framework:

    OPTIONS        the strategy's own keys in a row, as JSON-schema properties with defaults; a key of the sections
                   train or hardware may appear here with other limits, and keeps the section's default if it has none
    DEFAULTS       other defaults for inherited options
    INHERITS       the options that it inherits from the strategies that its class extends; by default all
    ONE_DEVICE_ON  the device types on which it trains on one device, however many are asked for
    ONE_PROCESS_ON the device types on which one process drives all devices; on others each device has a process
    NEEDS          package -> (version, command that installs it); rows are unavailable without the package. An
                   optional third element, option -> values, restricts this to rows with one of the values for each key
    DIVISION       open if the strategy changes what a step computes, so that its rows are not ranked; by default
                   closed, and for a strategy of a study the study's name
    REFUSED        (values, reason) pairs: a row is refused if each key has one of its values; ({}, reason) applies to
                   every row. Instead of a list of values there may be a JSON schema, such as {"minimum": 2}
    LOSSY          such pairs for rows that can't train exactly the same model by design
    OTHER_MODEL    such pairs for rows that train another model than single by design; the proof reports this as
                   expected and not as a failure
    EQUAL_SHARES   such pairs for rows whose ranks need equal shares, so that the global batch must be a multiple
    A_MICRO_BATCH_EACH       such pairs for rows that need as many micro-batches as ranks hold a replica, or more
    ROUNDS_OF_MICRO_BATCHES  such pairs for rows that need a multiple of as many
    WHOLE_BATCH    such pairs for rows whose ranks each train the whole batch, so that the ledger has it once per rank
    OWN_BATCHES    such pairs for rows whose batches a framework's own loader makes
    OWN_SCHEDULE   such pairs for rows whose learning rate a framework steps. If a row with either of these two trains
                   another model by design, its runs report how they depart from the plan, and do not fail
    OWN_OPTIMIZER  such pairs for rows to which the proof can't give another optimizer
    RANKS_PER_REPLICA  options whose product is the number of ranks that hold one replica of the model together, and
                   see the same samples; by default each rank has a replica of its own
    DIVIDES_RANKS  options whose product must divide the number of ranks
    DIVIDES_HEADS  options whose product must divide the number of attention heads of the model
    RESUMES_WITH_OTHER  further options that may differ in a run that goes on from another's state (--resume); those in
                   the three products above may in any case
    NUMBERS_DEVICE options that number one of the row's devices, from 0; a row without that device is refused
    PLAIN_ON       the device types on which it runs the same program as single; there the report takes the ratio of
                   their times, which should be 1, as a control
    FILES          options that name a file of the user's, whose content then belongs to the row's settings
    CHECKED        option -> a file in lockstep/config, whose `refuse` raises BadInput if the option contradicts the row
    COMPILES       such pairs for rows that compile the model, which takes a compiler; the reason is what compiles it
    AWAITS_GRADIENTS such pairs for rows whose ranks wait for the gradient of every trained weight; the reason is what
                   to do if some weights of the model never get one
    SYNCS_BATCH_NORM options that, if true, take the statistics of batch normalisation over all replicas
    TRIES          changes of a row that the search for the fastest recipe tries, in this order (tuning.py)
    UNCOUNTED      such pairs for rows whose memory can't be counted without their devices (lockstep fits)
    SENDS          pairs (values, messages) of what its ranks send in a step, of which the first that applies counts, or
                   the name of a strategy that sends the same; without any that applies, or if it has None, no time is
                   foretold (lockstep which). A message has a `collective` of rank/network.py; `numbers`: weights (as
                   many as are trained), powersgd, or so many in each piece; `bytes` of each number; `pieces`: one,
                   parameters, layers, or the option that has the MiB of a bucket. Optional are `where`: the values with
                   which it is sent; `per`: micro_batch, or the option that has every how many steps (by default each
                   step); `during`: the pass that it may overlap with, forward or backward, on the device types
                   `hidden_on`
    SHARDS         such pairs of what a rank holds and updates only its share of: optimizer, gradients, weights
    NO_FP64        why the strategy can't train in float64, where the proof looks for mistakes; empty if it can

A task file defines a class `Task` (the interface is in tasks/_task.py). It may define these literals:

    MODELS         the names of models that it can create, besides scratch
    EMBEDDED       the files, relative to the project, that it reads if no data is named
    QUALITY        the table's columns for the quality of its models; rows are compared by the last one
    TERMS          the names of the terms that its loss is a sum of, if there are several
    TAKES          keys of `train` that not every task accepts (config/sections.py: of_some_tasks)
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
# Literals that are lists of pairs of which the first that applies counts. A strategy does not inherit them: one that
# extends another may send something else.
FIRSTS = ("SENDS", "SHARDS")
# Literals that are lists of options of which the product counts.
PRODUCTS = ("RANKS_PER_REPLICA", "DIVIDES_RANKS", "DIVIDES_HEADS")
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


def matches(name: str, literal: str, settings: dict) -> list[tuple[str, str]]:
    """The pairs in a strategy's `literal` (one of PAIRS) that apply to `settings`: the settings, and the reason."""
    return [
        (", ".join(f"{key}: {settings[key]}" for key in values), reason)
        for values, reason in literals(name)[literal]
        if _apply(values, settings)
    ]


def first(name: str, literal: str, settings: dict) -> list | None:
    """What the first pair of a strategy's `literal` (one of FIRSTS) that applies to `settings` has; None without any.

    Such a literal may be the name of a strategy, whose own counts.
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
    """Whether all of some values, each a list or a JSON schema, are those of `settings`."""
    return all(key in settings and _is_one_of(settings[key], allowed) for key, allowed in values.items())


def _is_one_of(value, allowed: list | dict) -> bool:
    """Whether a setting is one of those that a pair names, in a list or by a JSON schema."""
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
    """The table's columns for the quality of models, of all tasks; each task has some of them."""
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
    """The whole scripts that train by a strategy, without anything of Lockstep's (docs/scripts), by the strategy."""
    # A script that is called as its framework would be imported in place of it.
    return {file.stem.removeprefix("with_"): file for file in (PROJECT / "docs" / "scripts").glob("*.py")}
