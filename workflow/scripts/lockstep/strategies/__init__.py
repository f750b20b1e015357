"""The registry: a strategy is a file in this folder, found by its name.

A strategy file defines a class `Strategy` and may begin with literals that are read without importing it (and so
without importing torch or its framework):

    OPTIONS        its own keys in a configuration row, as JSON-schema properties with defaults; a key of the
                   configuration's train or hardware section here narrows it for this strategy
    ONE_DEVICE_ON  the device types on which it trains with one device whatever the number of processes
"""

import ast
import importlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("[a-z]*.py"))


def path(name: str) -> Path:
    return FOLDER / f"{name}.py"


@cache
def literals(name: str) -> dict:
    """The OPTIONS and ONE_DEVICE_ON of a strategy, read from its source."""
    found = {"OPTIONS": {}, "ONE_DEVICE_ON": ()}
    for statement in ast.parse(path(name).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id in found:
            found[statement.targets[0].id] = ast.literal_eval(statement.value)
    return found


def load(name: str) -> type:
    """The strategy's class; imports its framework."""
    return importlib.import_module(f"lockstep.strategies.{name}").Strategy
