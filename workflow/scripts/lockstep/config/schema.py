"""JSON Schema for configurations: convert strings to the right type, fill in defaults, and report readable errors."""

import difflib
import math
from collections.abc import Iterator
from functools import cache

import yaml
from jsonschema import Draft202012Validator

from lockstep.config import keys, registry, yaml_text
from lockstep.config.sections import Asked
from lockstep.errors import BadInput


def coerce(value, schema: dict):
    """Convert strings to the schema's type, since nested values of `snakemake --config` arrive as strings."""
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties") or {}
        return {key: coerce(item, properties.get(key, others)) for key, item in value.items()}
    if isinstance(value, list):
        return [coerce(item, schema.get("items", {})) for item in value]
    if isinstance(value, str) and "enum" in schema:  # an enum may contain numbers and booleans, and has no type then
        words = {str(choice).lower(): choice for choice in schema["enum"] if not isinstance(choice, str)}
        return value if value in schema["enum"] else words.get(value.lower(), value)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = "string" in kinds and "pattern" not in schema  # any text is a value, such as the name of a label
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds and not names:
        return int(value)  # JSON Schema accepts 8.0 as an integer, but the code that uses it may not
    if not isinstance(value, str) or not kinds:
        return value
    if "null" in kinds and value in ("null", "None", "~"):
        return None
    if "boolean" in kinds:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        if "integer" in kinds and value.lstrip("-").isdecimal():
            return value if names and str(int(value)) != value else int(value)  # "01" is a name
        if "number" in kinds:
            return float(value)
        if "array" in kinds or "object" in kinds:
            read = yaml_text.load(value)
            return value if isinstance(read, str) else coerce(read, schema)
    except yaml_text.Misread as error:
        raise BadInput(error.problem) from None
    except (ValueError, yaml.YAMLError):
        pass  # the schema's check reports what was expected
    return value


def fill(value, schema: dict):
    """Add every default in the schema."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for key, inner in schema["properties"].items():
        if key in filled:
            filled[key] = fill(filled[key], inner)
        elif "default" in inner:
            filled[key] = inner["default"]
        elif "properties" in inner:
            filled[key] = fill({}, inner)
    return filled


def check(value: dict, schema: dict, where: str) -> None:
    problems = [f"{key}: {number} is not a finite number." for key, number in _infinite(value)]
    problems += [_explain(error) for error in Draft202012Validator(schema).iter_errors(value)]
    if problems:
        raise BadInput("\n  ".join([f"{where}:", *problems]) if len(problems) > 1 else f"{where}: {problems[0]}")


def _infinite(value, key: str = "") -> Iterator[tuple[str, float]]:
    """The keys with NaN or an infinity. JSON Schema's limits accept NaN, as it is neither above nor below any."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _infinite(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, value


def _explain(error) -> str:
    """A jsonschema error in one line: the key, what is wrong, and what is expected."""
    key = ".".join(str(part) for part in error.absolute_path)
    match error.validator:
        case "additionalProperties":
            keys = list(error.schema["properties"])
            unknown = [name for name in error.instance if name not in keys]
            dotted = ".".join([key, str(unknown[0])] if key else [str(unknown[0])])
            return f"{dotted}: unknown key.{hint(unknown[0], keys) or ' Known here: ' + ', '.join(keys) + '.'}"
        case "enum":
            about = error.schema.get("description", "")
            return (
                f"{key}: {error.instance!r} is not one of {', '.join(map(str, error.validator_value))}. {about}".strip()
            )
        case "type":
            kinds = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
            quotes = ""
            if "string" in kinds and isinstance(error.instance, bool):
                quotes = " YAML reads a bare yes, no, on, off, true or false so; put it in quotes."
            elif "string" in kinds and isinstance(error.instance, int | float):
                quotes = " If it is text, put it in quotes."
            return f"{key}: expected {' or '.join(kinds)}, not {error.instance!r}.{quotes}"
        case "const":
            return (
                f"{key}: {error.instance!r}, but it can only be {error.validator_value}. {error.schema['description']}"
            )
        case "pattern" if error.validator_value == "^auto$":
            return f"{key}: expected auto or a whole number, not {error.instance!r}."
        case "pattern" if key == "rows":
            return f"rows: {error.instance!r} is not a valid name. Use up to 40 of a-z, 0-9 and _, a letter first."
        case _:
            return f"{key or 'configuration'}: {error.message}."


def hint(word, choices) -> str:
    close = difflib.get_close_matches(str(word), choices, n=1)
    return f" Did you mean {close[0]}?" if close else ""


@cache
def of_configuration() -> dict:
    """The schema of the whole configuration."""
    return keys.schema(Asked)


def takes_mapping(names: list[str]) -> bool:
    """Whether a key, by its name and those of the sections that it is in, takes a mapping; what a row takes may be."""
    schema = of_configuration()
    for name in names:
        others = schema.get("additionalProperties") or {}
        schema = schema.get("properties", {}).get(name, others)
    return "object" in schema.get("type", ()) or names[0] == "rows"


def of_row(strategy: str) -> dict:
    """The schema of a row: the strategy, its OPTIONS, and every key of train and hardware."""
    sections = of_configuration()["properties"]
    own = registry.literals(strategy)["OPTIONS"]
    inherited = {**sections["train"]["properties"], **sections["hardware"]["properties"]}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {"strategy": {"type": "string"}, **inherited, **own},
    }
