"""Divide samples into splits, and tokenise and store splits of texts.

Texts are written to disk while they are read, and then read back in parts: memory grows by some tens of bytes per row,
however long the texts are.
"""

import hashlib
import itertools
import logging
import tempfile
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars

from lockstep.config.sections import Data
from lockstep.data import corpus, sources, vocabulary
from lockstep.data.labels import Labels, in_order, position
from lockstep.data.tokens import Tokens
from lockstep.errors import BadInput, listed
from lockstep.files import hash_arrays

SPLITS = ("train", "dev", "test")
MANY_LABELS = 20  # more labels than this with too few samples suggest that data.label is the wrong column
PART = 1000  # the number of texts in memory at a time


def split(data: Data, downloads: Path, work: Path) -> tuple[dict[str, Dataset], dict]:
    """Read texts and divide them into splits. Returns each split (columns text, label, row) and the report's summary.

    The splits are views of a file in `work`. Raises BadInput.
    """
    notes: list[str] = []
    if data.embedded and data.labels is None:
        data = replace(data, labels=list(corpus.lexicon()["shares"]))
    labels = Labels(data.labels)
    name, rows = sources.read(data, downloads, notes, labels)
    file = work / "rows.arrow"
    digests, codes = _write(rows, file)
    if not len(codes):
        raise BadInput(f"{name}: holds no rows. Give a source with texts and labels.")
    everything = Dataset.from_file(str(file))
    numbers, parts, summary = divide(
        digests, codes, labels, lambda at: f"row {everything[at]['row']}", data, name, notes, "text"
    )
    everything = everything.add_column("label", numbers)
    return {part: everything.select(places) for part, places in parts.items()}, summary


def divide(
    digests: np.ndarray,
    codes: np.ndarray,
    own_labels: Labels,
    where: Callable[[int], str],
    data: Data,
    source: str,
    notes: list[str],
    unit: str,
    tests: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], dict]:
    """Divide samples among the splits, stratified by label and seeded.

    Returns each sample's label as a number, the positions of each split's samples, and a summary for the report.

    Args:
        digests: [n], equal for equal samples. Only the first of equal samples is kept, so that none is in two splits.
        codes: int64 [n], each sample's label, as its number in `own_labels`.
        where: returns the name of the sample at a position, for messages.
        unit: what a sample is called in messages: "text" or "image".
        tests: bool [n], the samples that the source assigns to the test split; only the others are then divided.

    Raises BadInput if a label is unknown, there is only one label, or a split would be empty.
    """
    _, first, which = np.unique(digests, return_index=True, return_inverse=True)
    kept = np.sort(first)
    labels = _label_names(codes, kept, own_labels.names, data, source, unit)
    numbers = _label_numbers(codes, kept, own_labels.names, labels, lambda at: f"{source}, {where(at)}")
    contradicted = int((codes != codes[first[which]]).sum())
    notes += _label_notes(codes, kept, numbers, own_labels, labels, contradicted, unit)
    held_back = kept[tests[kept]] if tests is not None else kept[:0]
    divided = kept[~tests[kept]] if tests is not None else kept
    removed = len(codes) - len(kept)
    places = _stratified(numbers[divided], labels, data, source, unit, removed, with_test=not len(held_back))
    parts = {part: divided[inside] for part, inside in places.items()}
    if len(held_back):
        parts["test"] = held_back
        if untrained := np.setdiff1d(numbers[held_back], numbers[divided]).tolist():
            names = listed(labels[number] for number in untrained)
            notes.append(f"the label {names} is in the test split only, so no model can learn it here")
    notes += _lacking(numbers, parts, divided, labels, unit)
    summary = {
        "source": source,
        "synthetic": data.embedded,
        "notes": notes,
        "labels": labels,
        "rows_read": len(codes),
        "duplicates_removed": removed,
        "duplicates_with_another_label": contradicted,
        "splits": {
            part: {"texts": len(inside), "labels": _counts(numbers[inside], labels)} for part, inside in parts.items()
        },
    }
    return numbers, parts, summary


def _label_names(
    codes: np.ndarray, kept: np.ndarray, own_names: list[str], data: Data, source: str, unit: str
) -> list[str]:
    """The names of the labels: those of data.labels or, without, those of the samples that are kept."""
    labels = [unicodedata.normalize("NFC", name) for name in data.labels or ()]
    labels = labels or in_order(own_names[code] for code in np.unique(codes[kept]))
    if len(labels) > 1:
        return labels
    if len(own_names) > 1 and not data.labels:
        raise BadInput(
            f"{source}: only the label {labels[0]} is left, since every {unit} with another label repeats an"
            " earlier one. At least two labels are needed."
        )
    only = f" of the first {data.limit} (data.limit)" if data.limit and len(codes) == data.limit else ""
    raise BadInput(f"{source}: all rows{only} have the label {labels[0]}; at least two labels are needed.")


def _label_numbers(
    codes: np.ndarray, kept: np.ndarray, own_names: list[str], labels: list[str], where: Callable[[int], str]
) -> np.ndarray:
    """Each sample's label, as its position in `labels`. Raises BadInput for the first sample whose label is absent."""
    number_of = np.full(len(own_names), -1)
    for at in sorted(np.unique(codes[kept], return_index=True)[1]):  # the first sample of each label
        first_at = int(kept[at])
        number_of[codes[first_at]] = position(own_names[codes[first_at]], labels, where(first_at))
    return number_of[codes]


def _label_notes(
    codes: np.ndarray,
    kept: np.ndarray,
    numbers: np.ndarray,
    own_labels: Labels,
    labels: list[str],
    contradicted: int,
    unit: str,
) -> list[str]:
    """What is odd about the labels. contradicted: how many removed duplicates have another label."""
    own_names, notes = own_labels.names, []
    if absent := [name for number, name in enumerate(labels) if number not in numbers[kept]]:
        notes.append(f"no {unit} has the label {listed(absent)}, which counts as 0 in every macro-F1")
        if labels[0] in absent and labels != own_names and all(name.isdecimal() for name in own_names):
            notes.append(f"numbers are taken for positions in data.labels, counted from 0, and no {unit} has the 0")
    gone = [own_names[code] for code in np.setdiff1d(codes, codes[kept])]
    if gone:
        notes.append(f"every {unit} with the label {listed(gone)} repeats an earlier one, so the class is empty")
    if contradicted:
        notes.append(f"{contradicted} of the removed duplicates have another label than the {unit} that they repeat")
    counts = Counter({own_names[code]: count for code, count in Counter(codes.tolist()).items()})
    return notes + own_labels.notes(counts, unit)


def _lacking(
    numbers: np.ndarray, parts: dict[str, np.ndarray], divided: np.ndarray, labels: list[str], unit: str
) -> list[str]:
    """Notes on splits without a label that was divided among them: shares of a rare label may be less than a sample."""
    notes = []
    for part, inside in parts.items():
        if gone := np.setdiff1d(numbers[divided], numbers[inside]).tolist():
            names = listed(labels[number] for number in gone)
            effect = "so no model can learn it" if part == "train" else "which counts as 0 in its macro-F1"
            notes.append(f"no {unit} of the {part} split has the label {names}, {effect}")
    return notes


def _write(rows: Iterator[tuple[str, int, int]], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write texts and row numbers to `file`. Returns each text's digest (16 bytes) and its label's number.

    Texts that differ only in blanks, or in how Unicode composes a letter, have the same digest, since a model could
    recognise one by the other.
    """
    digests, codes = bytearray(), array("q")
    schema = pa.schema({"text": pa.string(), "row": pa.int64()})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for part in _parts(rows):
            texts, labels, numbers = zip(*part, strict=True)
            stream.write_batch(pa.record_batch([pa.array(texts), pa.array(numbers)], schema=schema))
            codes.extend(labels)
            for text in texts:
                letters = unicodedata.normalize("NFC", "".join(text.split()))
                digests += hashlib.blake2b(letters.encode(), digest_size=16).digest()
    return np.frombuffer(digests, "S16"), np.frombuffer(codes, np.int64)


def _parts(rows: Iterator) -> Iterator[list]:
    while part := list(itertools.islice(rows, PART)):
        yield part


def texts(part: Dataset) -> Iterator[str]:
    """Every text of a split, in order."""
    for batch in part.iter(PART):
        yield from batch["text"]


def _stratified(
    labels: np.ndarray, names: list[str], data: Data, source: str, unit: str, removed: int, with_test: bool
) -> dict[str, np.ndarray]:
    """The positions in `labels` of each split's samples; without `with_test` there are only train and dev.

    removed: how many duplicates were removed before, for messages.
    """
    from sklearn.model_selection import train_test_split

    wanted = SPLITS if with_test else SPLITS[:2]
    few = [names[label] for label, count in Counter(labels.tolist()).items() if count < len(wanted)]
    gone = f" (after {removed:,} duplicates were removed)" if removed else ""
    if few:
        column = f" Is data.label the right column? It has {len(names)} labels." if len(few) > MANY_LABELS else ""
        raise BadInput(
            f"{source}: too few {unit}s with the label {listed(few)}{gone}: each of {', '.join(wanted[:-1])} and"
            f" {wanted[-1]} needs one. Give more data, raise data.limit, or drop the label.{column}"
        )
    shares = data.splits
    held_out = shares["dev"] + shares["test"] if with_test else shares["dev"] / (shares["train"] + shares["dev"])
    try:
        train, rest = train_test_split(
            np.arange(len(labels)), test_size=held_out, stratify=labels, random_state=data.seed
        )
        if not with_test:
            return {"train": np.sort(train), "dev": np.sort(rest)}
        dev, test = train_test_split(
            rest, test_size=shares["test"] / held_out, stratify=labels[rest], random_state=data.seed
        )
    except ValueError:  # scikit-learn's message has numbers of labels, not their names
        counts = listed(f"{name}: {count}" for name, count in _counts(labels, names).items() if count)
        raise BadInput(
            f"{source}: {len(labels)} {unit}s ({counts}) can't be divided by data.splits with every label in each"
            f" split{gone}. Give more data, or other shares in data.splits."
        ) from None
    return {"train": np.sort(train), "dev": np.sort(dev), "test": np.sort(test)}


def _counts(labels: np.ndarray, names: list[str]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, np.bincount(labels, minlength=len(names)), strict=True)}


def store(splits: dict[str, Dataset], tokenizer, folder: Path, notes: list[str], one_end: bool = False) -> dict:
    """Tokenise every split and write it to `folder` as Arrow. Returns the hash and the token counts by split.

    one_end: whether the model requires the same number of end-of-text tokens in every text, as BART does. Raises
    BadInput if texts differ in it.
    """
    disable_progress_bars()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    remarks = vocabulary.Remarks(tokenizer)

    def tokenise(batch: dict) -> dict:
        token_ids = tokenizer(batch["text"], truncation=True)["input_ids"]
        remarks.add(batch["text"], token_ids)
        remarks.add_cut(batch["text"], token_ids)
        return {"input_ids": token_ids}

    with tempfile.TemporaryDirectory(dir=folder) as work:
        tokenised = DatasetDict()
        for name, part in splits.items():
            tokenised[name] = part.map(
                tokenise,
                batched=True,
                batch_size=PART,
                features=Features(part.features | {"input_ids": List(Value("int32"))}),
                cache_file_name=f"{work}/{name}.arrow",
                new_fingerprint=name,  # datasets would hash the tokenizer for it, which takes longer than tokenising
            )
        tokenised.save_to_disk(folder, num_shards=dict.fromkeys(splits, 1))
    if one_end and len(remarks.ends) > 1:
        usual, _ = remarks.ends.most_common(1)[0]
        others = remarks.ends.total() - remarks.ends[usual]
        raise BadInput(
            f"model.name: this model looks for {tokenizer.eos_token} at the end of a text, but {others} texts contain"
            " it elsewhere, too. Remove it from them."
        )
    notes += remarks.notes()
    stored = {name: Tokens.load(folder / name, pad_id=0) for name in splits}
    arrays = {}
    for name, part in stored.items():
        counted = np.dtype(np.int32), (int(part.lengths.sum()),), _pieces(part)
        arrays |= {f"{name}/input_ids": counted, f"{name}/lengths": part.lengths, f"{name}/labels": part.labels}
    return {
        "hash": hash_arrays(arrays),
        "tokens": {name: int(part.lengths.sum()) for name, part in stored.items()},
        "longest": {name: part.longest for name, part in stored.items()},
    }


def _pieces(tokens: Tokens) -> Iterator[np.ndarray]:
    for first in range(0, len(tokens), PART):
        yield tokens.flat(np.arange(first, min(first + PART, len(tokens))))
