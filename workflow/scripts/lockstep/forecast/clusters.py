"""The machines that `lockstep which` foretells for: common cards by their names, others from a file of one's own.

Both have the same keys, which workflow/cards.yaml explains.
"""

import re
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path

from lockstep.config import schema
from lockstep.config.reading import load_yaml
from lockstep.errors import BadInput
from lockstep.paths import WORKFLOW

CARDS_FILE = WORKFLOW / "cards.yaml"
RATES = ("a100", "h100")
MOST_PER_MACHINE, MOST_PRICE = 72, 1e6


@dataclass(frozen=True)
class Cluster:
    """Machines with the same GPUs. card: the card's name, or None if `cards` does not have it.

    peak: FLOP/s of a GPU in bf16, dense; memory: bytes; memory_bandwidth: bytes/s; link: NVLink or PCIe of a GPU to the
    others of its machine, bytes/s in one direction; network: of a machine, bits/s in one direction; rates: whose shares
    of the peak are used (sharded.Rates); price: of a GPU for an hour.
    """

    peak: float
    memory: int
    memory_bandwidth: float
    link: float
    gpus_per_machine: int
    network: float
    rates: str
    price: float | None = None
    card: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.peak / 1e12:g} TFLOPS in bf16, {self.memory / 2**30:.3g} GiB at"
            f" {self.memory_bandwidth / 1e9:g} GB/s; {self.gpus_per_machine} to a machine, linked by"
            f" {self.link / 1e9:g} GB/s, machines by {self.network / 1e9:g} Gbit/s"
        )


@dataclass(frozen=True)
class Quantity:
    """A number with a unit, as people write it. wanted: what the message about an invalid one asks for."""

    units: dict[str, float]
    least: float
    most: float
    wanted: str

    def read(self, text, where: str) -> float:
        """The number in the basic unit. Raises BadInput, which begins with `where`."""
        given = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z/]+)", str(text).strip(), re.ASCII)
        value = float(given[1]) * self.units[given[2]] if given and given[2] in self.units else -1
        if not self.least <= value <= self.most:
            raise BadInput(f"{where} {text}: {self.wanted}.")
        return value


BYTES = {
    spelt: float(size)
    for unit, size in (("MB", 2**20), ("MiB", 2**20), ("GB", 2**30), ("GiB", 2**30))
    for spelt in (unit, unit.upper(), unit.lower())
}
MEMORY = Quantity(BYTES, 2**20, 2**50, "give a number and its unit, as 24GB or 500MB")
NETWORK = Quantity(
    {
        f"{prefix}{bits}": value
        for prefix, value in (("M", 1e6), ("G", 1e9))
        for bits in ("b", "bit", "bps", "bit/s", "b/s")
    },
    1e8,
    1e14,
    "give .1 to 100000 Gbit/s of a machine, with the unit, as 25Gb or 100Mb (bits, not bytes)",
)
PER_SECOND = Quantity(
    {"GB/s": 1e9, "TB/s": 1e12}, 1e8, 1e15, "give .1 to 1000000 GB/s in one direction, as 450 GB/s (bytes, not bits)"
)
MOST_GPUS = 16384  # beyond which even a guess about them would mislead
QUANTITIES = {
    "peak": Quantity(
        {"TFLOPS": 1e12, "PFLOPS": 1e15}, 1e12, 1e17, "give 1 to 100000 TFLOPS, as 312 TFLOPS (bf16, without sparsity)"
    ),
    "memory": MEMORY,
    "memory_bandwidth": PER_SECOND,
    "link": PER_SECOND,
    "network": NETWORK,
}


@cache
def cards() -> dict[str, Cluster]:
    """The clusters of common cards, by the card's name."""
    described = load_yaml(CARDS_FILE)
    return {
        name: replace(_cluster({key: value for key, value in keys.items() if key != "source"}, name), card=name)
        for name, keys in described.items()
    }


def read(file: Path) -> Cluster:
    """The cluster that a YAML file describes. Raises BadInput, which names the key."""
    return _cluster(load_yaml(file), str(file))


def _cluster(keys: dict, where: str) -> Cluster:
    known = [field.name for field in fields(Cluster)]
    if unknown := [name for name in keys if name not in known]:
        raise BadInput(
            f"{where}: {unknown[0]}: no key of a cluster, which has {', '.join(known)}.{schema.hint(unknown[0], known)}"
        )
    given = {name: _value(name, value, where) for name, value in keys.items()}
    if "card" in given:
        return replace(cards()[given["card"]], **given)
    if missing := [field.name for field in fields(Cluster) if field.default is MISSING and field.name not in given]:
        raise BadInput(
            f"{where}: {', '.join(missing)}: missing. Write it, or name a card that has it, as in card: h100."
        )
    return Cluster(**given)


def _value(name: str, value, where: str):
    if name in QUANTITIES:
        read = QUANTITIES[name].read(value, f"{where}: {name}:")
        return int(read) if name == "memory" else read
    if name in ("card", "rates"):
        choices = list(cards()) if name == "card" else RATES
        if value not in choices:
            raise BadInput(f"{where}: {name}: {value}: is none of {', '.join(choices)}.{schema.hint(value, choices)}")
        return value
    kind, most, number = (int, float), MOST_PRICE, "a number"
    if name == "gpus_per_machine":
        kind, most, number = int, MOST_PER_MACHINE, "a whole number"
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= most:
        raise BadInput(f"{where}: {name}: {value}: expected {number} above 0, of at most {most:g}.")
    return value
