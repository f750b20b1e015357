"""Tokenised splits as they are stored, and batches made of them.

Training reads the Arrow files alone: it needs neither the datasets library nor a tokenizer, which would slow its start.
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
    """The file that holds the split; what is not read of it takes no memory."""
    (part,) = read_json(require(folder / "state.json", "prepare.py"))["_data_files"]
    with (folder / part["filename"]).open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    advise(mapped)
    return pa.py_buffer(mapped)


class Tokens:
    """One tokenised split: where the tokens of each text begin in `token_ids`, how many there are, and its label.

    starts, lengths, labels: int64 [n]. token_ids: int [any], with whatever lies between the texts; without `starts`
    they are end to end.
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
        """Tokens of the longest text."""
        return int(self.lengths.max())

    @staticmethod
    def load(folder: Path, pad_id: int | None = None) -> "Tokens":
        """The split stored at `folder`, as in results/data/dataset/train; without `pad_id` by data.json beside it.

        Nothing is copied: the whole file is seen as one array of numbers, in which the tokens lie here and there.
        """
        file = _mapped(folder)
        try:
            columns = pa.ipc.open_stream(file).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise prepared.damaged(folder, error) from None
        lists = columns.column("input_ids").chunks
        number = lists[0].values.type.to_pandas_dtype()
        size = np.dtype(number).itemsize
        # Where a list's numbers begin in the file: by the addresses in memory.
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
        """The token ids of samples `ids`, one text after the other: int [tokens]."""
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
        """All ids, shortest texts first, in batches of at most `size`: for evaluation, where order does not matter."""
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))
