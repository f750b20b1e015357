"""How much work a training is, by formula, and which share of what the devices could do was reached.

A transformer's training takes, for a sequence of s tokens,

    6 * N * s + 12 * L * h * s**2 + 6 * H      floating-point operations

N: weights in the encoder's matrix products, L: layers, h: width, H: weights in the head, which sees one token of each
sequence. A multiplication and an addition are two operations, and the backward pass does twice the work of the forward
one: 6 (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). The second term is attention's scores and their use
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Embeddings, normalisation and activations are left out.
With LoRA the N weights stay, and have no gradient of their own: 4 * N * s. Its updates, a few in a hundred, are left
out.
Of other models PyTorch counts the products of one sample's forward pass: H, and the rest is zero.
MFU, model FLOPs utilisation, is that over time and the devices' peak (the same appendix).
"""

import re
import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import yaml

from lockstep.config import precisions
from lockstep.paths import WORKFLOW

PEAKS_FILE = WORKFLOW / "devices.yaml"
MEASURE_SECONDS = 0.5
# Parts of a GPU (MIG, and virtual ones such as A10-24Q), and slower ones that have another's name in theirs.
LESS_THAN_ITS_NAME = re.compile(r"\b(MIG|NVL|Laptop|Mobile|Max-Q|Ti|SUPER|D)\b|-\d+[ABCQ]\b")


@dataclass(frozen=True)
class Shape:
    """What the formula needs of a model."""

    encoder: float  # N; of a model of one's own the products of a token, on average
    head: int  # H
    layers: int  # L
    width: int  # h

    @staticmethod
    def of(model) -> "Shape":
        """The shape of a Hugging Face encoder with a classification head."""
        from torch.nn import Linear

        weights = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, Linear)}
        prefix = model.base_model_prefix + "."
        encoder = sum(n for name, n in weights.items() if name.startswith(prefix) and "pooler" not in name)
        config = model.config
        return Shape(encoder, sum(weights.values()) - encoder, config.num_hidden_layers, config.hidden_size)

    @staticmethod
    def of_decoder(model) -> "Shape":
        """The shape of a causal language model of transformers', whose head sees every token."""
        from torch.nn import Linear
        from transformers.pytorch_utils import Conv1D  # the products of GPT-2 and its like

        products = sum(module.weight.numel() for module in model.modules() if isinstance(module, (Linear, Conv1D)))
        return Shape(products, 0, model.config.num_hidden_layers, model.config.hidden_size)

    @staticmethod
    def counted(model, inputs: dict, tokens: int = 0) -> "Shape":
        """The shape of any model, by what PyTorch counts in a forward pass over the `inputs` of one sample.

        tokens: how many of them that is, where the work grows with the length of a sample.
        """
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(**inputs)
        model.train()
        products = counter.get_total_flops() // 2
        return Shape(products / tokens, 0, 0, 0) if tokens else Shape(0, products, 0, 0)


def training_flops(shape: Shape, lengths: np.ndarray, frozen: bool = False) -> float:
    """Operations of one forward and backward pass over sequences of these lengths (int [n], tokens).

    frozen: whether the weights stay as they are, but for the head of an encoder.
    """
    lengths = lengths.astype(float)
    of_weight = 4 if frozen else 6
    linear = of_weight * shape.encoder * lengths.sum()
    attention = 12 * shape.layers * shape.width * (lengths**2).sum()
    return float(linear + attention + (6 if shape.encoder else of_weight) * shape.head * len(lengths))


def work(plan, lengths: np.ndarray, shape: Shape, frozen: bool = False) -> dict[str, float]:
    """What training `plan` takes: samples, tokens and operations, of the texts themselves and with their padding.

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
    """A GPU's peak in operations per second, by the name that its driver gives; None where the table has no figure."""
    if LESS_THAN_ITS_NAME.search(name):
        return None
    words = set(re.split(r"[\s-]+", name))
    for device in _known():
        if words.issuperset(device["name"].split()):
            tera = device["tflops"].get(precision)
            return tera * 1e12 if tera else None
    return None


def measure_cpu_peak(precision: str) -> float:
    """Operations per second of a square matrix product on this process's threads: the best of half a second."""
    import torch

    declared = precisions.of(precision)
    size, dtype = declared.matrix, getattr(torch, declared.dtype)
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out, best, end = torch.empty(size, size, dtype=dtype), float("inf"), time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def utilisation(flops: float, seconds: float, devices: float, peak: float | None) -> float | None:
    """The share of the devices' peak (each `peak` operations per second) that was reached; None where unknown."""
    return flops / (seconds * devices * peak) if peak else None
