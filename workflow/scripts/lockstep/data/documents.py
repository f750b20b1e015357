"""Data for language models: read documents, split them, pack them into sequences of tokens, and make batches.

Rows of a prompt and its completion are also read; each of them is a sequence of its own.
"""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.config.sections import Data
from lockstep.data import mapped, prepared, sources, vocabulary
from lockstep.data.labels import is_no_text, of_missing_texts
from lockstep.errors import BadInput, shortened
from lockstep.files import hash_arrays, read_json
from lockstep.paths import about_split, require

NO_TARGET = -100  # the label of a token whose successor is not a target; cross-entropy ignores it
SPLITS = ("train", "dev", "test")
ARRAYS = ("input_ids", "labels", "positions", "lengths")
TARGETS = "targets"  # the number of targets of each sequence; stored, as counting them would read all labels


class Sequences:
    """One prepared split: the tokens of all its sequences, one sequence after the other.

    Args:
        input_ids: int32 [tokens].
        labels: int32 [tokens], the token that follows each one in its document, or NO_TARGET.
        positions: int32 [tokens], counted from 0 in each document and in each sequence.
        lengths: int64 [n], the number of tokens of each sequence.
        targets: int64 [n], the number of labels of each sequence that are not NO_TARGET.
    """

    def __init__(
        self, input_ids: np.ndarray, labels: np.ndarray, positions: np.ndarray, lengths, pad_id: int, targets=None
    ):
        self.input_ids, self.labels, self.positions, self.lengths = input_ids, labels, positions, lengths
        self.starts, self.pad_id = np.cumsum(lengths) - lengths, pad_id
        self.targets = count_targets(labels, lengths) if targets is None else targets

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def load(folder: Path) -> "Sequences":
        """Load the split stored in a folder such as results/data/dataset/train."""
        require(folder / f"{ARRAYS[0]}.npy", "prepare.py")
        try:
            arrays = [mapped.array(folder / f"{name}.npy") for name in (*ARRAYS, TARGETS)]
        except (OSError, ValueError) as error:
            raise prepared.damaged(folder, error) from None
        lengths, targets = map(np.array, arrays[3:])
        return Sequences(*arrays[:3], lengths, read_json(about_split(folder))["pad_id"], targets)

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Sequences `ids`, padded to `width` tokens: input_ids, position_ids and labels, int64 [len(ids), width], and
        attention_mask, bool [len(ids), 1, width, width].

        A token attends to itself and to earlier tokens of its own document. Each padding token is a document of its
        own, so that its row of the mask is not empty.
        """
        columns = np.arange(width)
        inside = columns < self.lengths[ids, None]
        places = np.where(inside, self.starts[ids, None] + columns, 0)
        positions = np.where(inside, self.positions[places], 0)
        documents = (positions == 0).cumsum(axis=1)
        mask = (documents[:, :, None] == documents[:, None, :]) & (columns[:, None] >= columns)
        return {
            "input_ids": np.where(inside, self.input_ids[places], self.pad_id).astype(np.int64),
            "attention_mask": mask[:, None],
            "position_ids": positions.astype(np.int64),
            "labels": np.where(inside, self.labels[places], NO_TARGET).astype(np.int64),
        }

    def batches(self, size: int) -> list[np.ndarray]:
        """All ids in batches of at most `size`, shortest sequences first."""
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))

    def pieces(self) -> list[tuple[int, int]]:
        """Begin and end in `input_ids` of each document, or of each part of a document that sequences divide."""
        begins = np.flatnonzero(self.positions == 0)
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.positions)], strict=True))


Rows = list[tuple[str, ...]]  # (text,), or (prompt, completion)


def read(data: Data, downloads: Path, notes: list[str]) -> tuple[str, Rows]:
    """The source's name, and its documents, or its rows of (prompt, completion) if data.completion is set.

    All rows are held in memory. Raises BadInput.
    """
    if (data.prompt is None) != (data.completion is None):
        raise BadInput("data.prompt, data.completion: only one of them is set. Set both, or none for plain texts.")
    columns = [(data.text, "text")]
    if data.completion is not None:
        columns = [(data.prompt, "prompt"), (data.completion, "completion")]
    if data.embedded and data.completion is not None:
        raise BadInput("data.completion: the embedded corpus has none. Name data of your own, or set it to null.")
    name, rows = sources.records(_without_labels(data, columns), downloads, notes, labelled=len(columns) > 1)
    texts = [(column, position) for position, (column, _) in enumerate(columns)]
    data, rows = sources.with_blanks_decided(data, rows, texts, notes)
    wide = 0  # the most columns of a row without names, of which one is the text
    documents = []
    for number, row in rows:
        wide = max(wide, len(row) if isinstance(row, list) else 0)
        documents.append(
            tuple(
                sources.text_of(row, column, position, key, f"{name}, row {number}", data)
                for position, (column, key) in enumerate(columns)
            )
        )
    if wide > len(columns) == 1:
        place = data.text if isinstance(data.text, int) else 0
        notes.append(f"rows have up to {wide} columns, of which number {place} (data.text, from 0) is the text")
    notes += of_missing_texts(sum(is_no_text(text) for row in documents for text in row))
    if isinstance(columns[0][0], int) and _looks_like_names(documents):
        notes.append(
            f"the first text of {name} is {' and '.join(map(repr, documents[0]))}, and is trained on like any other; if"
            " it is the name of a column, set data.text (or data.prompt and data.completion) to it"
        )
    return name, documents


def _looks_like_names(documents: Rows) -> bool:
    """Whether the first row may be a header: each of its texts could be a name, which is true of no other row."""
    named = [all(text.isascii() and text.isidentifier() for text in row) for row in documents]
    return len(named) > 1 and named[0] and not any(named[1:])


def _without_labels(data: Data, columns: list[tuple[str | int, str]]) -> Data:
    """`data` for the readers, which expect a column of texts and one of labels, with the columns of `columns`."""
    return replace(data, text=columns[0][0], label=columns[-1][0], labels=None)


def divide(rows: Rows, data: Data, source: str, notes: list[str]) -> tuple[dict[str, Rows], dict]:
    """Divide the distinct rows among the splits by a seeded permutation. Returns the splits and a summary."""
    digests = [hashlib.blake2b("\0".join(row).encode(), digest_size=16).digest() for row in rows]
    kept = [rows[at] for at in sorted({digest: at for at, digest in reversed(list(enumerate(digests)))}.values())]
    order, sizes = np.random.default_rng(data.seed).permutation(len(kept)), {}
    for part in ("dev", "test"):
        sizes[part] = max(1, round(data.splits[part] * len(kept)))
    sizes["train"] = len(kept) - sum(sizes.values())
    if sizes["train"] < 1:
        raise BadInput(
            f"{source}: holds {len(kept)} different texts, but each of train, dev and test needs at least one. Give"
            " more; in a plain text file an empty line separates two."
        )
    parts, first = {}, 0
    for part in SPLITS:
        parts[part] = [kept[at] for at in np.sort(order[first : first + sizes[part]])]
        first += sizes[part]
    summary = {
        "source": source,
        "synthetic": data.embedded,
        "notes": notes,
        "labels": [],
        "rows_read": len(rows),
        "duplicates_removed": len(rows) - len(kept),
        "duplicates_with_another_label": 0,
        "splits": {part: {"texts": len(inside), "labels": {}} for part, inside in parts.items()},
    }
    return parts, summary


def store(parts: dict[str, Rows], tokenizer, max_length: int, source: str, notes: list[str], folder: Path) -> dict:
    """Tokenise every split and write it to `folder`. Returns the hash, and counts of tokens and targets by split."""
    remarks = vocabulary.Remarks(tokenizer)
    hashed, summary, cut = {}, {"tokens": {}, "targets": {}, "sequences": {}, "longest": {}}, 0
    for name, rows in parts.items():
        if len(rows[0]) > 1:
            arrays, shortened = packed_pairs(rows, tokenizer, max_length, remarks)
            cut += shortened
        else:
            arrays = packed_texts(rows, tokenizer, max_length, remarks)
        if name == "train" and len(rows[0]) == 1 and arrays["lengths"][0] < max_length:
            raise BadInput(
                f"{source}: the training texts have {arrays['lengths'].sum()} tokens in total, too few for one sequence"
                f" of {max_length} (data.max_length). Give more text, or lower data.max_length."
            )
        if not (arrays["labels"] != NO_TARGET).any():
            raise BadInput(f"{source}: no text of the {name} split has a token to predict. Give longer texts.")
        (folder / name).mkdir(parents=True)
        for key, array in arrays.items():
            np.save(folder / name / f"{key}.npy", array)
            hashed[f"{name}/{key}"] = array
        targets = count_targets(arrays["labels"], arrays["lengths"])
        np.save(folder / name / f"{TARGETS}.npy", targets)
        summary["tokens"][name] = int(arrays["lengths"].sum())
        summary["targets"][name] = int(targets.sum())
        summary["sequences"][name] = len(arrays["lengths"])
        summary["longest"][name] = int(arrays["lengths"].max())
    notes += remarks.notes()
    if cut:
        notes.append(
            f"{cut} rows have more than {max_length} tokens (data.max_length): the prompt's first tokens are left out,"
            " and the completion's last ones if the completion alone is longer"
        )
    return {"hash": hash_arrays(hashed)} | summary


def count_targets(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The number of targets of each sequence: int64 [n]."""
    return np.add.reduceat(labels != NO_TARGET, np.cumsum(lengths) - lengths, dtype=np.int64)


def _tokenise(tokenizer, texts: list[str], remarks: vocabulary.Remarks | None) -> list[list[int]]:
    """The tokens of each text, without special tokens."""
    token_ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    if remarks:
        remarks.add(texts, token_ids)
    return token_ids


def _ends(tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that begin and end a document: a list of one token each, or an empty list if there is none."""
    return tuple([number] if number is not None else [] for number in (tokenizer.bos_token_id, tokenizer.eos_token_id))


def packed_texts(
    rows: Rows, tokenizer, max_length: int, remarks: vocabulary.Remarks | None = None
) -> dict[str, np.ndarray]:
    """All documents concatenated and cut into sequences of `max_length` tokens; the last one may be shorter.

    A token's target is the next token of its document, even if a sequence ends between the two.
    """
    begin, end = _ends(tokenizer)
    documents = [begin + ids + end for ids in _tokenise(tokenizer, [text for (text,) in rows], remarks)]
    sizes = np.array([len(ids) for ids in documents])
    flat = np.fromiter((token for ids in documents for token in ids), np.int32, sizes.sum())
    labels = np.append(flat[1:], NO_TARGET).astype(np.int32)
    labels[np.cumsum(sizes) - 1] = NO_TARGET
    # Positions are counted from the beginning of the document or of the sequence, whichever is later.
    places = np.arange(len(flat))
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    positions = places - np.maximum(begins, places // max_length * max_length)
    lengths = np.full(math.ceil(len(flat) / max_length), max_length)
    lengths[-1] = len(flat) - max_length * (len(lengths) - 1)
    # A last sequence of one token has no target, so the loss of a batch with it alone would be 0 / 0: drop it.
    if lengths[-1] == 1 < len(lengths):
        flat, labels, positions, lengths = flat[:-1], labels[:-1], positions[:-1], lengths[:-1]
    return {"input_ids": flat, "labels": labels, "positions": positions.astype(np.int32), "lengths": lengths}


def packed_pairs(
    rows: Rows, tokenizer, max_length: int, remarks: vocabulary.Remarks | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Make each row a sequence whose targets are the completion and its end token. Also counts truncated rows."""
    begin, end = _ends(tokenizer)
    prompts, completions = zip(*rows, strict=True)
    sequences, cut = [], 0
    tokens = (_tokenise(tokenizer, list(texts), remarks) for texts in (prompts, completions))
    for prompt, completion in zip(*tokens, strict=True):
        learnt = (completion + end)[: max_length - 1]
        given = begin + prompt
        # The model's input lacks the last token, so max_length + 1 tokens fit.
        room = max_length + 1 - len(learnt)
        cut += len(given) > room or len(completion + end) > len(learnt)
        given = begin + prompt[max(0, len(given) - room) :] if len(given) > room else given
        if not learnt or len(given) + len(learnt) < 2:
            text = shortened(rows[len(sequences)])
            raise BadInput(f"the tokenizer makes no token to predict of the row {text}. Remove it from the data.")
        sequences.append((given, learnt))
    lengths = np.array([len(given) + len(learnt) - 1 for given, learnt in sequences])
    tokens = [given + learnt for given, learnt in sequences]
    targets = [([NO_TARGET] * len(given) + learnt)[1:] for given, learnt in sequences]
    flat = np.concatenate([np.array(ids[:-1], dtype=np.int32) for ids in tokens])
    labels = np.concatenate([np.array(ids, dtype=np.int32) for ids in targets])
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return {"input_ids": flat, "labels": labels, "positions": positions, "lengths": lengths}, cut


def trigram_perplexity(train: Sequences, test: Sequences, vocabulary: int) -> float:
    """The perplexity on the targets of `test` of a 3-gram model with add-one smoothing, counted on those of `train`.

    P(w | u, v) = (count(u, v, w) + 1) / (count(u, v) + vocabulary). It sees no more context than the model: a special
    token stands for whatever precedes a document, or a document's part in a sequence.
    """
    context, target = _trigrams(train, vocabulary)
    seen, times = np.unique(context, return_counts=True)
    followed, often = np.unique(context * vocabulary + target, return_counts=True)
    context, target = _trigrams(test, vocabulary)
    chances = (_count(followed, often, context * vocabulary + target) + 1) / (_count(seen, times, context) + vocabulary)
    return float(np.exp(-np.log(chances).mean()))


def _trigrams(sequences: Sequences, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The two tokens before each target, encoded as one number, and the targets: int64 [targets] each."""
    tokens = np.asarray(sequences.input_ids, dtype=np.int64)
    before = np.append(vocabulary, tokens[:-1])
    before[np.asarray(sequences.positions) == 0] = vocabulary  # stands for "no token"
    learnt = np.asarray(sequences.labels) != NO_TARGET
    return (before * (vocabulary + 1) + tokens)[learnt], np.asarray(sequences.labels, dtype=np.int64)[learnt]


def _count(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of each of `wanted`: `counts` belongs to the sorted `keys`, and absent keys count 0."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, counts[places], 0)
