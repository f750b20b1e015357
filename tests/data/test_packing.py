"""Packed rows hold every token once, and a model makes the same of them as of padded ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    assert len(taken) <= 11 / 9 * np.ceil(lengths.sum() / 40) + 1 or (np.sort(lengths)[::-1][: len(taken)] > 13).all()


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


def test_a_model_sees_the_same_texts():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **shape)).eval()
    tokens = tokens_of(np.array([7, 40, 3, 22, 5, 11, 2, 30]))
    ids = np.arange(8)
    padded = {name: torch.from_numpy(array) for name, array in tokens.batch(ids, 40).items() if name != "labels"}
    packed = {
        name: torch.from_numpy(array) for name, array in packing.batch(tokens, ids, 40).items() if name != "labels"
    }
    both = packing.Packed(model)
    assert len(packed["input_ids"]) < 8
    torch.testing.assert_close(both(**packed).logits, both(**padded).logits, atol=1e-5, rtol=1e-5)
    # The negative control: texts that see each other are no longer the same.
    mixed = packed | {"text": torch.zeros_like(packed["text"])}
    with pytest.raises(AssertionError):
        torch.testing.assert_close(both(**mixed).logits, both(**padded).logits, atol=1e-5, rtol=1e-5)
