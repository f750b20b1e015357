"""Nested settings, as a run's record has them: sections with keys. What two differ in, and what is left out of one."""

from collections.abc import Collection, Iterator

ABSENT = object()  # where one has no such key


def flat(settings: dict) -> dict:
    """By names with a point: {"train": {"epochs": 2}, "row": "ddp"} is {"train.epochs": 2, "row": "ddp"}."""
    of_sections = {name: value if isinstance(value, dict) else {"": value} for name, value in settings.items()}
    return {f"{name}.{key}".rstrip("."): value for name, inner in of_sections.items() for key, value in inner.items()}


def differing(ours: dict, theirs: dict, above: str = "") -> Iterator[tuple[str, object, object]]:
    """What two have otherwise: its name, as train.epochs, and both values, or ABSENT.

    A value that is a mapping with other keys, as `train.loss_weights` may be, is one value.
    """
    for name in dict.fromkeys([*ours, *theirs]):
        both = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        mappings = all(isinstance(value, dict) for value in both)
        if mappings and (not above or both[0].keys() == both[1].keys()):
            yield from differing(*both, f"{above}{name}.")
        elif both[0] != both[1]:
            yield f"{above}{name}", *both


def without(settings: dict, left_out: dict[str, Collection[str]]) -> dict:
    """Settings without some keys of some sections."""
    return settings | {
        section: {key: value for key, value in settings[section].items() if key not in names}
        for section, names in left_out.items()
    }
