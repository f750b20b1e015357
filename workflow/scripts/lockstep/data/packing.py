"""Texts end to end instead of padded: several in one row, kept apart by the attention mask.

Exact, as no text sees another, and each counts its positions from 0 (Krell et al. 2021, arXiv:2107.02027). For models
of BERT's build, whose head reads each text's first token. Where a GPU has attention for texts of any lengths
(FlashAttention, Dao et al. 2022, arXiv:2205.14135; by PyTorch's varlen_attn), all lie in one row and need no mask.
Elsewhere a mask keeps them apart. FlexAttention (Dong et al. 2024, arXiv:2412.05496) would skip the empty blocks of it;
its blocks have 128 tokens and a row is as wide as the longest text, so there are hardly any.
"""

import numpy as np
import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import SequenceClassifierOutput

from lockstep.data.tokens import Tokens


def rows(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where texts of `lengths` (int [n], each at most `width`) go: the row of each, and its first column; int64 [n].

    First fit, longest first (Johnson 1973): at most 11/9 of the fewest rows possible, and in practice hardly more.
    """
    row, column, used = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), []
    for text in np.argsort(-lengths, kind="stable"):
        fit = next((number for number, taken in enumerate(used) if taken + lengths[text] <= width), len(used))
        if fit == len(used):
            used.append(0)
        row[text], column[text] = fit, used[fit]
        used[fit] += lengths[text]
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


def end_to_end(tokens: Tokens, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Samples `ids` in one row, one after the other, for attention that is told where each begins: int64 arrays.

    input_ids, position_ids [1, tokens]; starts int32 [n + 1]: each text's first token, and the row's end; labels [n].
    """
    lengths = tokens.lengths[ids]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return {
        "input_ids": tokens.flat(ids)[None].astype(np.int64),
        "position_ids": (np.arange(starts[-1]) - np.repeat(starts[:-1], lengths))[None],
        "starts": starts.astype(np.int32),
        "labels": tokens.labels[ids],
    }


def several_rows(tokens: Tokens, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """Samples `ids` as `batch` packs them, in rows as wide as the longest text of all, whatever `width` they have."""
    return batch(tokens, ids, tokens.longest)


def one_row(tokens: Tokens, ids: np.ndarray, width: int) -> dict:
    """Samples `ids` as `end_to_end` has them, and how long the longest text of all is."""
    return end_to_end(tokens, ids) | {"longest": tokens.longest}


def use_varlen(model: torch.nn.Module) -> None:
    """Have `model` take rows of `end_to_end`, on a GPU and in bf16 or fp16; padded batches are as before."""
    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", sdpa_mask)
    model.config._attn_implementation = "varlen"


def attend(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **options):
    """Attention as transformers calls it; query, key and value are [batch, heads, tokens, width of a head]."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    one_row = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen.varlen_attn(*one_row, *bounds, scale=options["scaling"])[None], None


class Packed(torch.nn.Module):
    """A BERT classifier that takes packed rows, those of `end_to_end` with its longest text, and padded batches."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, text=None, first=None, starts=None, longest=None
    ):
        if first is None and starts is None:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)
        encoder = self.model.base_model
        if starts is None:
            mask = text[:, None, :, None] == text[:, None, None, :]  # [rows, 1, width, width]: which token sees which
            apart = {"attention_mask": mask}
        else:
            first, apart = starts[:-1], {"cu_seq_lens_q": starts, "max_length_q": longest}
        hidden = encoder(input_ids=input_ids, position_ids=position_ids, **apart).last_hidden_state
        pooled = encoder.pooler(hidden.flatten(0, 1)[first, None])
        return SequenceClassifierOutput(logits=self.model.classifier(self.model.dropout(pooled)))
