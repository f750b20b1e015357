"""Documents for language models: read, divided, and laid end to end in sequences of tokens; and batches of those.

Or rows of a prompt and its completion, each of which is a sequence of its own.
"""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.config.sections import Data
from lockstep.data import mapped, prepared, sources, vocabulary
from lockstep.errors import BadInput
from lockstep.files import hash_arrays, read_json
from lockstep.paths import about_split, require

NO_TARGET = -100  # the label of a token whose successor is not learnt, which cross-entropy leaves out
SPLITS = ("train", "dev", "test")
ARRAYS = ("input_ids", "labels", "positions", "lengths")
TARGETS = "targets"  # of each sequence: stored too, as counting them reads all labels


class Sequences:
    """One prepared split: its sequences, one after the other.

    input_ids, labels, positions: int32 [tokens]: each token, the one that follows it in its document (or NO_TARGET),
    and its position, which begins anew with each document, and with each sequence. lengths: int64 [n], tokens of each
    sequence. targets: int64 [n], of how many of them the next one is learnt.
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
        """The split stored at `folder`, as in results/data/dataset/train."""
        require(folder / f"{ARRAYS[0]}.npy", "prepare.py")
        try:
            arrays = [mapped.array(folder / f"{name}.npy") for name in (*ARRAYS, TARGETS)]
        except (OSError, ValueError) as error:
            raise prepared.damaged(folder, error) from None
        lengths, targets = map(np.array, arrays[3:])
        return Sequences(*arrays[:3], lengths, read_json(about_split(folder))["pad_id"], targets)

    def batch(self, ids: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Sequences `ids`, padded to `width` tokens: input_ids, position_ids, labels int64 [len(ids), width], and
        attention_mask bool [len(ids), 1, width, width].

        A token attends to itself and to those before it in its own document. Padding is documents of one token.
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
        """All ids, shortest sequences first, in batches of at most `size`."""
        return np.array_split(np.argsort(self.lengths, kind="stable"), range(size, len(self), size))

    def pieces(self) -> list[tuple[int, int]]:
        """Where in `input_ids` each document, or what a sequence's end has left of it, begins and ends."""
        begins = np.flatnonzero(self.positions == 0)
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.positions)], strict=True))


Rows = list[tuple[str, ...]]  # (text,), or (prompt, completion)


def read(data: Data, downloads: Path, notes: list[str]) -> tuple[str, Rows]:
    """The source's name, and its documents; rows of (prompt, completion) where data.completion is set.

    They are all in memory at once. Raises BadInput.
    """
    if (data.prompt is None) != (data.completion is None):
        raise BadInput("data.prompt, data.completion: one of them is set. Set both, or none for plain texts.")
    columns = [(data.text, "text")]
    if data.completion is not None:
        columns = [(data.prompt, "prompt"), (data.completion, "completion")]
    if data.embedded and data.completion is not None:
        raise BadInput("data.completion: the embedded corpus has none. Name data of yours, or set it to null.")
    name, rows = sources.records(_without_labels(data, columns), downloads, notes, labelled=len(columns) > 1)
    texts = [(column, position) for position, (column, _) in enumerate(columns)]
    data, rows = sources.with_blanks_decided(data, rows, texts, notes)
    documents = [
        tuple(
            sources.text_of(row, column, position, key, f"{name}, row {number}", data)
            for position, (column, key) in enumerate(columns)
        )
        for number, row in rows
    ]
    if isinstance(columns[0][0], int) and _looks_like_names(documents):
        notes.append(
            f"the first text of {name} is {' and '.join(map(repr, documents[0]))}, and is learnt as any other; if it is"
            " the name of a column, set data.text (or data.prompt and data.completion) to it"
        )
    return name, documents


def _looks_like_names(documents: Rows) -> bool:
    """Whether the first row may be a header: each of its texts could be a name, and no other row has such."""
    named = [all(text.isascii() and text.isidentifier() for text in row) for row in documents]
    return len(named) > 1 and named[0] and not any(named[1:])


def _without_labels(data: Data, columns: list[tuple[str | int, str]]) -> Data:
    """For the readers, which look for a column of texts and one of labels, the columns that there are."""
    return replace(data, text=columns[0][0], label=columns[-1][0], labels=None)


def divide(rows: Rows, data: Data, source: str, notes: list[str]) -> tuple[dict[str, Rows], dict]:
    """Divide rows among the splits, each once, by a seeded permutation; and a summary for the report."""
    digests = [hashlib.blake2b("\0".join(row).encode(), digest_size=16).digest() for row in rows]
    kept = [rows[at] for at in sorted({digest: at for at, digest in reversed(list(enumerate(digests)))}.values())]
    order, sizes = np.random.default_rng(data.seed).permutation(len(kept)), {}
    for part in ("dev", "test"):
        sizes[part] = max(1, round(data.splits[part] * len(kept)))
    sizes["train"] = len(kept) - sum(sizes.values())
    if sizes["train"] < 1:
        raise BadInput(
            f"{source}: holds {len(kept)} different texts, and each of train, dev and test needs one. Give more; in a"
            " plain text file an empty line separates two."
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
    """Tokenise every split and write it to `folder`. Returns the hash, and tokens and targets by split."""
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
                f"{source}: all texts to train on have {arrays['lengths'].sum()} tokens together, and one sequence has"
                f" {max_length} (data.max_length). Give more text, or lower it."
            )
        if not (arrays["labels"] != NO_TARGET).any():
            raise BadInput(f"{source}: the texts of the {name} split have no token that follows another. Give more.")
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
            f"{cut} rows have more than {max_length} tokens (data.max_length): the prompt's first ones are left out,"
            " and the completion's last ones where that alone is longer"
        )
    return {"hash": hash_arrays(hashed)} | summary


def count_targets(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """In how many places of each sequence the next token is learnt: int64 [n]."""
    return np.add.reduceat(labels != NO_TARGET, np.cumsum(lengths) - lengths, dtype=np.int64)


def _tokenise(tokenizer, texts: list[str], remarks: vocabulary.Remarks | None) -> list[list[int]]:
    """The tokens of each text, without those that begin or end one."""
    token_ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    if remarks:
        remarks.add(texts, token_ids)
    return token_ids


def _ends(tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that begin and end a document; none where the tokenizer has no such."""
    return tuple([number] if number is not None else [] for number in (tokenizer.bos_token_id, tokenizer.eos_token_id))


def packed_texts(
    rows: Rows, tokenizer, max_length: int, remarks: vocabulary.Remarks | None = None
) -> dict[str, np.ndarray]:
    """All documents end to end, cut into sequences of `max_length` tokens; the last one may be shorter.

    A token's target is the next one of its document, also where a sequence ends between them.
    """
    begin, end = _ends(tokenizer)
    documents = [begin + ids + end for ids in _tokenise(tokenizer, [text for (text,) in rows], remarks)]
    sizes = np.array([len(ids) for ids in documents])
    flat = np.fromiter((token for ids in documents for token in ids), np.int32, sizes.sum())
    labels = np.append(flat[1:], NO_TARGET).astype(np.int32)
    labels[np.cumsum(sizes) - 1] = NO_TARGET
    # A piece begins where a document does, or a sequence; a token's position is how far it is from there.
    places = np.arange(len(flat))
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    positions = places - np.maximum(begins, places // max_length * max_length)
    lengths = np.full(math.ceil(len(flat) / max_length), max_length)
    lengths[-1] = len(flat) - max_length * (len(lengths) - 1)
    # Where a sequence begins with the end of the last document, nothing is learnt from it: the loss of a batch of it
    # alone would be no number.
    if lengths[-1] == 1 < len(lengths):
        flat, labels, positions, lengths = flat[:-1], labels[:-1], positions[:-1], lengths[:-1]
    return {"input_ids": flat, "labels": labels, "positions": positions.astype(np.int32), "lengths": lengths}


def packed_pairs(
    rows: Rows, tokenizer, max_length: int, remarks: vocabulary.Remarks | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Each row a sequence, of which the completion is learnt, its end too; and how many rows are too long."""
    begin, end = _ends(tokenizer)
    prompts, completions = zip(*rows, strict=True)
    sequences, cut = [], 0
    tokens = (_tokenise(tokenizer, list(texts), remarks) for texts in (prompts, completions))
    for prompt, completion in zip(*tokens, strict=True):
        learnt = (completion + end)[: max_length - 1]
        given = begin + prompt
        # What is fed is all but the last token, so that there is room for one more.
        room = max_length + 1 - len(learnt)
        cut += len(given) > room or len(completion + end) > len(learnt)
        given = begin + prompt[max(0, len(given) - room) :] if len(given) > room else given
        sequences.append((given, learnt))
    lengths = np.array([len(given) + len(learnt) - 1 for given, learnt in sequences])
    tokens = [given + learnt for given, learnt in sequences]
    targets = [[NO_TARGET] * (len(given) - 1) + learnt for given, learnt in sequences]
    flat = np.concatenate([np.array(ids[:-1], dtype=np.int32) for ids in tokens])
    labels = np.concatenate([np.array(ids, dtype=np.int32) for ids in targets])
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return {"input_ids": flat, "labels": labels, "positions": positions, "lengths": lengths}, cut


def trigram_perplexity(train: Sequences, test: Sequences, vocabulary: int) -> float:
    """The perplexity of a 3-gram model with add-one smoothing over the targets of `test`, counted on those of `train`.

    P(w | u, v) = (times that w followed u, v + 1) / (times that u, v stood there + vocabulary). It sees no more than
    the model: of what lies before a document, or before the piece of it in a sequence, it is told only that.
    """
    context, target = _trigrams(train, vocabulary)
    seen, times = np.unique(context, return_counts=True)
    followed, often = np.unique(context * vocabulary + target, return_counts=True)
    context, target = _trigrams(test, vocabulary)
    chances = (_count(followed, often, context * vocabulary + target) + 1) / (_count(seen, times, context) + vocabulary)
    return float(np.exp(-np.log(chances).mean()))


def _trigrams(sequences: Sequences, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The two tokens before each target, as one number, and the targets themselves. int64 [targets] each."""
    tokens = np.asarray(sequences.input_ids, dtype=np.int64)
    before = np.append(vocabulary, tokens[:-1])
    before[np.asarray(sequences.positions) == 0] = vocabulary  # no token
    learnt = np.asarray(sequences.labels) != NO_TARGET
    return (before * (vocabulary + 1) + tokens)[learnt], np.asarray(sequences.labels, dtype=np.int64)[learnt]


def _count(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How often each of `wanted` stands among the sorted `keys`, by their `counts`; 0 where it does not."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, counts[places], 0)
