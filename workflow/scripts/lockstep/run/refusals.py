"""Reasons not to train a row that depend on this moment, this machine or the prepared data."""

import math

from lockstep.config.resolving import refuse_less
from lockstep.config.row import Row
from lockstep.errors import BadInput


def refuse_to_start(row: Row) -> None:
    """Raises BadInput if the row can't be trained, here or anywhere. Called once, before a run and its repeats.

    Checks that depend on this moment belong here; on the settings alone, in `Row.refuse`; on packages, in
    `Row.unavailable`; on the machine's devices, in `resolving.resolve`, which the Snakefile and the report call too.
    """
    row.refuse()
    refuse_less(row.asked, row.hardware)
    if row.unavailable:
        raise BadInput(f"rows.{row.name}: {row.unavailable}.")


def refuse_unused_parameters(row: Row, unused: list[str]) -> None:
    """Raises BadInput if the row's ranks would wait for gradients of weights that never get one."""
    if unused and (remedy := row.awaits_gradients):
        others = f" (and {len(unused) - 1} more)" if unused[1:] else ""
        raise BadInput(
            f"rows.{row.name}: the model's {unused[0]}{others} gets no gradient, but {row.strategy} would wait"
            f" for it. {remedy}, or leave the parameter out of the model."
        )


def refuse_lora_targets(row: Row, layers: dict[str, int]) -> None:
    """Raises BadInput if one of the row's lora_targets names none of the model's layers.

    layers: the smaller side of each layer's matrix, by path; empty if the layers are not known.
    """
    named = set(row.train.lora_targets or [])
    if not (row.train.lora and layers and named) or "all-linear" in named:
        return
    for name in sorted(named):
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            there = ", ".join(sorted({path.split(".")[-1] for path in layers}))
            raise BadInput(
                f"rows.{row.name}.lora_targets: {name} names no layer of the model that LoRA can update. There are:"
                f" {there}."
            )


def refuse_layers(row: Row, layers: int) -> None:
    """Raises BadInput if the row's ranks are to divide more layers than the model has."""
    parts, named = row.product("DIVIDES_LAYERS")
    if parts > layers:
        raise BadInput(
            f"rows.{row.name}.{named}: the model has {layers} layers, and each of {parts} ranks needs at least one."
            " Lower it."
        )


def refuse_heads(row: Row, heads: dict[str, int]) -> None:
    """Raises BadInput if the row's ranks can't divide the model's attention heads evenly.

    heads: the numbers of heads, by their names in the model's configuration; empty if it has none.
    """
    parts, named = row.product("DIVIDES_HEADS")
    if parts == 1:
        return
    if not heads:
        raise BadInput(f"rows.{row.name}.{named}: the model has no attention heads to divide. Leave the row out.")
    for name, number in heads.items():
        if number % parts:
            raise BadInput(
                f"rows.{row.name}.{named}: {parts} ranks can't share the model's {number} heads ({name}) evenly. Take a"
                f" divisor of {math.gcd(*heads.values())}."
            )
