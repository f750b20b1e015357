"""Load tokenised splits, and make batches of them.

Training reads the Arrow files directly. It needs neither the datasets library nor a tokenizer, whose imports are slow.
"""

import mmap
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from lockstep.data import prepared
from lockstep.data.mapped import advise
from lockstep.files import read_json
from lockstep.paths import about_split, require


def table(folder: Path) -> pa.Table:
    """The columns text, label, row and input_ids of the split stored at `folder`, memory-mapped."""
    return pa.ipc.open_stream(_mapped(folder)).read_all()


def _mapped(folder: Path) -> pa.Buffer:
    """The file that holds the split, memory-mapped, so that only the parts that are read take memory."""
    (part,) = read_json(require(folder / "state.json", "prepare.py"))["_data_files"]
    with (folder / part["filename"]).open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    advise(mapped)
    return pa.py_buffer(mapped)


class Tokens:
    """One tokenised split: the start of each text in `token_ids`, its number of tokens, and its label.

    starts, lengths, labels: int64 [n]. token_ids: int [any], which may contain other numbers between the texts; without
    `starts` the texts are contiguous.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        labels: np.ndarray,
        pad_id: int,
        starts: np.ndarray | None = None,
    ):
        self.token_ids, self.lengths, self.labels, self.pad_id = token_ids, lengths, labels, pad_id
        self.starts = np.cumsum(lengths) - lengths if starts is None else starts

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return int(self.lengths.max())

    @staticmethod
    def load(folder: Path, pad_id: int | None = None) -> "Tokens":
        """Load the split stored in a folder such as results/data/dataset/train; `pad_id` is by default data.json's.

        Nothing is copied: the whole file is viewed as one array of numbers, with the tokens somewhere in it.
        """
        file = _mapped(folder)
        try:
            columns = pa.ipc.open_stream(file).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise prepared.damaged(folder, error) from None
        lists = columns.column("input_ids").chunks
        number = lists[0].values.type.to_pandas_dtype()
        size = np.dtype(number).itemsize
        # Where each chunk's numbers begin in the file, computed from addresses in memory.
        first = [(chunk.values.buffers()[1].address - file.address) // size + chunk.values.offset for chunk in lists]
        return Tokens(
            token_ids=np.frombuffer(file, number, count=file.size // size),
            lengths=np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in lists]).astype(np.int64),
            labels=columns.column("label").to_numpy().copy(),
            pad_id=read_json(about_split(folder))["pad_id"] if pad_id is None else pad_id,
            starts=np.concatenate(
                [
                    begin + chunk.offsets.to_numpy()[:-1].astype(np.int64)
                    for begin, chunk in zip(first, lists, strict=True)
                ]
            ),
        )

    def flat(self, ids: np.ndarray) -> np.ndarray:
        """The token ids of samples `ids`, concatenated: int [tokens]."""
        lengths = self.lengths[ids]
        begins = np.cumsum(lengths) - lengths
        return self.token_ids[np.arange(lengths.sum()) + np.repeat(self.starts[ids] - begins, lengths)]

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
        """All ids in batches of at most `size`, shortest texts first; for evaluation, where order does not matter."""
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))
