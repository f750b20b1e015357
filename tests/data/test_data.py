"""Splits: no text is in two, each has every label, removed texts are counted. Tokens: batches."""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import growth
from lockstep.config import reading
from lockstep.config.sections import Model
from lockstep.data import prepare
from lockstep.data.tokens import Tokens, table
from lockstep.errors import BadInput
from lockstep.files import hash_arrays
from lockstep.model import encoders
from tests.conftest import PROJECT, REAL_DATA

SCRIPTS = PROJECT / "workflow" / "scripts"


def split(tmp_path, rows, **keys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    wanted = reading.parse({"data": {"path": str(file)} | keys, "rows": {"single": {"strategy": "single"}}}).data
    return lists(prepare.split(wanted, tmp_path, tmp_path))


def lists(prepared):
    """Splits as columns of plain values, and their summary."""
    splits, summary = prepared
    return {name: part.to_dict() for name, part in splits.items()}, summary


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=200), st.integers(0, 5))
def test_no_text_stands_in_two_splits(tmp_path_factory, drawn, seed):
    enough = [[f"大 {number}", number % 3] for number in range(100, 160)]
    rows = [[f"小{text}", label] for text, label in drawn] + enough
    splits, summary = split(tmp_path_factory.mktemp("split"), rows, labels=["a", "b", "c"], seed=seed)
    texts = [text for part in splits.values() for text in part["text"]]
    different = {text.replace(" ", "") for text in texts}  # blanks alone make no other text
    assert len(texts) == len(different) == len({text.replace(" ", "") for text, _ in rows})
    assert summary["duplicates_removed"] == len(rows) - len(texts)
    for part in splits.values():
        for text, number in zip(part["text"], part["row"], strict=True):
            assert rows[number - 1][0] == text
        assert set(part["label"]) == {0, 1, 2}
        assert part["row"] == sorted(part["row"])


def test_splits_keep_the_shares_of_the_labels(tmp_path):
    rows = [[f"文{number}", "ab"[number % 4 == 0]] for number in range(1000)]
    splits, summary = split(tmp_path, rows, labels=["a", "b"])
    assert {name: len(part["label"]) for name, part in splits.items()} == {"train": 800, "dev": 100, "test": 100}
    assert summary["splits"]["test"]["labels"] == {"a": 75, "b": 25}


def test_labels_are_taken_from_the_data_where_none_are_given(tmp_path):
    rows = [[f"文{number}", ["froh", "traurig"][number % 2]] for number in range(60)]
    assert split(tmp_path, rows, labels=None)[1]["labels"] == ["froh", "traurig"]


def test_the_embedded_corpus_has_its_own_labels_in_their_order(tmp_path):
    """They are not a default for other data."""
    data = reading.parse({"data": {"limit": 300}}).data
    assert data.labels is None
    _, summary = prepare.split(data, tmp_path, tmp_path)
    assert summary["labels"] == ["其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴"]


def test_texts_that_differ_in_blanks_alone_are_one(tmp_path):
    rows = [[f"word number {number}", number % 2] for number in range(60)] + [
        ["word  number 0 ", 0],
        ["word number0", 0],
    ]
    assert split(tmp_path, rows, join_blanks=False)[1]["duplicates_removed"] == 2


def test_a_letter_that_is_composed_of_two_makes_no_other_text(tmp_path):
    rows = [[f"café {number}", number % 2] for number in range(60)] + [["cafe\u0301 7", 1]]
    assert split(tmp_path, rows)[1]["duplicates_removed"] == 1


def test_where_names_are_numbers_numbers_are_names(tmp_path):
    """They are not taken for positions: 0 would be the first name, and mixed with its texts."""
    rows = [[f"文{number}", number % 3] for number in range(60)]
    with pytest.raises(BadInput, match=r"row 1: label '0' is not one of 1, 2\. Fix the row"):
        split(tmp_path, rows, labels=["1", "2"])
    assert split(tmp_path, rows, labels=["0", "1", "2"])[1]["splits"]["test"]["labels"] == {"0": 2, "1": 2, "2": 2}


def test_a_label_without_a_text_is_noted(tmp_path):
    rows = [[f"文{number}", number % 2] for number in range(60)]
    assert split(tmp_path, rows, labels=["a", "b", "c"])[1]["notes"] == [
        "no text has the label c, which counts as 0 in every macro-F1"
    ]


def test_a_split_without_a_rare_label_is_noted(tmp_path):
    """Of 3 texts a tenth is none, so the label is in neither split's macro-F1."""
    labels = ["a"] * 34 + ["b"] * 34 + ["c"] * 3 + ["d"] * 29
    summary = split(tmp_path, [[f"文{number}", label] for number, label in enumerate(labels)], labels=None)[1]
    assert [part["labels"]["c"] for part in summary["splits"].values()] == [3, 0, 0]
    assert summary["notes"] == [
        f"no text of the {part} split has the label c, which counts as 0 in its macro-F1" for part in ("dev", "test")
    ]


def test_duplicates_under_another_label_are_counted(tmp_path):
    rows = [[f"文{number}", number % 2] for number in range(60)] + [["文0", 1], ["文 1", 1]]
    summary = split(tmp_path, rows, labels=["a", "b"])[1]
    assert (summary["duplicates_removed"], summary["duplicates_with_another_label"]) == (2, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows.json: holds no rows"),
        ([["文", 0], ["字", 7]], "rows.json, row 2: label '7' is not one of a, b or a number from 0 to 1"),
        ([["文", "c"]], "rows.json, row 1: label 'c' is not one of a, b"),
        ([["文", -1]], "rows.json, row 1: label '-1' is not one of"),
        ([["文", True]], "rows.json, row 1: label 'True' is not one of"),
        ([[f"文{n}", int(n == 0)] for n in range(50)], "too few texts with the label b"),
        ([["文", 1]] * 9 + [[f"文{n}", 0] for n in range(50)], "the label b (after 8 duplicates were removed)"),
        ([[f"文{n}", n % 2] for n in range(8)], "8 texts (a: 4, b: 4) can't be divided by data.splits"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, rows, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        split(tmp_path, rows, labels=["a", "b"])


def test_the_real_rows(tmp_path):
    if not REAL_DATA.is_file():
        pytest.skip("the real rows are not on this machine, and their licence does not let them be part of Lockstep")
    wanted = reading.parse({"data": {"path": str(REAL_DATA)}, "rows": {"single": {"strategy": "single"}}}).data
    splits, summary = lists(prepare.split(wanted, tmp_path, tmp_path))
    assert (summary["rows_read"], summary["duplicates_removed"]) == (10000, 61)
    assert summary["duplicates_with_another_label"] == 19
    assert sum(len(part["label"]) for part in splits.values()) == 9939
    assert not summary["synthetic"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    (folder / "dataset").mkdir()
    texts = ["今天真开心", "好难过😭", "a", "今天天气不知道怎么样"]
    tokenizer = encoders.make_tokenizer(scratch(), texts * 2, 8)
    summary = prepare.store(columns(texts), tokenizer, folder / "dataset", [])
    (folder / "data.json").write_text(json.dumps({"pad_id": 0}))
    return folder, summary, tokenizer, texts


def columns(texts: list[str], dev_labels=(0, 1, 0, 1)) -> dict[str, Dataset]:
    labels = {"train": [0, 1, 0, 1], "dev": list(dev_labels), "test": [0, 1, 0, 1]}
    return {
        name: Dataset.from_dict({"text": texts, "label": labels[name], "row": [1, 2, 3, 4]}) for name in prepare.SPLITS
    }


def scratch(**keys) -> Model:
    return Model(
        **{"name": "scratch", "revision": None, "hidden_size": 8, "layers": 1, "heads": 2, "dropout": None} | keys
    )


def test_batches_hold_what_the_tokenizer_says(stored):
    folder, _, tokenizer, texts = stored
    tokens = Tokens.load(folder / "dataset" / "train")
    assert tokens.lengths.tolist() == [7, 6, 3, 8]  # the last one is cut to max_length
    ids = np.array([2, 0])
    batch = tokens.batch(ids, 7)
    expected = tokenizer([texts[2], texts[0]], padding="max_length", max_length=7)
    assert batch["input_ids"].tolist() == expected["input_ids"]
    assert batch["attention_mask"].tolist() == expected["attention_mask"]
    assert batch["labels"].tolist() == [0, 0]
    assert table(folder / "dataset" / "test")["text"].to_pylist() == texts


def test_evaluation_batches_hold_every_sample_once(stored):
    tokens = Tokens.load(stored[0] / "dataset" / "dev")
    assert sorted(np.concatenate(tokens.batches(3))) == [0, 1, 2, 3]


def test_the_hash_is_that_of_the_content(stored, tmp_path):
    _, summary, tokenizer, texts = stored

    def hash_of(splits):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return prepare.store(splits, tokenizer, folder, [])["hash"]

    assert hash_of(columns(texts)) == summary["hash"]
    ids = tokenizer(texts, truncation=True)["input_ids"]
    labels, lengths = np.array([0, 1, 0, 1]), np.array([len(text) for text in ids])
    whole = {"input_ids": np.concatenate(ids).astype(np.int32), "lengths": lengths, "labels": labels}
    named = {f"{split}/{name}": array for split in prepare.SPLITS for name, array in whole.items()}
    assert summary["hash"] == hash_arrays(named)  # in whatever pieces it was read
    assert hash_of(columns(texts, dev_labels=(0, 1, 0, 0))) != summary["hash"]
    assert hash_of(columns([*texts[:3], "今天天气不"])) != summary["hash"]


def test_tokens_are_found_in_files_of_many_parts(tmp_path, monkeypatch):
    """Texts are stored in parts, with their tokens anywhere in the file; the size of parts does not matter."""
    texts = [f"文{'字' * (number % 7)}{number}" for number in range(40)]
    tokenizer = encoders.make_tokenizer(scratch(), texts, 12)
    splits = {
        name: Dataset.from_dict({"text": texts, "label": [0] * 40, "row": list(range(40))}) for name in prepare.SPLITS
    }
    stored = {}
    for part in (1000, 3):
        monkeypatch.setattr(prepare, "PART", part)
        (tmp_path / str(part)).mkdir()
        prepare.store(splits, tokenizer, tmp_path / str(part), [])
        stored[part] = Tokens.load(tmp_path / str(part) / "train", pad_id=0)
    ids = np.random.default_rng(0).permutation(40)
    expected = [number for text in ids for number in tokenizer(texts[text], truncation=True)["input_ids"]]
    assert [tokens.flat(ids).tolist() for tokens in stored.values()] == [expected] * 2


def test_numbers_that_seem_to_count_from_1_are_told(tmp_path):
    rows = [[f"文{n}", 1 + n % 2] for n in range(60)]
    _, summary = split(tmp_path, rows, labels=["a", "b", "c"])
    told = "numbers are taken for positions in data.labels, counted from 0, and no text has the 0"
    assert told in summary["notes"]
    _, summary = split(tmp_path, [[text, label - 1] for text, label in rows], labels=["a", "b", "c"])
    assert not any("counted from 0" in note for note in summary["notes"])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_texts(tmp_path, monkeypatch):
    """A hundred megabytes of texts need a few megabytes of memory."""
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    length, counts, peaks = 2000, (1500, 20000), []
    for count in counts:
        folder = tmp_path / str(count)
        (folder / "dataset").mkdir(parents=True)
        rows = (json.dumps({"text": f"{n} " + "字" * length, "label": n % 6}, ensure_ascii=False) for n in range(count))
        (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
        peaks.append(growth.peak([sys.executable, "-c", PREPARE, str(folder)]))
    assert (peaks[1] - peaks[0]) * 2**20 < 0.25 * 3 * length * (counts[1] - counts[0])


PREPARE = """
import sys
from pathlib import Path
from lockstep.config import reading
from lockstep.data import prepare

folder = Path(sys.argv[1])
wanted = reading.parse({"data": {"path": str(folder / "rows.jsonl")}})
splits, _ = prepare.split(wanted.data, folder, folder)
assert sum(map(len, prepare.texts(splits["train"]))) > 2e6

class Tokenizer:
    all_special_tokens, split_special_tokens, unk_token_id, eos_token_id = [], True, None, None
    model_max_length = 10**6

    def __call__(self, texts, truncation):
        return {"input_ids": [[1] * 50 for _ in texts]}

prepare.store(splits, Tokenizer(), folder / "dataset", [])
"""


def test_the_character_tokenizer_knows_the_training_texts_and_marks_the_rest():
    tokenizer = encoders.character_tokenizer(["今天 OK", "今😭", "天 OK 😭 雨"], 16)
    assert tokenizer.convert_ids_to_tokens(tokenizer("今 ok天")["input_ids"]) == [
        "[CLS]",
        "今",
        "o",
        "k",
        "天",
        "[SEP]",
    ]
    assert tokenizer.convert_ids_to_tokens(tokenizer("😭雨懂")["input_ids"]) == ["[CLS]", "😭", *["[UNK]"] * 2, "[SEP]"]
