"""How long a step takes on several ranks, from what one rank takes alone and what messages between ranks cost.

A step is foretold as a sum of three parts, each with an interval:

computing      what the row's own code takes alone, with one rank's share of each batch (forecast/alone.py)
optimizer      the same, of which a rank does only its share where the optimizer's state is shared out (SHARDS)
communication  the messages that the strategy declares (SENDS), at what the `network` rule measured of such messages,
               less what the backward or forward pass hides of them

The ends of the parts' intervals are added, as if all were wrong in the same direction.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lockstep.rank.network import BUS

# How far a rank's own time may be off in another run of the same work: the spread between launches of a program
# (report/variance.py finds 1 to 4 %), and that an excerpt stands for all steps.
COMPUTING = 0.08
# How far a message's time may be off beside what its repetitions spread: in a step ranks compute more or less before it
# than where messages were measured, and each rank something else.
MESSAGE = 0.25
# The share of an Ethernet link's rate that a TCP connection can use: 1448 of a frame's 1538 bytes are data (MTU 1500).
PAYLOAD = 1448 / 1538


@dataclass(frozen=True)
class Interval:
    """Seconds, and the ends of the interval in which they are expected."""

    value: float
    low: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> "Interval":
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def widened(self, share: float) -> "Interval":
        return Interval(self.value, self.low * (1 - share), self.high * (1 + share))


NOTHING = Interval(0.0, 0.0, 0.0)
ONCE = Interval(1.0, 1.0, 1.0)
# gloo's all_gather of more than GATHER_AT_RATE bytes, as a multiple of the time in which a link brings them while it
# sends in both directions. Seen on shaped links of 100 Mbit/s and 1 Gbit/s; other collectives, and smaller messages,
# take just that time.
GATHER, GATHER_AT_RATE = Interval(1.4, 1.0, 1.5), 2**20


@dataclass(frozen=True)
class Alone:
    """Seconds of each part of a step of one rank alone. rest: making batches, and other waits of the host.

    spread: how far copies differ, as a share of the step. others: the cores that other programs used meanwhile.
    """

    forward: float
    backward: float
    optimizer: float
    rest: float
    spread: float = 0.0
    others: float = 0.0

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer + self.rest


@dataclass(frozen=True)
class Message:
    """One kind of message in a step. sizes: bytes of each piece, in the order in which they are sent.

    times: how often all of them are sent in a step. window: seconds of computing that they may overlap with, each time.
    in_a_row: whether ranks compute nothing between pieces, so that they wait for the slowest at the first one only.
    """

    collective: str
    sizes: list[float]
    times: float = 1.0
    window: float = 0.0
    in_a_row: bool = False


@dataclass(frozen=True)
class Links:
    """What messages cost between `ranks` ranks. measured: a network.json's entries for their backend and device.

    link: bits/s of a machine's network, if the messages pass through one that was not measured. backend: nccl or gloo,
    which decides what passes through it.
    """

    ranks: int
    measured: list[dict]
    link: float | None = None
    backend: str = "nccl"

    @property
    def nearest(self) -> dict | None:
        """The measurement with the same number of ranks, or with the most similar one."""
        far = [(abs(math.log(each["ranks"] / self.ranks)), each["ranks"], each) for each in self.measured]
        return min(far, key=lambda each: each[:2])[2] if far else None

    @property
    def extrapolated(self) -> list[str]:
        """Why the cost of these messages is extrapolated; empty if it was measured."""
        if not self.nearest:
            return ["a message's latency was not measured (lockstep network)"]
        if self.nearest["ranks"] != self.ranks:
            return [f"messages were measured between {self.nearest['ranks']} ranks"]
        return []

    def seconds(self, collective: str, size: float, waits: bool = True) -> Interval:
        """The time of a collective on this many bytes, as rank/network.py counts them; needs a link or a measurement.

        Through a link it takes as long as the slower of the two, the ranks' own work or the link; at most, their sum.
        """
        own = self._own(collective, size, waits)
        if self.link is None:
            return own
        wire = self._wire(collective, size)
        return Interval(max(own.value, wire.value), max(own.low, wire.low), own.high + wire.high)

    def _wire(self, collective: str, size: float) -> Interval:
        """The seconds in which the link brings a collective's bytes."""
        load = BUS[collective](self.ranks)
        times = ONCE
        if self.backend == "gloo" and collective == "reduce_scatter":
            load = BUS["all_reduce"](self.ranks)  # PyTorch has gloo reduce all of it on every rank, which keeps a part
        elif self.backend == "gloo" and collective == "all_gather" and size > GATHER_AT_RATE:
            times = GATHER
        return times * (size * load / (self.link / 8 * PAYLOAD))

    def _own(self, collective: str, size: float, waits: bool) -> Interval:
        """The time of the collective between ranks of one machine; 0 if it was not measured."""
        if not self.nearest:
            return NOTHING
        points = self.nearest["operations"][collective]["points"]
        there = self.nearest["ranks"]
        # With other ranks each hop's latency counts, and the load of the links.
        hops = (self.ranks - 1) / (there - 1)
        load = BUS[collective](self.ranks) / BUS[collective](there)
        ends = [
            hops * (first := _at(points, name, 0.0, waits)) + load * (_at(points, name, size, waits) - first)
            for name in ("seconds", "low", "high")
        ]
        value, low, high = ends
        return Interval(value, min(low, value), max(high, value)).widened(MESSAGE)


def _at(points: list[dict], name: str, size: float, waits: bool) -> float:
    """The seconds for this many bytes: on a straight line between measured sizes, in proportion beyond the largest.

    waits: whether ranks send the message after computing, and so wait for the slowest one, which earlier versions
    did not measure.
    """
    sizes = np.array([point["bytes"] for point in points], float)
    measured = [(point.get("after_computing", point) if waits else point)[name] for point in points]
    seconds = np.maximum.accumulate(measured)  # more bytes never take less
    if size > sizes[-1]:
        return float(seconds[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, seconds))


def step(alone: Alone, messages: list[Message], links: Links, shared: list[str], device: str) -> dict[str, Interval]:
    """The parts of a step of links.ranks ranks. Their sum is the step.

    alone: of one rank with its share of the batch. shared: the parts that are sharded over ranks (SHARDS).
    """
    computing = alone.forward + alone.backward + alone.rest
    parts = {
        "computing": _own_time(computing, alone.spread),
        "optimizer": _own_time(alone.optimizer, alone.spread),
        "communication": NOTHING,
    }
    if links.ranks == 1:
        return parts
    if "optimizer" in shared:  # what the host does for each step is not shared out, so it may be as long as alone
        share = Interval(alone.optimizer / links.ranks, alone.optimizer / links.ranks, alone.optimizer)
        parts["optimizer"] = share.widened(max(COMPUTING, alone.spread))
    for message in messages:
        parts["communication"] += communication(message, links, device) * message.times
    return parts


def _own_time(seconds: float, spread: float) -> Interval:
    return Interval(seconds, seconds, seconds).widened(max(COMPUTING, spread))


def communication(message: Message, links: Links, device: str) -> Interval:
    """The seconds by which one sending of a message's pieces makes a step longer.

    On a GPU, hidden communication costs nothing. On a CPU, ranks send with the cores that compute, so between none and
    all of their own work may be hidden; half of it is assumed to be.
    """
    each = [
        links.seconds(message.collective, size, waits=not (number and message.in_a_row))
        for number, size in enumerate(message.sizes)
    ]
    whole = sum(each, NOTHING)
    if not message.window:
        return whole
    exposed = [
        _exposed(message.sizes, [getattr(piece, end) for piece in each], message.window)
        for end in ("value", "low", "high")
    ]
    value, low, high = exposed
    if device == "cuda":
        return Interval(value, low, high)
    own = Links(links.ranks, links.measured)
    sending = sum((own.seconds(message.collective, size) for size in message.sizes), NOTHING)
    hidden = whole.value - value
    paid = min(sending.value, hidden)
    return Interval(value + paid / 2, low, high + paid)


def _exposed(sizes: list[float], seconds: list[float], window: float) -> float:
    """How long after a pass of `window` seconds the last piece arrives, if each is sent as soon as it is ready.

    Pieces are sent one after the other. A piece is ready when as large a share of the pass is done as of all bytes.
    """
    ready = [window * done / max(sum(sizes), 1) for done in accumulate(sizes)]
    end = 0.0
    for at, taken in zip(ready, seconds, strict=True):
        end = max(end, at) + taken
    return max(0.0, end - window)


# What is sent, in pieces: from the shapes of the weights, in the order of the model.

Shapes = dict[str, tuple[int, ...]]


def pieces(kind: str, numbers: int | str, shapes: Shapes, options: dict) -> list[int]:
    """The numbers in each piece of a message, by its `pieces` and `numbers` in SENDS."""
    if kind == "one":
        found = [list(shapes.values())]
    elif kind == "parameters":
        found = [[shape] for shape in shapes.values()]
    elif kind == "layers":
        found = _layers(shapes)
    else:
        found = _buckets(shapes, options.get(kind, 25) * 2**20)
    if isinstance(numbers, int):
        return [numbers] * len(found)
    if numbers == "powersgd":
        return [size for piece in found for size in _powersgd(piece, options["powersgd_rank"])]
    return [sum(map(math.prod, piece)) for piece in found]


def _layers(shapes: Shapes) -> list[list[tuple[int, ...]]]:
    """The shapes of each numbered layer, such as encoder.layer.0, after a list of all other weights' shapes."""
    found: dict[str, list] = {"": []}
    for name, shape in shapes.items():
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdigit()), None)
        found.setdefault("" if number is None else ".".join(words[: number + 1]), []).append(shape)
    return [piece for piece in found.values() if piece]


def _buckets(shapes: Shapes, most: float) -> list[list[tuple[int, ...]]]:
    """The shapes in each bucket of DistributedDataParallel, which backward fills from the last weight to the first.

    most: bytes in fp32 after which a bucket is full.
    """
    found, filled = [[]], 0
    for shape in reversed(shapes.values()):
        if filled >= most:
            found.append([])
            filled = 0
        found[-1].append(shape)
        filled += 4 * math.prod(shape)
    return found


def _powersgd(piece: list[tuple[int, ...]], rank: int) -> list[int]:
    """The numbers that PowerSGD sends for a bucket in turn: those that it does not compress, and two factors.

    It compresses a matrix of a by b that has more than twice as many numbers as (a + b) * rank (torch's powerSGD_hook).
    """
    matrices = [(shape[0], math.prod(shape[1:])) for shape in piece if len(shape) > 1]
    ranks = [min(a, b, rank) for a, b in matrices]
    compressed = [2 * (a + b) * r < a * b for (a, b), r in zip(matrices, ranks, strict=True)]
    left = [math.prod(shape) for shape in piece if len(shape) < 2]
    left += [a * b for (a, b), small in zip(matrices, compressed, strict=True) if not small]
    chosen = [(a * r, b * r) for (a, b), r, small in zip(matrices, ranks, compressed, strict=True) if small]
    sent = [sum(left), sum(first for first, _ in chosen), sum(second for _, second in chosen)]
    return [numbers for numbers in sent if numbers]


def messages(
    sends: list[dict],
    shapes: Shapes,
    options: dict,
    accumulation: int,
    alone: Alone,
    device: str,
    trained: Shapes | None = None,
) -> list[Message]:
    """The messages of a step, from what a strategy declares (SENDS).

    shapes: those of all weights; trained: those of the trained weights, if some are frozen.
    """
    found = []
    for declared in sends:
        sent = shapes if trained is None or declared["numbers"] == "weights" else trained
        sizes = [declared["bytes"] * size for size in pieces(declared["pieces"], declared["numbers"], sent, options)]
        per = declared.get("per")
        times = accumulation if per == "micro_batch" else 1 / options[per] if per else 1
        window = 0.0
        if device in declared.get("hidden_on", ()):
            window = getattr(alone, declared["during"]) / accumulation
        found.append(Message(declared["collective"], sizes, times, window, declared.get("in_a_row", False)))
    return found
