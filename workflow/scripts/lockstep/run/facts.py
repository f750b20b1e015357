"""Declare a field of a record once, with its meaning, limits, and what is read where it is missing.

The types (run/record.py) are dataclasses whose fields are such facts. Their JSON schemas are derived from them.
"""

from dataclasses import MISSING, field, fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin

from lockstep.config.keys import WORDS


def fact(description: str = "", default=MISSING, items=(), values=(), **limits):
    """The field of a fact. `limits`, and `items` and `values` for those of a list or mapping, are JSON Schema's.

    default: what is read where the field is missing, as in files of earlier versions. A list or a mapping is copied.
    """
    about = {"description": description, "limits": limits, "items": dict(items), "values": dict(values)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def required(kind: type) -> list[str]:
    """The fields of a type that no version's files lack."""
    return [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]


def of(kind: type, raw: dict):
    """An instance of a type from its JSON. What is not declared is left out.

    Raises ValueError if a field is missing that has no default.
    """
    if missing := [name for name in required(kind) if name not in raw]:
        raise ValueError(f"{', '.join(missing)} is missing from a {kind.__name__}")
    return kind(**{each.name: _value(each.type, raw[each.name]) for each in fields(kind) if each.name in raw})


def _value(kind, raw):
    """A field's value of type `kind`, in which a declared type may be nested."""
    inside = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
    if inside is None or raw is None:
        return raw
    return [of(inside, each) for each in raw] if get_origin(kind) is list else of(inside, raw)


def schema(kind: type) -> dict:
    """The JSON schema of a type."""
    properties = {each.name: _typed(each.type, **each.metadata) for each in fields(kind)}
    return {"type": "object", "required": required(kind), "properties": properties}


def _typed(kind, description: str = "", limits=(), items=(), values=()) -> dict:
    about = {"description": description} if description else {}
    if isinstance(kind, UnionType):
        one, _ = get_args(kind)  # the other one is None
        typed = _typed(one, items=items, values=values)
        typed["type"] = [typed["type"], "null"]
    elif is_dataclass(kind):
        typed = schema(kind)
    elif get_origin(kind) is list:
        typed = {"type": "array", "items": _typed(get_args(kind)[0]) | dict(items)}
    elif get_origin(kind) is dict:
        typed = {"type": "object", "additionalProperties": _typed(get_args(kind)[1]) | dict(values)}
    else:
        typed = {"type": WORDS[kind]}
    return typed | about | dict(limits)
