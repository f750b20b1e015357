"""Tokenised splits as they are stored, and batches made of them.

Training reads the Arrow files alone: it needs neither the datasets library nor a tokenizer, which would slow its start.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from lockstep.errors import BadInput
from lockstep.files import read_json


def table(folder: Path) -> pa.Table:
    """The columns text, label, row and input_ids of the split stored at `folder`, memory-mapped."""
    if not (folder / "state.json").is_file():
        raise BadInput(f"{folder} does not exist. Run workflow/scripts/prepare.py first.")
    files = [folder / part["filename"] for part in read_json(folder / "state.json")["_data_files"]]
    return pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files)


class Tokens:
    """One tokenised split: `labels` [n] and `lengths` [n] (int64), and the token ids of all texts end to end."""

    def __init__(self, token_ids: np.ndarray, lengths: np.ndarray, labels: np.ndarray, pad_id: int):
        self.token_ids, self.lengths, self.labels, self.pad_id = token_ids, lengths, labels, pad_id
        self.starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self.lengths.max())

    @staticmethod
    def load(folder: Path) -> "Tokens":
        """The split stored at `folder`, as in results/data/dataset/train."""
        columns = table(folder)
        tokens = columns.column("input_ids").combine_chunks()
        return Tokens(
            token_ids=tokens.flatten().to_numpy(),
            lengths=tokens.value_lengths().to_numpy().astype(np.int64),
            labels=columns.column("label").to_numpy().copy(),
            pad_id=read_json(folder.parents[1] / "data.json")["pad_id"],
        )

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Samples `ids`, padded to `width` tokens: input_ids, attention_mask [len(ids), width], labels [len(ids)]."""
        columns = np.arange(width)
        mask = columns < self.lengths[ids, None]
        positions = np.where(mask, self.starts[ids, None] + columns, 0)
        return {
            "input_ids": np.where(mask, self.token_ids[positions], self.pad_id).astype(np.int64),
            "attention_mask": mask.astype(np.int64),
            "labels": self.labels[ids],
        }

    def batches(self, size: int) -> list[np.ndarray]:
        """All ids, shortest texts first, in batches of at most `size`: for evaluation, where order does not matter."""
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))
