"""How long a step of full sharding (FSDP, ZeRO-3) takes on many GPUs, from shapes alone: nothing is run.

A step is foretold as a sum of six parts (`parts`). Two are arithmetic: matrix products, and attention; each runs at its
own share of the card's peak. Two are bytes of the card's memory: what is done to each number of a layer besides
(norms, activations, residuals, casts), and the logits with their loss. Two are communication: the bytes of the
weights, which are gathered for the forward and again for the backward pass, and of the gradients, which are reduced;
and a latency for every layer, which grows with the number of GPUs, as a ring's does.

What overlaps is not told apart: that a part hides behind another one is in its rate, as if it were a faster part. The
rates are those with which the published runs in docs/measurements/others agree best; `python -m benchmarks.others`
finds them, and how wrong they are on runs that they were not found from.
"""

import re
from dataclasses import dataclass

from lockstep.errors import BadInput

NODE_GPUS = 8  # as in nearly all published runs
WEIGHT = 2  # bytes of a weight that is gathered, and of a gradient that is reduced, in bf16
STATE = 16  # bytes that are kept for each weight in all: the weight, its gradient, and two of AdamW's, in fp32


@dataclass(frozen=True)
class Card:
    """A GPU. peak: FLOP/s in bf16, dense; bandwidth: of its memory, bytes/s; memory: bytes; link: NVLink within a
    machine, bytes/s in one direction; network: a machine's, bits/s in one direction, unless another one is asked for.
    """

    kind: str  # which rates are its
    peak: float
    bandwidth: float
    memory: int
    link: float
    network: float


# NVIDIA's data sheets of A100, H100 (both SXM) and H200. The A100s' network is that of llm-foundry's runs, which do not
# name that of the H100s; here it is that of NVIDIA's DGX H100, eight times 400 Gbit/s.
CARDS = {
    "a100-40gb": Card("a100", 312e12, 1.555e12, 40 * 2**30, 300e9, 1.6e12),
    "a100-80gb": Card("a100", 312e12, 2.039e12, 80 * 2**30, 300e9, 1.6e12),
    "h100": Card("h100", 989.5e12, 3.35e12, 80 * 2**30, 450e9, 3.2e12),
    "h200": Card("h100", 989.5e12, 4.8e12, 141 * 2**30, 450e9, 3.2e12),
}


@dataclass(frozen=True)
class Shape:
    """A decoder. products: weights in matrix products, the head's included; weights: all that are trained."""

    layers: int
    width: int
    vocabulary: int
    products: int
    weights: int


@dataclass(frozen=True)
class Run:
    """How it is trained. length: tokens of a sample; micro_batch: samples that a GPU computes at a time, `accumulation`
    times in a step; recomputed: the share of the forward pass that is computed again (1: activation checkpointing of
    all layers); gathers: how often weights are gathered, 1 where they stay after the forward pass; network: bits/s of
    a machine, None for the card's.
    """

    card: str  # a key of CARDS
    gpus: int
    length: int
    micro_batch: int
    accumulation: int = 1
    recomputed: float = 0.0
    gathers: int = 2
    node_gpus: int = NODE_GPUS
    network: float | None = None

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.gpus * self.accumulation * self.micro_batch * self.length


@dataclass(frozen=True)
class Rates:
    """What is found from published runs. Shares are of the card's peak, or of the links' nominal rate.

    layer: bytes of memory for each token, layer and unit of its width; logit: for each token and word of the
    vocabulary; hop: seconds for each layer and GPU.
    """

    a100_products: float
    h100_products: float
    a100_attention: float
    h100_attention: float
    layer: float
    logit: float
    sent: float
    hop: float


RATES = Rates(0.888, 0.759, 0.547, 0.314, 408, 38.2, 0.662, 6.78e-6)


def parts(shape: Shape, run: Run, rates: Rates = RATES) -> dict[str, float]:
    """Seconds of a step, by what takes them. Their sum is the step."""
    card = CARDS[run.card]
    tokens = run.micro_batch * run.length  # of one GPU, at a time
    products, attention = (getattr(rates, f"{card.kind}_{name}") for name in ("products", "attention"))
    again = 1 + run.recomputed / 3  # forward is a third of the arithmetic, and of the layers' bytes
    model = flops(shape, run.length)
    seconds = {
        "matrix products": again * tokens * model["products"] / (products * card.peak),
        "attention": again * tokens * model["attention"] / (attention * card.peak),
        "memory, layers": again * tokens * rates.layer * shape.layers * shape.width / card.bandwidth,
        "memory, logits": tokens * rates.logit * shape.vocabulary / card.bandwidth,
        "weights and gradients": sent_bytes(shape, run) / (rates.sent * link(run)),
        "latency": rates.hop * shape.layers * (run.gpus if run.gpus > 1 else 0),
    }
    return {name: run.accumulation * each for name, each in seconds.items()}


def step_seconds(shape: Shape, run: Run, rates: Rates = RATES) -> float:
    return sum(parts(shape, run, rates).values())


def flops(shape: Shape, length: int) -> dict[str, float]:
    """Operations of a token in a step, forward and backward, as MFU counts them (model/metrics.py)."""
    return {"products": 6 * shape.products, "attention": 12 * shape.layers * shape.width * length}


def sent_bytes(shape: Shape, run: Run) -> float:
    """What a GPU gets in a micro-batch: the others' shares of the weights, `gathers` times, and of the gradients."""
    return (run.gathers + 1) * WEIGHT * shape.weights * (run.gpus - 1) / run.gpus


def link(run: Run) -> float:
    """Bytes/s at which a machine's GPUs get what they lack: by NVLink, or all together by the machine's network."""
    card = CARDS[run.card]
    if run.gpus <= run.node_gpus:
        return card.link
    return min(card.link, (run.network or card.network) / 8)


def mfu(shape: Shape, run: Run, seconds: float) -> float:
    """The share of the cards' peak that the model's own operations reach, without those that are computed again."""
    return sum(flops(shape, run.length).values()) * run.tokens / (seconds * run.gpus * CARDS[run.card].peak)
