"""Declare a key of the configuration once, with its default, meaning, limits, and what it decides.

The sections (config/sections.py) are dataclasses whose fields are such keys. The JSON schema, the defaults, the table
of keys in config/README.md, and the keys that comparisons ignore are all derived from them.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import get_args, get_origin

# What a key decides: the trained model; the speed, or what is evaluated on the way; or neither, like a port. A change
# of a key that decides nothing leaves existing runs up to date.
MODEL, SPEED, NOTHING = "model", "speed", "nothing"
WORDS = {  # JSON Schema's names of types
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    NoneType: "null",
}


@dataclass(frozen=True)
class Key:
    default: object
    description: str
    decides: str = MODEL
    off: object = None  # the value that switches it off, for runs that are not timed; None if it is part of training
    may_change: bool = False  # in a resumed run, which checks its consequences for the plan and the rates
    of: tuple[str, tuple[str, ...]] | None = None  # another key, and its values for which this key has a meaning
    of_some_tasks: bool = False  # only for tasks that list it in TAKES; others must leave it at its default


def key(default, description, one_of=(), items=(), values=(), decides=MODEL, off=None, may_change=False, of=None,
        of_some_tasks=False, **limits):  # fmt: skip
    """The field of a key. `limits`, and `items` and `values` for those of a list or mapping, are JSON Schema's."""
    limits = {"enum": list(one_of)} if one_of else limits
    about = Key(default, description, decides, off, may_change, of, of_some_tasks)
    return field(metadata={"key": about, "limits": limits, "items": dict(items), "values": dict(values)})


def section(of: type):
    """The field of a section with the keys of `of`, whose value is a plain mapping."""
    return field(metadata={"section": of})


@cache
def keys(section: type) -> dict[str, Key]:
    """The keys of a section, by name."""
    return {each.name: each.metadata["key"] for each in fields(section) if "key" in each.metadata}


def names(section: type, decides: str) -> tuple[str, ...]:
    """The names of a section's keys that decide `decides`."""
    return tuple(name for name, about in keys(section).items() if about.decides == decides)


def schema(section: type) -> dict:
    """The JSON schema of a section."""
    properties = {each.name: _property(each) for each in fields(section)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(each) -> dict:
    inner = each.metadata.get("section", each.type)
    if is_dataclass(inner):
        return schema(inner)
    about, limits = each.metadata["key"], each.metadata["limits"]
    typed = {} if "enum" in limits else _typed(each.type, each.metadata["items"], each.metadata["values"])
    return typed | limits | {"default": about.default, "description": about.description}


def _typed(annotation, items: dict, values: dict) -> dict:
    """The schema of a type; `items` and `values` are limits for the elements of its list and its mapping."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    words, inside = [], {}
    for kind in kinds:
        if get_origin(kind) is list:
            words.append("array")
            inside["items"] = items if "enum" in items else _typed(get_args(kind)[0], {}, {}) | items
        elif get_origin(kind) is dict:
            words.append("object")
            inside["additionalProperties"] = _typed(get_args(kind)[1], {}, {}) | values
        else:
            words.append(WORDS[kind])
    return {"type": words if len(words) > 1 else words[0]} | inside
