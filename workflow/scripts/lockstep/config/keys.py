"""What a key of the configuration is declared with, once: its default, its meaning, its limits, and what it decides.

The sections (config/sections.py) are dataclasses whose fields are such keys. The JSON schema follows from them, and so
do defaults, the table of all keys in config/README.md, and who leaves which key out of a comparison.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import get_args, get_origin

# What a key decides of a run: which model it ends with; how fast it is, or what is looked at on the way; or neither,
# as a port, so that a change of it makes no run out of date.
MODEL, SPEED, NOTHING = "model", "speed", "nothing"
WORDS = {  # of JSON Schema, for types
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
    off: object = None  # what it is in runs that are not the timed ones, where it asks for something beside training
    may_change: bool = False  # between a saved state and the run that goes on from it, which looks at what comes of it
    of: tuple[str, tuple[str, ...]] | None = None  # the key, and its values, that alone take this one
    of_some_tasks: bool = False  # those that have it among their TAKES; elsewhere it must be what it is by default


def key(default, description, one_of=(), items=(), values=(), decides=MODEL, off=None, may_change=False, of=None,
        of_some_tasks=False, **limits):  # fmt: skip
    """The field of a key. `limits` are JSON Schema's; `items` and `values` those of what a list or a mapping holds."""
    limits = {"enum": list(one_of)} if one_of else limits
    about = Key(default, description, decides, off, may_change, of, of_some_tasks)
    return field(metadata={"key": about, "limits": limits, "items": dict(items), "values": dict(values)})


def section(of: type):
    """The field of a section whose keys `of` has, and whose value is a mapping."""
    return field(metadata={"section": of})


@cache
def keys(section: type) -> dict[str, Key]:
    """The keys of a section, by their names."""
    return {each.name: each.metadata["key"] for each in fields(section) if "key" in each.metadata}


def names(section: type, decides: str) -> tuple[str, ...]:
    """The keys of a section that decide this."""
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
    """The schema of a type; `items` and `values` limit what its list and its mapping hold."""
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
