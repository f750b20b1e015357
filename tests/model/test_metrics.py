"""Work and utilisation, held against figures worked out by hand."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from lockstep.data import plan
from lockstep.model import metrics
from lockstep.rank import memory

SHAPE = metrics.Shape(encoder=1000, head=30, layers=2, width=8)


def test_the_operations_of_two_sequences():
    # 6 * 1000 * (3 + 5) + 12 * 2 * 8 * (9 + 25) + 6 * 30 * 2
    assert metrics.training_flops(SHAPE, np.array([3, 5])) == 48000 + 6528 + 360
    # Frozen weights need no gradient; the head's weights do.
    assert metrics.training_flops(SHAPE, np.array([3, 5]), frozen=True) == 32000 + 6528 + 360


def test_the_shape_of_a_bert():
    """Of BERT's base model the encoder has 12 * (4 * 768² + 2 * 768 * 3072) weights in its matrices: 85 million."""
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(num_labels=6))
    shape = metrics.Shape.of(model)
    assert shape == metrics.Shape(encoder=84934656, head=768 * 768 + 768 * 6, layers=12, width=768)


def test_padding_is_work_that_says_nothing():
    lengths = np.array([3, 5, 4, 4])
    made = plan.make(lengths, global_batch=2, epochs=1, seed=0, batching="plain")
    work = metrics.work(made, lengths, SHAPE)
    padded = [int(width) for width in made.widths for _ in range(2)]
    assert (work["samples"], work["tokens"], work["padded_tokens"]) == (4, 16, sum(padded))
    assert work["flops"] == metrics.training_flops(SHAPE, lengths)
    assert work["padded_flops"] == metrics.training_flops(SHAPE, np.array(padded))


def test_utilisation():
    assert metrics.utilisation(6e12, seconds=2.0, devices=3, peak=4e12) == pytest.approx(0.25)
    assert metrics.utilisation(6e12, seconds=2.0, devices=3, peak=None) is None


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H200", "tf32", 494.5),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("NVIDIA L4", "fp32", 30.3),
        ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA GeForce RTX 5090", "bf16", None),
        ("", "fp32", None),
        *((name, "bf16", None) for name in ("NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 D")),
        *((name, "bf16", None) for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10-24Q")),
        *((name, "bf16", None) for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti")),
    ],
)
def test_a_gpu_is_known_by_whole_words_of_its_name(name, precision, tera):
    assert metrics.device_peak(name, precision) == (tera and tera * 1e12)


def test_a_cpu_is_measured():
    assert 1e8 < metrics.measure_cpu_peak("fp32") < 1e15


def test_memory_on_a_cpu():
    usage = memory.read(torch.device("cpu"))
    assert usage["peak_mb"] > usage["proportional_mb"] * 0.5 > 10
    assert usage["reserved_mb"] is None


def test_the_peak_is_that_of_the_fastest_layout(monkeypatch):
    """One of a linear layer's three products may have a kernel of its own, which is far slower."""
    multiply, seen = torch.mm, set()

    def mm(left, right, out):
        seen.add((left.is_contiguous(), right.is_contiguous()))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(metrics, "MEASURE_SECONDS", 0.01)
    assert metrics.measure_cpu_peak("fp32") > 0
    assert seen == {(True, True), (True, False), (False, True)}


def test_the_shape_of_a_classifier_with_layers_of_gpt_2():
    """Its linear layers have a class of their own: 3 * 8² for queries, keys and values, 8² after, and 2 * 4 * 8²."""
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    assert metrics.Shape.of(model) == metrics.Shape(encoder=768, head=16, layers=1, width=8)
