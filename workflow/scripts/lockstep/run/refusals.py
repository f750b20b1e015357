"""Why a row is not trained: what only this moment, this machine or the prepared data tells of it."""

import math

from lockstep.config.hardware import refuse_less
from lockstep.config.row import Row
from lockstep.errors import BadInput


def refuse_to_start(row: Row) -> None:
    """Raises BadInput where the row can't be trained, here or anywhere. Called once, before a run and its repeats.

    What depends on this moment belongs here; on the settings alone, in `Row.refuse`; on packages, in `Row.unavailable`;
    on what the machine has, in `hardware.resolve`, which the Snakefile and the report ask too.
    """
    row.refuse()
    refuse_less(row.asked, row.hardware)
    if row.unavailable:
        raise BadInput(f"rows.{row.name}: {row.unavailable}.")


def refuse_unused_parameters(row: Row, unused: list[str]) -> None:
    """Raises BadInput where DistributedDataParallel would wait for gradients that never come.

    Not with LoRA, by which most parameters are none that it waits for.
    """
    waits = row.options.get("find_unused_parameters") is False and row.hardware.processes > 1
    if unused and waits and not row.train.lora:
        others = f" (and {len(unused) - 1} more)" if unused[1:] else ""
        raise BadInput(
            f"rows.{row.name}: the model's {unused[0]}{others} gets no gradient, which {row.strategy} must be told of."
            " Set find_unused_parameters: true in the row, or leave the parameter out of the model."
        )


def refuse_lora_targets(row: Row, layers: dict[str, int]) -> None:
    """Raises BadInput where one of the row's lora_targets names none of the model's layers.

    layers: of the model, by path, the smaller side of each one's matrix; empty where it is not known.
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


def refuse_heads(row: Row, heads: dict[str, int]) -> None:
    """Raises BadInput where the row's ranks can't divide the model's attention heads.

    heads: how many there are, by the names that the model's configuration has for them; empty where it has none.
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
                f" number that divides {math.gcd(*heads.values())}."
            )
