"""Packing instead of padding: a row holds several texts, and an attention mask separates them.

Packing is exact, since no text attends to another and each counts its positions from 0 (Krell et al. 2021,
arXiv:2107.02027). It is for models like BERT, whose head reads the first token of each text. On a GPU with attention
for variable lengths (FlashAttention, Dao et al. 2022, arXiv:2205.14135, by PyTorch's varlen_attn), all texts of a batch
are in one row, without a mask. Elsewhere a mask separates them. FlexAttention (Dong et al. 2024, arXiv:2412.05496)
could skip empty blocks of the mask, but blocks have 128 tokens and a row is only as wide as the longest text, so
hardly any block is empty.
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
    """Assign texts of `lengths` (int [n], each at most `width`) to rows: the row and first column of each, int64 [n].

    First-fit decreasing (Johnson 1973) needs at most 11/9 of the minimal number of rows, usually hardly more than it.
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
    """Samples `ids`, packed into rows of `width` tokens, as int64 arrays.

    input_ids, position_ids and text are [rows, width]: the token, its position in its text, and the number of the text
    (-1 for padding). first [n] is where each text begins, if the rows are concatenated. labels is [n].
    """
    lengths = tokens.lengths[ids]
    row, column = rows(lengths, width)
    number = np.repeat(np.arange(len(ids)), lengths)  # the number of each token's text
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
    """Samples `ids` concatenated in one row, for attention that takes the beginning of each text; int64 arrays.

    input_ids and position_ids are [1, tokens]; starts, int32 [n + 1], is each text's first token and the end of the
    row; labels is [n].
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
    """Samples `ids` packed by `batch` into rows as wide as the longest text of the split; `width` is ignored."""
    return batch(tokens, ids, tokens.longest)


def one_row(tokens: Tokens, ids: np.ndarray, width: int) -> dict:
    """Samples `ids` in one row (`end_to_end`), with the length of the longest text of the split; `width` is ignored."""
    return end_to_end(tokens, ids) | {"longest": tokens.longest}


def use_varlen(model: torch.nn.Module) -> None:
    """Make `model` accept rows of `end_to_end`, on a GPU in bf16 or fp16; it still accepts padded batches."""
    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", sdpa_mask)
    model.config._attn_implementation = "varlen"


def attend(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **options):
    """Attention with the signature that transformers expects; query, key, value: [batch, heads, tokens, head width]."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    one_row = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen.varlen_attn(*one_row, *bounds, scale=options["scaling"])[None], None


class Packed(torch.nn.Module):
    """A BERT classifier that takes packed rows (`several_rows` or `one_row`) and padded batches."""

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
            mask = text[:, None, :, None] == text[:, None, None, :]  # [rows, 1, width, width]: same text
            separation = {"attention_mask": mask}
        else:
            first, separation = starts[:-1], {"cu_seq_lens_q": starts, "max_length_q": longest}
        hidden = encoder(input_ids=input_ids, position_ids=position_ids, **separation).last_hidden_state
        pooled = encoder.pooler(hidden.flatten(0, 1)[first, None])
        return SequenceClassifierOutput(logits=self.model.classifier(self.model.dropout(pooled)))
