"""Packed rows contain every token once, and a model's outputs equal those for padded batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

from lockstep.data import packing
from lockstep.data.tokens import Tokens

texts = st.lists(st.integers(2, 40), min_size=1, max_size=60).map(np.array)


def tokens_of(lengths: np.ndarray) -> Tokens:
    random = np.random.default_rng(0)
    return Tokens(random.integers(5, 50, lengths.sum()), lengths, random.integers(0, 3, len(lengths)), pad_id=0)


@given(texts)
def test_rows_overlap_nowhere_and_are_hardly_more_than_needed(lengths):
    row, column = packing.rows(lengths, 40)
    taken = np.zeros((row.max() + 1, 40), int)
    for text, length in enumerate(lengths):
        taken[row[text], column[text] : column[text] + length] += 1
    assert taken.max() == 1
    assert taken.sum() == lengths.sum()
    # First-fit decreasing takes at most 11/9 of the fewest rows, and 6/9 (Dosa 2007). These are at least as many as the
    # tokens fill, and as there are texts of which no two fit into a row.
    fewest = max(np.ceil(lengths.sum() / 40), (lengths > 20).sum())
    assert len(taken) <= 11 / 9 * fewest + 1 or (np.sort(lengths)[::-1][: len(taken)] > 13).all()


@given(texts)
def test_every_token_is_there_once_at_its_place(lengths):
    tokens = tokens_of(lengths)
    ids = np.random.default_rng(1).permutation(len(lengths))
    packed = packing.batch(tokens, ids, 40)
    flat = {name: packed[name].reshape(-1) for name in ("input_ids", "position_ids", "text")}
    for number, sample in enumerate(ids):
        there = np.flatnonzero(flat["text"] == number)
        start = tokens.starts[sample]
        assert flat["input_ids"][there].tolist() == tokens.token_ids[start : start + lengths[sample]].tolist()
        assert flat["position_ids"][there].tolist() == list(range(lengths[sample]))
        assert packed["first"][number] == there[0]
    assert packed["labels"].tolist() == tokens.labels[ids].tolist()
    assert (flat["input_ids"][flat["text"] < 0] == tokens.pad_id).all()


def inputs(batch: dict) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items() if name != "labels"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **shape)).eval()


def test_a_model_sees_the_same_texts(model):
    tokens = tokens_of(np.array([7, 40, 3, 22, 5, 11, 2, 30]))
    ids = np.arange(8)
    padded, packed = inputs(tokens.batch(ids, 40)), inputs(packing.batch(tokens, ids, 40))
    both = packing.Packed(model)
    assert len(packed["input_ids"]) < 8
    torch.testing.assert_close(both(**packed).logits, both(**padded).logits, atol=1e-5, rtol=1e-5)
    # Negative control: texts that attend to each other have other outputs.
    mixed = packed | {"text": torch.zeros_like(packed["text"])}
    with pytest.raises(AssertionError):
        torch.testing.assert_close(both(**mixed).logits, both(**padded).logits, atol=1e-5, rtol=1e-5)


def by_formula(query, key, value, starts, _, longest, __, scale):
    """varlen_attn by its definition, attention within each text, as it has no kernel on a CPU."""
    texts = zip(*(tensor.split(starts.diff().tolist()) for tensor in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [attend(*(part.transpose(0, 1) for part in text), scale=scale).transpose(0, 1) for text in texts]
    return torch.cat(parts)


@given(texts)
def test_in_one_row_every_token_is_there_once_at_its_place(lengths):
    tokens = tokens_of(lengths)
    ids = np.random.default_rng(1).permutation(len(lengths))
    row = packing.end_to_end(tokens, ids)
    assert row["input_ids"].shape == (1, lengths.sum())
    for number, sample in enumerate(ids):
        there = slice(row["starts"][number], row["starts"][number + 1])
        start = tokens.starts[sample]
        assert row["input_ids"][0, there].tolist() == tokens.token_ids[start : start + lengths[sample]].tolist()
        assert row["position_ids"][0, there].tolist() == list(range(lengths[sample]))
    assert row["labels"].tolist() == tokens.labels[ids].tolist()


def test_a_model_sees_the_same_texts_in_one_row(model, monkeypatch):
    monkeypatch.setattr(packing.varlen, "varlen_attn", by_formula)
    tokens = tokens_of(np.array([7, 40, 3, 22, 5, 11, 2, 30]))
    ids = np.arange(8)
    padded, row = inputs(tokens.batch(ids, 40)), inputs(packing.end_to_end(tokens, ids))
    expected = model(**padded).logits
    packing.use_varlen(model)
    both = packing.Packed(model)
    torch.testing.assert_close(both(**row, longest=40).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both(**padded).logits, expected, atol=1e-5, rtol=1e-5)
    # Negative control: a text attends to one token of its neighbour.
    row["starts"][1] += 1
    with pytest.raises(AssertionError):
        torch.testing.assert_close(both(**row, longest=40).logits, expected, atol=1e-5, rtol=1e-5)
