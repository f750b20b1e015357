"""How long a step takes on many GPUs with full sharding (FSDP, ZeRO-3), from shapes alone: nothing is run.

A step is foretold as a sum of seven parts (`parts`). Two are arithmetic: matrix products, and attention; each runs at a
share of the card's peak. Two are bytes of the card's memory: what is done to each number of a layer besides (norms,
activations, residuals, casts), and the logits with their loss. Three are communication: weights are gathered for the
forward and again for the backward pass, and gradients are reduced. Within a machine that takes NVLink or PCIe, between
machines the network, and each layer waits for as many machines as there are besides its own, as in a ring.

Overlap is not modelled: the rate of a part that hides behind another one includes that, as if it were faster. But no
step is foretold to end before the network could have brought its bytes. The rates are those with which the
published runs in docs/measurements/others agree best; `python -m benchmarks.others` finds them, and how wrong they are
on runs that they were not found from.

Other strategies, and LoRA, are counted with the same rates: they send other bytes, and keep other ones. No published
run says how well that agrees, so they are always extrapolated.
"""

import math
from dataclasses import asdict, dataclass

from lockstep.errors import BadInput, brief
from lockstep.forecast import clusters
from lockstep.forecast.clusters import Cluster
from lockstep.forecast.model import Model
from lockstep.model import metrics

WEIGHT = 2  # bytes of a weight that is gathered, and of a gradient that is reduced, in bf16
STATE = {"weights": 4, "gradients": 4, "optimizer": 8}  # bytes that are kept for each weight, in fp32, with AdamW
PUBLISHED = ("a100-40gb", "a100-80gb", "h100")  # the cards of the runs from which the rates were found


@dataclass(frozen=True)
class Shape:
    """A decoder. heads: the width of all its heads together; products: weights in matrix products, the head's included;
    weights: all that are trained.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    products: int
    weights: int


@dataclass(frozen=True)
class Strategy:
    """What each GPU of a strategy sends, and which parts of STATE are sharded.

    each, once: bytes for each weight that go through a GPU's link, in one direction, for each micro-batch and for each
    step besides. An all-reduce sends them twice. frozen: the bytes for each micro-batch if weights are frozen (LoRA).
    copy: bytes that are kept besides for each weight, sharded; buckets: bytes of buckets on each GPU; whole: whether
    shards are whole tensors.
    """

    each: int = 0
    once: int = 0
    frozen: int = 0
    sharded: tuple[str, ...] = ()
    copy: int = 0
    buckets: float = 0
    whole: bool = False


# As Lockstep's strategies of these names do it in bf16 (SENDS, SHARDS). Only fsdp is as in the published runs: it sends
# all in bf16, and gradients after each micro-batch. deepspeed_1 and deepspeed_2 are ZeRO's stages, which gather weights
# in fp32, clone their share of them, and have a bucket of 5e8 numbers (reduce_bucket_size).
ZERO = {"copy": 4, "buckets": 4 * 5e8}
STRATEGIES = {
    "fsdp": Strategy(each=3 * WEIGHT, frozen=2 * WEIGHT, sharded=("weights", "gradients", "optimizer")),
    "ddp": Strategy(once=8),
    "zero_redundancy": Strategy(once=12, sharded=("optimizer",), whole=True),
    "deepspeed_1": Strategy(once=2 * WEIGHT + 4, sharded=("optimizer",), **ZERO),
    "deepspeed_2": Strategy(each=2 * WEIGHT, once=4, sharded=("gradients", "optimizer"), **ZERO),
    "single": Strategy(),
}
MANY = [name for name in STRATEGIES if name != "single"]  # those of several GPUs


@dataclass(frozen=True)
class Run:
    """How the model is trained. length: tokens of a sample; micro_batch: samples that a GPU computes at a time,
    `accumulation` times in a step; recomputed: the share of the forward pass that is computed again (1: activation
    checkpointing of all layers); gathers: how often fsdp gathers weights, 1 where they stay after the forward pass;
    strategy: of STRATEGIES; lora: whether nearly all weights are frozen. What LoRA adds is taken to be nothing.
    """

    cluster: Cluster
    gpus: int
    length: int
    micro_batch: int
    accumulation: int = 1
    recomputed: float = 0.0
    gathers: int = 2
    strategy: str = "fsdp"
    lora: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of a step, on all GPUs."""
        return self.gpus * self.accumulation * self.micro_batch * self.length

    @property
    def machines(self) -> float:
        return max(1, self.gpus / self.cluster.gpus_per_machine)


@dataclass(frozen=True)
class Rates:
    """Rates that are fitted to published runs. Those of products and attention are shares of the card's peak.

    layer: bytes of memory for each token, layer and unit of its width; logit: for each token and word of the
    vocabulary; nvlink and network: the share of their time, at the nominal rate, by which a step is longer; hop:
    seconds for each layer and machine besides the first.
    """

    a100_products: float
    h100_products: float
    a100_attention: float
    h100_attention: float
    layer: float
    logit: float
    nvlink: float
    network: float
    hop: float


RATES = Rates(0.884, 0.765, 0.549, 0.314, 411, 37.8, 1.63, 0.305, 5.59e-5)

# Measured over foretold speed, for nine in ten rows of llm-foundry's that had no part in the rates, and for all runs of
# other programs on these cards.
INTERVALS = {"a100": (0.907, 1.094), "h100": (0.847, 1.076)}
# The smallest and the largest of what those rows have (`facts`).
CHECKED = {
    "a100": {
        "GPUs": (8, 128),
        "weights": (124131840, 64862437376),
        "tokens of a text": (512, 65536),
        "tokens of a micro-batch": (4096, 98304),
        "% of a step for communication": (0, 21),
    },
    "h100": {
        "GPUs": (8, 512),
        "weights": (758111232, 64862437376),
        "tokens of a text": (512, 65536),
        "tokens of a micro-batch": (4096, 98304),
        "% of a step for communication": (0, 35),
    },
}
MOST_LAYERS = 1000  # each is built, though without weights
# Decoders of transformers whose layers are attention and an MLP, without experts: what the parts are counted for.
DECODERS = (
    *("apertus", "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "exaone4", "falcon", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "helium", "llama"),
    *("ministral3", "mistral", "mpt", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi"),
    *("phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm"),
)


def shape_of(model: Model) -> Shape:
    """The shape of a decoder, whose weights are counted and not stored. Raises BadInput if it is another model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = model.config["model_type"]
    if kind not in DECODERS:
        raise BadInput(f"--model: the time of {kind} is not foretold, only that of decoders: {', '.join(DECODERS)}.")
    config = AutoConfig.for_model(**model.config)
    if config.num_hidden_layers > MOST_LAYERS:
        raise BadInput(f"--model: has {config.num_hidden_layers:,} layers. Give at most {MOST_LAYERS:,}.")
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # a model may raise anything about its own shape
        raise BadInput(f"--model: transformers can't build it: {brief(error)}") from None
    heads = config.num_attention_heads
    products = int(metrics.Shape.of_decoder(built).encoder)
    weights = sum(weight.numel() for weight in built.parameters())
    of_heads = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    found = Shape(config.num_hidden_layers, config.hidden_size, of_heads, config.vocab_size, products, weights)
    if empty := [name for name, value in asdict(found).items() if value < 1]:
        raise BadInput(f"--model: it has no {empty[0]}. Give every size at least 1.")
    return found


def parts(shape: Shape, run: Run, rates: Rates = RATES) -> dict[str, float]:
    """The seconds that each part of a step takes. Their sum is the step."""
    cluster = run.cluster
    tokens = run.accumulation * run.micro_batch * run.length  # of one GPU
    operations = flops(shape, run.length, run.lora)
    # The forward pass, which is computed again, has a third of the operations if all weights are trained.
    forward = flops(shape, run.length)
    again = {name: operations[name] + run.recomputed * forward[name] / 3 for name in operations}
    of_products, of_attention = (getattr(rates, f"{cluster.rates}_{name}") for name in ("products", "attention"))
    passed = 1 + run.recomputed / 3  # the layers' bytes, of which the forward pass has a third, too
    within, between, waits = communication(shape, run)
    seconds = {
        "matrix products": tokens * again["products"] / (of_products * cluster.peak),
        "attention": tokens * again["attention"] / (of_attention * cluster.peak),
        "layers' memory": passed * tokens * rates.layer * shape.layers * shape.width / cluster.memory_bandwidth,
        "logits' memory": tokens * rates.logit * shape.vocabulary / cluster.memory_bandwidth,
        "links within machines": rates.nvlink * within,
        "latency": rates.hop * shape.layers * (run.machines - 1) * waits,
    }
    return seconds | {"network": max(rates.network * between, between - sum(seconds.values()))}


def step_seconds(shape: Shape, run: Run, rates: Rates = RATES) -> float:
    return sum(parts(shape, run, rates).values())


def flops(shape: Shape, length: int, frozen: bool = False) -> dict[str, float]:
    """Operations of a token in a step, forward and backward, as MFU counts them (model/metrics.py).

    frozen: whether the weights need no gradients.
    """
    return {"products": (4 if frozen else 6) * shape.products, "attention": 12 * shape.layers * shape.heads * length}


def communication(shape: Shape, run: Run) -> tuple[float, float, int]:
    """What a step sends: seconds at the nominal rates of the links within machines and of the network, and how often
    all layers' messages go round.

    Each GPU sends all bytes but those of its own share; each machine likewise, whose GPUs share the network.
    """
    cluster, strategy = run.cluster, STRATEGIES[run.strategy]
    each, once = (strategy.frozen, 0) if run.lora else (strategy.each, strategy.once)
    if run.strategy == "fsdp":
        each += (run.gathers - 2) * WEIGHT
    moved = (each * run.accumulation + once) * shape.weights
    near = min(run.gpus, cluster.gpus_per_machine)
    within = moved * (1 - 1 / near) / cluster.link
    between = moved * (1 - 1 / run.machines) / (cluster.network / 8)
    return within, between, run.accumulation if each else min(once, 1)


def states(run: Run) -> dict[str, int]:
    """The bytes of each part of STATE for one weight, over all GPUs. A frozen weight has only itself."""
    return {"weights": STATE["weights"]} if run.lora else STATE


def kept(shape: Shape, run: Run) -> float:
    """The bytes that each GPU keeps for weights, gradients and optimizer."""
    strategy = STRATEGIES[run.strategy]
    found = shape.weights * sum(
        size / run.gpus if name in strategy.sharded else size for name, size in states(run).items()
    )
    if run.lora:
        return found
    if strategy.whole:  # one rank has the largest tensor, the embedding
        own = max(shape.weights / run.gpus, shape.vocabulary * shape.width)
        found += STATE["optimizer"] * (own - shape.weights / run.gpus)
    return found + shape.weights * strategy.copy / run.gpus + strategy.buckets


def mfu(shape: Shape, run: Run, seconds: float) -> float:
    """The share of the cards' peak that the model's own operations reach, without those that are computed again."""
    return sum(flops(shape, run.length, run.lora).values()) * run.tokens / (seconds * run.gpus * run.cluster.peak)


def facts(shape: Shape, run: Run) -> dict[str, int]:
    """The figures of a run that are compared with those of published runs, by the words for them."""
    seconds = parts(shape, run)
    talking = sum(seconds[name] for name in ("links within machines", "network", "latency"))
    return {
        "GPUs": run.gpus,
        "weights": shape.weights,
        "tokens of a text": run.length,
        "tokens of a micro-batch": run.micro_batch * run.length,
        # Each of the others may be usual, and what they come to together still new.
        "% of a step for communication": round(100 * talking / sum(seconds.values())),
    }


def extrapolated(shape: Shape, run: Run) -> list[str]:
    """How a run differs from all runs that forecasts were checked with; empty if it does not."""
    cluster = run.cluster
    unlike = [] if run.strategy in ("fsdp", "single") else [f"no published run is by {run.strategy}"]
    unlike += ["no published run is with LoRA"] if run.lora else []
    published = clusters.cards()[cluster.card] if cluster.card in PUBLISHED else None
    known = published is not None and published.rates == cluster.rates
    beyond = unlike if known else [*unlike, f"the rates are an {cluster.rates.upper()}'s"]
    for name, value in facts(shape, run).items():
        low, high = CHECKED[cluster.rates][name]
        if not low <= value <= high:
            things = "GPU" if (name, value) == ("GPUs", 1) else name
            beyond.append(f"{value:,} {things} ({low:,} to {high:,} were checked)")
    return beyond + _unlike(cluster, published, run.machines > 1) if published else beyond


def _unlike(cluster: Cluster, published: Cluster, several: bool) -> list[str]:
    """How a cluster's numbers differ from those of the published runs. several: whether there are several machines."""
    compared = {"peak": ("a peak of {:,g} TFLOPS", 1e12), "memory_bandwidth": ("a memory with {:,g} GB/s", 1e9)}
    compared["link"] = ("links of {:,g} GB/s within a machine", 1e9)
    if several:
        compared["gpus_per_machine"] = ("machines with {:,g} GPUs", 1)
        compared["network"] = ("a network of {:,g} Gbit/s", 1e9)
    found = []
    for name, (words, unit) in compared.items():
        own, there = (getattr(each, name) / unit for each in (cluster, published))
        if not math.isclose(own, there):  # 2.039 TB/s is 2039 GB/s but for the last bit
            found.append(f"{words.format(own)} ({there:,g} was checked)")
    return found
