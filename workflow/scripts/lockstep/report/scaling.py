"""How rows scale that differ only in the number of devices.

Strong scaling: all of them train the same plan. Weak scaling: each device keeps its share of a step, so the batch grows
with the devices (`device_batch`); the plans differ then, and only samples per second can be compared. Both are compared
with the best row on one device, and not with the same strategy on one device, because a strategy that is slow there
seems to scale well. For weak scaling that row has a device's share as its batch: another batch has another speed.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.config import registry
from lockstep.config.hardware import device_count
from lockstep.config.nested import without
from lockstep.config.sections import Train
from lockstep.config.settings import deciding
from lockstep.proof.verdicts import WRONG
from lockstep.report.ranking import BASELINE, capacity
from lockstep.report.reading import Run, good_runs, trusted

# Keys of `hardware` that determine the number of devices, or that only rows on several machines have.
OF_DEVICES = ("devices", "processes", "gpu_count", "gpus", "nodes", "interface")
# Keys of `train` by which a step is more or less work, besides the plan and the precision, which are compared as such.
OF_WORK = ("optimizer", "lora", "lora_targets")
CLIFF = 0.15  # a loss of efficiency from one size to the next that is reported


@dataclass(frozen=True)
class Size:
    """A row at one number of devices.

    gain: its samples per second divided by those of the best row on one device; `gain_low` and `gain_high` are the ends
    of a 95 % interval, None if there are too few runs for one. efficiency: the gain per GPU or CPU core. `nodes` is 1
    on one machine.
    """

    row: str
    devices: int
    nodes: int
    gain: float
    gain_low: float | None
    gain_high: float | None
    efficiency: float
    efficiency_low: float | None
    efficiency_high: float | None


def families(rows: list[dict], runs: dict[str, list[Run]], between: Callable) -> list[dict]:
    """All families of rows that differ only in the number of devices, in the table's order.

    Each has `kind`, strong or weak; `name`; `against`, the row on one device that it is compared with; `sizes`, each a
    Size, the fewest devices first; and `cliff`, the names of the two neighbouring rows between which most of the
    efficiency is lost, or None. Also fills in the column `weak_efficiency` of `rows`.

    between: a function that returns the ratio of two rows' training times, or None (ranking.between).
    """
    done = [
        row
        for row in rows
        if row["train_seconds"] is not None and row["proof"] not in WRONG and row["division"] in registry.DIVISIONS
    ]
    groups: dict[str, list[dict]] = {}
    for row in done:
        groups.setdefault(_but_devices(_asked(runs[row["row"]])), []).append(row)
    found = []
    for members in groups.values():
        if len({row["world_size"] for row in members}) > 1:
            kind = "weak" if _asked(runs[members[0]["row"]])["train"]["device_batch"] else "strong"
            found += _family(kind, sorted(members, key=lambda row: row["world_size"]), done, runs, between)
    by_name = {row["row"]: row for row in rows}
    for size in (size for family in found if family["kind"] == "weak" for size in family["sizes"]):
        by_name[size["row"]]["weak_efficiency"] = size["efficiency"]
    return found


def _family(kind: str, members: list[dict], done: list[dict], runs: dict, between: Callable) -> list[dict]:
    """The members as a family; empty if fewer than two sizes can be compared."""
    against = _best_alone(kind, members, done, runs) or members[0]["row"]
    sizes = [size for row in members if (size := _size(row, against, runs, between))]
    if len({size.devices for size in sizes}) < 2:
        return []
    plain = [asdict(size) for size in sizes]
    return [{"name": _name(sizes), "kind": kind, "against": against, "sizes": plain, "cliff": _cliff(sizes)}]


def _cliff(sizes: list[Size]) -> list[str] | None:
    """The neighbours between which most efficiency is lost; None if the loss is small, or may be due to chance."""
    fewer, more = max(itertools.pairwise(sizes), key=lambda pair: pair[0].efficiency - pair[1].efficiency)
    lost = fewer.efficiency - more.efficiency
    known = fewer.efficiency_low is not None and more.efficiency_high is not None
    return [fewer.row, more.row] if known and lost >= CLIFF and fewer.efficiency_low > more.efficiency_high else None


def _size(row: dict, against: str, runs: dict, between: Callable) -> Size | None:
    """A row compared with `against`; None if no block connects them."""
    name = row["row"]
    ratio = between(name, against)
    if not ratio:
        return None
    more_samples = _samples(runs[name]) / _samples(runs[against])
    alone = device_count(_asked(runs[against])["hardware"])  # 1, unless no row has one device
    gains = [alone * more_samples / ratio[end] for end in ("value", "high", "low")]
    if not ratio["kind"]:
        gains[1:] = [None, None]
    factor = capacity(runs[against]) / capacity(runs[name]) / alone
    hardware = _asked(runs[name])["hardware"]
    return Size(
        name,
        device_count(hardware),
        hardware["nodes"],
        *gains,
        *(None if gain is None else gain * factor for gain in gains),
    )


def _best_alone(kind: str, members: list[dict], done: list[dict], runs: dict) -> str | None:
    """The row on one device with the most samples per second per GPU or core, in the members' precision.

    For strong scaling it must train the same plan; for weak scaling, the same number of samples in a step, unless there
    is none that does. A row outside the family counts only in the closed division, or if it is the baseline, and if a
    step is the same work: with LoRA, for example, it is less. Rows of which all runs were disturbed count only if there
    are no others.
    """
    family = [row["row"] for row in members]
    first = _asked(runs[family[0]])
    alone = [
        row["row"]
        for row in done
        if device_count(_asked(runs[row["row"]])["hardware"]) == 1
        and (row["row"] in family or row["division"] == "closed" or row["strategy"] == BASELINE)
        and _work(_asked(runs[row["row"]])) == _work(first)
        and _asked(runs[row["row"]])["precision"] == first["precision"]
        and (kind == "weak" or _plan(runs[row["row"]]) == _plan(runs[family[0]]))
    ]
    alone = [name for name in alone if trusted(runs[name])] or alone
    if kind == "weak":
        samples = _samples_of_a_device(first)
        alone = [name for name in alone if _samples_of_a_device(_asked(runs[name])) == samples] or alone
    return max(alone, key=lambda name: _rate(runs[name]), default=None)


def _work(asked: dict) -> dict:
    """What of a run's training decides how much work a step is."""
    train = Train.of(asked["train"])  # a record of an earlier version may lack a key
    return {key: getattr(train, key) for key in OF_WORK}


def _samples_of_a_device(asked: dict) -> float:
    """The samples of a step for each device, those of all its micro-batches."""
    return asked["train"]["global_batch"] / device_count(asked["hardware"])


def _rate(runs: list[Run]) -> float:
    rates = sorted(run.throughput.samples_per_second for run in good_runs(runs))
    return rates[len(rates) // 2] / capacity(runs)


def _samples(runs: list[Run]) -> int:
    return good_runs(runs)[0].work.samples


def _asked(runs: list[Run]) -> dict:
    return good_runs(runs)[0].asked


def _plan(runs: list[Run]) -> str:
    """The name of the plan without its seed, since repetitions may have seeds of their own."""
    return _asked(runs)["plan"].rpartition("-s")[0]


def _name(sizes: list[Size]) -> str:
    """The common stem of the rows' names, such as that of ddp_1 and ddp_2; all names if there is none."""
    stems = {size.row.removesuffix(f"_{size.devices}") for size in sizes}
    return stems.pop() if len(stems) == 1 else ", ".join(size.row for size in sizes)


def _but_devices(asked: dict) -> str:
    """A run's settings without the number of devices, and without those that do not affect its time."""
    of_train = ("seed", "global_batch") if asked["train"]["device_batch"] else ("seed",)
    kept = without(deciding(asked), {"hardware": OF_DEVICES, "train": of_train})
    named = ("strategy", "options", "precision", "train", "hardware")
    return json.dumps({key: kept[key] for key in named}, sort_keys=True)
