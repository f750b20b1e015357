"""Rows that differ in the number of devices only, from one row of the configuration: its `world_sizes`.

Where a row trains the same plan on all of them this is strong scaling; where its batch follows from `device_batch`, so
that each device keeps the same number of samples, it is weak scaling.
"""

from dataclasses import replace

from lockstep.config import registry
from lockstep.config.resolving import resolve
from lockstep.config.row import Row, read_row
from lockstep.config.sections import Shared
from lockstep.errors import BadInput


def expand(rows: dict[str, dict | None], shared: Shared, where: str) -> dict[str, dict | None]:
    """Replace each row that has world sizes by a row for each size, such as `ddp_2` for two devices of `ddp`.

    A row that is expanded becomes null, since a configuration that is merged below this one may have it too. Sizes that
    are set for all rows leave out rows that always train on one device or name their number (`processes`), rows of
    studies, and numbers of devices that a row's options do not divide, or that its one process can't drive, as they are
    of several machines. Raises BadInput if a row asks for such a size itself, or if it can train on none of the sizes
    that are set for all rows.
    """
    expanded = dict(rows)
    for name, raw in rows.items():
        if not raw or not (shared.hardware.world_sizes or "world_sizes" in raw):
            continue
        row = read_row(name, raw, shared, where)
        if sizes := _sizes(row, raw, f"{where}: rows.{name}.world_sizes"):
            expanded[name] = None
            for size in sizes:
                if rows.get(f"{name}_{size}"):
                    raise BadInput(
                        f"{where}: rows.{name}.world_sizes: the row for {size} devices would be {name}_{size}, which"
                        " there is already. Rename one of them."
                    )
                expanded[f"{name}_{size}"] = raw | _devices(row, size, where) | {"world_sizes": []}
        elif "world_sizes" in raw:
            expanded[name] = raw | {"world_sizes": []}
    return expanded


def _sizes(row: Row, raw: dict, where: str) -> list[int]:
    """The sizes that a row is trained at; none if it stays as it is."""
    sizes = sorted(row.asked.world_sizes)
    if not sizes:
        return []
    literals = registry.literals(row.strategy)
    alone = resolve(replace(row.asked, processes=1), row.name).device in literals["ONE_DEVICE_ON"]
    if "world_sizes" in raw:
        if alone:
            raise BadInput(f"{where}: {row.strategy} trains on one device, however many there are. Leave it out.")
        if "processes" in raw and row.asked.nodes == 1:  # of several machines it is the number on each
            raise BadInput(
                f"{where}: {sizes}, but processes is also set, to {row.asked.processes}. Leave one of them out."
            )
        if beyond := [size for size in sizes if _driven(row, size) < size]:
            raise BadInput(
                f"{where}: {beyond}, but {row.strategy} drives all devices from one process, and one machine has"
                f" {_driven(row, beyond[0])} here. Leave out what is more."
            )
        return sizes
    if alone or "processes" in raw or row.study:
        return []
    possible = [size for size in sizes if size % row.ranks_in_multiples_of == 0 and _driven(row, size) == size]
    if not possible:
        why = f"its ranks come in multiples of {row.ranks_in_multiples_of}"
        if _driven(row, sizes[0]) < sizes[0]:
            why = f"its one process drives the devices of one machine, of which there are {_driven(row, sizes[0])} here"
        raise BadInput(
            f"{where}: hardware.world_sizes has {sizes}, of which this row trains on none: {why}. Add one, or leave the"
            f" row out ({row.name}: null)."
        )
    return possible


def _driven(row: Row, size: int) -> int:
    """On how many of `size` devices the row would train: one process drives those of one machine, each only once."""
    asked = replace(row.asked, processes=size, oversubscribe=True, mixed_gpus=True, backend="auto")
    resolved = resolve(asked, row.name)
    one_process = resolved.device in registry.literals(row.strategy)["ONE_PROCESS_ON"]
    return min(size, resolved.gpu_count or size) if one_process else size


def _devices(row: Row, size: int, where: str) -> dict:
    """The settings by which the row trains on `size` devices: of one machine if it has that many, else of several."""
    if row.asked.nodes == 1:
        return {"processes": size}
    each = resolve(row.asked, row.name).devices  # of one machine
    if size <= each:
        return {"processes": size, "nodes": 1}
    if size % each or size > each * row.asked.nodes:
        raise BadInput(
            f"{where}: rows.{row.name}.world_sizes: {size} devices can't be had from up to {row.asked.nodes} machines"
            f" of {each} each. Set it to a multiple of {each}, of at most {each * row.asked.nodes}."
        )
    return {"processes": each, "nodes": size // each}
