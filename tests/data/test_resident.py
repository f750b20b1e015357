"""Batches assembled on a device equal those assembled on the host."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.resident import ResidentTokens
from lockstep.data.tokens import Tokens

CPU = torch.device("cpu")
texts = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(np.array)


def tokens_of(lengths: np.ndarray, between: int) -> Tokens:
    """Texts of these lengths, with `between` other numbers before each, like in a file."""
    random, starts = np.random.default_rng(0), np.cumsum(lengths + between) - lengths
    numbers = random.integers(5, 50, starts[-1] + lengths[-1]).astype(np.int32)
    return Tokens(numbers, lengths, random.integers(0, 3, len(lengths)), pad_id=1, starts=starts)


@given(texts, st.integers(0, 3), st.integers(0, 9))
def test_batches_are_those_of_the_host(lengths, between, seed):
    tokens = tokens_of(lengths, between)
    resident = ResidentTokens(tokens, CPU)
    ids = np.random.default_rng(seed).permutation(len(lengths))[:8]
    width = int(lengths[ids].max()) + between
    batch, expected = resident.batch(torch.from_numpy(ids), width), tokens.batch(ids, width)
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
        assert batch[name].tolist() == array.tolist(), name
        assert batch[name].dtype == torch.int64


def test_what_lies_between_the_texts_takes_no_memory():
    lengths = np.array([3, 9, 4])
    assert len(ResidentTokens(tokens_of(lengths, between=100), CPU).token_ids) == lengths.sum()
