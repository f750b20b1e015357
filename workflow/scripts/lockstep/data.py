"""From rows to splits, and from splits to stored tokens."""

import logging
from collections import Counter
from pathlib import Path

import numpy as np

from lockstep import sources
from lockstep.config import Data
from lockstep.errors import BadInput
from lockstep.files import hash_arrays

SPLITS = ("train", "dev", "test")


def split(data: Data, downloads: Path) -> tuple[dict[str, dict], dict]:
    """Read the source and divide it. Returns each split's columns (text, label, row), and a summary for the report.

    The first of several equal texts stays, so that no text stands in two splits. Splits are stratified by label and
    seeded. Raises BadInput where a label is unknown, or a split would be empty.
    """
    name, rows = sources.read(data, downloads)
    kept, repeated, contradicting = {}, 0, 0
    for text, label, number in rows:
        if text in kept:
            repeated += 1
            contradicting += kept[text][0] != label
        else:
            kept[text] = (label, number)
    if not kept:
        raise BadInput(f"{name}: holds no rows. Give a source with texts and labels.")
    labels = data.labels or sorted({str(label) for label, _ in kept.values()})
    if len(labels) < 2:
        raise BadInput(f"{name}: all rows have the label {labels[0]}; at least two labels are needed.")
    numbers = [_label_number(label, labels, f"{name}, row {number}") for label, number in kept.values()]
    texts, row_numbers = list(kept), [number for _, number in kept.values()]
    columns = {
        split_name: {
            "text": [texts[index] for index in indices],
            "label": [numbers[index] for index in indices],
            "row": [row_numbers[index] for index in indices],
        }
        for split_name, indices in _stratified(np.array(numbers), labels, data, name).items()
    }
    summary = {
        "source": name,
        "synthetic": data.synthetic,
        "labels": labels,
        "rows_read": len(kept) + repeated,
        "duplicates_removed": repeated,
        "duplicates_with_another_label": int(contradicting),
        "splits": {
            split_name: {"texts": len(part["label"]), "labels": _counts(part["label"], labels)}
            for split_name, part in columns.items()
        },
    }
    return columns, summary


def _label_number(label, labels: list[str], where: str) -> int:
    """A label's number: by its name, or the number as which it stands in the data."""
    if str(label) in labels:
        return labels.index(str(label))
    if (
        isinstance(label, (int, str))
        and not isinstance(label, bool)
        and str(label).isdecimal()
        and int(label) < len(labels)
    ):
        return int(label)
    raise BadInput(
        f"{where}: label {label!r} is not one of {', '.join(labels)} or a number from 0 to {len(labels) - 1}."
        " Mend the row, or set data.labels (null takes the labels from the data)."
    )


def _stratified(labels: np.ndarray, names: list[str], data: Data, source: str) -> dict[str, np.ndarray]:
    from sklearn.model_selection import train_test_split

    few = [names[label] for label, count in Counter(labels.tolist()).items() if count < len(SPLITS)]
    if few:
        raise BadInput(
            f"{source}: too few texts with the label {', '.join(few)}: each of train, dev and test needs one."
            " Give more data, raise data.limit, or drop the label."
        )
    held_out = data.splits["dev"] + data.splits["test"]
    try:
        train, rest = train_test_split(
            np.arange(len(labels)), test_size=held_out, stratify=labels, random_state=data.seed
        )
        dev, test = train_test_split(
            rest, test_size=data.splits["test"] / held_out, stratify=labels[rest], random_state=data.seed
        )
    except ValueError as error:
        raise BadInput(f"{source}: {len(labels)} texts can't be split as data.splits says: {error}") from None
    return {"train": np.sort(train), "dev": np.sort(dev), "test": np.sort(test)}


def _counts(labels: list[int], names: list[str]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, np.bincount(labels, minlength=len(names)), strict=True)}


def store(columns: dict[str, dict], tokenizer, folder: Path) -> dict:
    """Tokenise every split once and write it to `folder` as Arrow. Returns the hash, and token counts by split."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenised = DatasetDict()
    for name, part in columns.items():
        token_ids = tokenizer(part["text"], truncation=True)["input_ids"]
        tokenised[name] = Dataset.from_dict(part | {"input_ids": token_ids})
    tokenised.save_to_disk(folder)
    lengths = {name: np.array([len(ids) for ids in part["input_ids"]]) for name, part in tokenised.items()}
    arrays = {}
    for name, part in tokenised.items():
        arrays[f"{name}/input_ids"] = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in part["input_ids"]])
        arrays[f"{name}/lengths"] = lengths[name]
        arrays[f"{name}/labels"] = np.array(part["label"])
    return {
        "hash": hash_arrays(arrays),
        "tokens": {name: int(counts.sum()) for name, counts in lengths.items()},
        "longest": {name: int(counts.max()) for name, counts in lengths.items()},
    }
