"""Texts end to end instead of padded: several in one row, kept apart by the attention mask.

Exact, as no text sees another, and each counts its positions from 0 (Krell et al. 2021, arXiv:2107.02027). For models
of BERT's build, whose head reads each text's first token.
"""

import numpy as np
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from lockstep.data.tokens import Tokens


def rows(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where texts of `lengths` (int [n], each at most `width`) go: the row of each, and its first column; int64 [n].

    First fit, longest first (Johnson 1973): at most 11/9 of the fewest rows possible, and in practice hardly more.
    """
    row, column, used = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), []
    for text in np.argsort(-lengths, kind="stable"):
        place = next((number for number, taken in enumerate(used) if taken + lengths[text] <= width), len(used))
        if place == len(used):
            used.append(0)
        row[text], column[text] = place, used[place]
        used[place] += lengths[text]
    return row, column


def batch(tokens: Tokens, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """Samples `ids`, packed into rows of `width` tokens: int64 arrays.

    input_ids, position_ids, text [rows, width]: token, its place in its text, and the number of that text (-1: none);
    first [n]: where in all rows, one after the other, each text begins; labels [n].
    """
    lengths = tokens.lengths[ids]
    row, column = rows(lengths, width)
    number = np.repeat(np.arange(len(ids)), lengths)  # of each token, one text after the other
    position = np.arange(len(number)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = row * width + column
    size = (row.max() + 1) * width
    arrays = {
        name: np.full(size, fill, np.int64)
        for name, fill in (("input_ids", tokens.pad_id), ("position_ids", 0), ("text", -1))
    }
    there = first[number] + position
    arrays["input_ids"][there] = tokens.flat(ids)
    arrays["position_ids"][there] = position
    arrays["text"][there] = number
    return {name: array.reshape(-1, width) for name, array in arrays.items()} | {
        "first": first,
        "labels": tokens.labels[ids],
    }


class Packed(torch.nn.Module):
    """A BERT classifier that takes packed rows, and padded batches as before."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, position_ids=None, text=None, first=None):
        if first is None:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)
        encoder = self.model.base_model
        mask = text[:, None, :, None] == text[:, None, None, :]  # [rows, 1, width, width]: which token sees which
        hidden = encoder(input_ids=input_ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
        pooled = encoder.pooler(hidden.flatten(0, 1)[first, None])
        return SequenceClassifierOutput(logits=self.model.classifier(self.model.dropout(pooled)))
