"""Operations on nested settings, which are sections with keys, like those in a run's record."""

from collections.abc import Collection, Iterator

ABSENT = object()  # stands for a key that one of two settings lacks


def flat(settings: dict) -> dict:
    """Flatten to dotted names: {"train": {"epochs": 2}, "row": "ddp"} is {"train.epochs": 2, "row": "ddp"}."""
    of_sections = {name: value if isinstance(value, dict) else {"": value} for name, value in settings.items()}
    return {f"{name}.{key}".rstrip("."): value for name, inner in of_sections.items() for key, value in inner.items()}


def differing(ours: dict, theirs: dict, above: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the differences of two settings: a name such as train.epochs, and both values, or ABSENT.

    A value that is itself a mapping, such as `train.loss_weights`, counts as one value if its keys differ.
    """
    for name in dict.fromkeys([*ours, *theirs]):
        both = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        mappings = all(isinstance(value, dict) for value in both)
        if mappings and (not above or both[0].keys() == both[1].keys()):
            yield from differing(*both, f"{above}{name}.")
        elif both[0] != both[1]:
            yield f"{above}{name}", *both


def without(settings: dict, left_out: dict[str, Collection[str]]) -> dict:
    """Settings without the keys `left_out`, which are named by section."""
    return settings | {
        section: {key: value for key, value in settings[section].items() if key not in names}
        for section, names in left_out.items()
    }
