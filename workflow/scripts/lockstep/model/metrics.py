"""The floating-point operations of a training, and the devices' utilisation (MFU).

Training a transformer on a sequence of s tokens takes

    6 * N * s + 12 * L * h * s**2 + 6 * H      floating-point operations

N: weights in the encoder's matrix products, L: layers, h: width, H: weights in the head, which sees one token of each
sequence. The factor is 6 because a multiplication and an addition are two operations, and the backward pass does twice
the work of the forward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). The second term is the attention
scores and the weighted sum of values (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Embeddings, normalisation
and activations are left out.

With LoRA the N weights are frozen and need no gradient, so their term is 4 * N * s. The adapter's own operations, a few
per cent, are left out. For other models PyTorch counts the operations of one sample's forward pass; that count is H,
and the other terms are zero.

MFU (model FLOPs utilisation) is these operations divided by time and by the devices' peak (the same appendix).
"""

import re
import time
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import yaml

from lockstep.config import precisions
from lockstep.config.hardware import cores_of
from lockstep.paths import WORKFLOW

PEAKS_FILE = WORKFLOW / "devices.yaml"
MEASURE_SECONDS = 0.5
# Parts of a GPU (MIG, and virtual GPUs such as A10-24Q), and slower models whose name contains a faster one's.
LESS_THAN_ITS_NAME = re.compile(r"\b(MIG|NVL|Laptop|Mobile|Max-Q|Ti|SUPER|D)\b|-\d+[ABCQ]\b")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the formula needs."""

    encoder: float  # N; for a user's own model the measured multiplications per token
    head: int  # H
    layers: int  # L
    width: int  # h

    @staticmethod
    def of(model) -> "Shape":
        """The shape of a Hugging Face encoder with a classification head."""
        weights = {name: module.weight.numel() for name, module in model.named_modules() if _is_product(module)}
        prefix = model.base_model_prefix + "."
        encoder = sum(n for name, n in weights.items() if name.startswith(prefix) and "pooler" not in name)
        config = model.config
        return Shape(encoder, sum(weights.values()) - encoder, config.num_hidden_layers, config.hidden_size)

    @staticmethod
    def of_decoder(model) -> "Shape":
        """The shape of a causal language model of transformers', whose head sees every token."""
        products = sum(module.weight.numel() for module in model.modules() if _is_product(module))
        return Shape(products, 0, model.config.num_hidden_layers, model.config.hidden_size)

    @staticmethod
    def counted(model, inputs: dict, tokens: int = 0) -> "Shape":
        """The shape of any model, counted by PyTorch in a forward pass over the `inputs` of one sample.

        tokens: the sample's length in tokens, if the work grows with it; otherwise 0.
        """
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(**inputs)
        model.train()
        products = counter.get_total_flops() // 2
        return Shape(products / tokens, 0, 0, 0) if tokens else Shape(0, products, 0, 0)


def _is_product(module) -> bool:
    """Whether a module is a linear layer."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    return isinstance(module, (Linear, Conv1D))


def training_flops(shape: Shape, lengths: np.ndarray, frozen: bool = False) -> float:
    """Operations of one forward and backward pass over sequences of these lengths (int [n], tokens).

    frozen: whether the weights are frozen, except the head of an encoder.
    """
    lengths = lengths.astype(float)
    of_weight = 4 if frozen else 6
    linear = of_weight * shape.encoder * lengths.sum()
    attention = 12 * shape.layers * shape.width * (lengths**2).sum()
    return float(linear + attention + (6 if shape.encoder else of_weight) * shape.head * len(lengths))


def work(plan, lengths: np.ndarray, shape: Shape, frozen: bool = False) -> dict[str, float]:
    """The work in `plan`: samples, tokens and operations, the last two with and without padding.

    lengths: int [training split], each sample's tokens; frozen: as in `training_flops`.
    """
    real, padded = lengths[plan.ids], np.repeat(plan.widths, np.diff(plan.starts))
    return {
        "samples": len(real),
        "tokens": int(real.sum()),
        "padded_tokens": int(padded.sum()),
        "flops": training_flops(shape, real, frozen),
        "padded_flops": training_flops(shape, padded, frozen),
    }


@cache
def _known() -> list[dict]:
    return yaml.safe_load(PEAKS_FILE.read_text(encoding="utf-8"))["devices"]


def device_peak(name: str, precision: str) -> float | None:
    """A GPU's peak in operations per second, by its driver's name for it; None if the table has no figure."""
    if LESS_THAN_ITS_NAME.search(name):
        return None
    words = set(re.split(r"[\s-]+", name))
    for device in _known():
        if words.issuperset(device["name"].split()):
            tera = device["tflops"].get(precision)
            return tera * 1e12 if tera else None
    return None


def peak_of(row, settings: dict, environment: dict, cpu: dict | None, nodes=()) -> tuple[float, float | None]:
    """The number of GPUs or CPU cores of a run, and the peak of each in operations per second; None if unknown.

    Of GPUs of several models it is the mean. row: a config.Row; settings, environment: those of its run, as read back;
    cpu: what peak.py measured, if anything; nodes: those of its record, if it was on several.
    """
    if row.hardware.device == "cuda":
        tf32 = row.precision == "fp32" and settings["matmul"] != "highest"
        number, names = row.hardware.gpu_count, environment["gpus"][: row.hardware.gpu_count]
        if row.asked.mixed_gpus:  # otherwise all are of one model, also where a launcher shows a rank only its own GPU
            names = [name for node in nodes for name in node.get("gpus", ())] if nodes else names
            names = names if len(names) == number * row.hardware.nodes else []
        peaks = [device_peak(name, "tf32" if tf32 else row.precision) for name in names]
        known = peaks and None not in peaks
        return number * row.hardware.nodes, sum(peaks) / len(peaks) if known else None
    cores = cores_of(asdict(row.hardware), environment["cores"])
    rate = (cpu or {"flops_per_second": {}})["flops_per_second"].get(row.precision)
    return cores, rate / cpu["cores"] if rate else None


def measure_cpu_peak(precision: str) -> float:
    """Operations per second of a square matrix product on this process's threads: the best run in half a second for
    each layout that a linear layer's passes have.

    On CPUs without instructions for bf16 one of them may have a kernel of its own, 20 times as slow as the others.
    """
    import torch

    declared = precisions.of(precision)
    size, dtype = declared.matrix, getattr(torch, declared.dtype)
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out, seconds = torch.empty(size, size, dtype=dtype), []
    for first, second in ((left, right.t()), (left, right), (left.t(), right)):
        end = time.perf_counter() + MEASURE_SECONDS
        while time.perf_counter() < end:
            started = time.perf_counter()
            torch.mm(first, second, out=out)
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def utilisation(flops: float, seconds: float, devices: float, peak: float | None) -> float | None:
    """The share of the devices' peak (each `peak` operations per second) that was reached; None if it is unknown."""
    return flops / (seconds * devices * peak) if peak else None
