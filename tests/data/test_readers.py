"""A file's format is recognised by its content."""

import gzip
import json
import re
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep import files
from lockstep.data.labels import Labels
from lockstep.errors import BadInput
from tests.data.test_sources import CLEAN, ROWS, read, written

NAMES = {"json": "a JSON list", "jsonl": "JSON Lines", "csv": "CSV", "parquet": "Parquet"}


@pytest.mark.parametrize("named", ["json", "jsonl", "csv", "tsv", "parquet", "txt"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_a_file_of_another_format_than_its_name_says_is_read(tmp_path, kind, named):
    content = written(tmp_path, kind).read_bytes()
    file, notes = tmp_path / f"data.{named}", []
    file.write_bytes(content)
    assert read(tmp_path, notes, path=str(file)) == CLEAN
    said = [f"{file} is read as {NAMES[kind]}, by its content and not by its name"]
    alike = named in (kind, "txt") or (kind, named) == ("csv", "tsv")
    assert [note for note in notes if "by its content" in note] == ([] if alike else said)


def test_json_over_several_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([list(row) for row in ROWS], indent=2))
    assert read(tmp_path, path=str(tmp_path / "a.json")) == CLEAN
    (tmp_path / "a.json").write_text("[" + ",\n".join(json.dumps({"text": t, "label": n}) for t, n in ROWS) + "]")
    assert read(tmp_path, path=str(tmp_path / "a.json")) == CLEAN


def test_long_lines_are_told_apart_too(tmp_path):
    """Their ends are beyond the part of a file by which its format is recognised."""
    rows = [["x" * 100_000, 1], ["y" * 100_000, 0]]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps({"text": t, "label": n}) for t, n in rows))
    for name in ("list.json", "lines.json"):
        assert [len(text) for text, _ in read(tmp_path, path=str(tmp_path / name))] == [100_000] * 2


def test_the_row_of_a_fault_in_json_lines_is_its_line(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n{"text": \n')
    with pytest.raises(BadInput, match=r"a\.json, row 3, column 10: broken JSON"):
        read(tmp_path, path=str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"PK\x03\x04rest", "is a zip archive, as Excel's workbooks are too. Unpack it, or save"),
        ("a.csv", b"{\\rtf1 text,label}", "is RTF, as word processors save it. Save it as plain text"),
        ("a.txt", b"\xef\xbb\xbf\n<!DOCTYPE html><p>", "is a web page or XML"),
        ("a.csv", "text,label\nja,1\n".encode("utf-16"), "is UTF-16. Convert it to UTF-8"),
        ("a.csv", "text,label\nja,1\n".encode("utf-32"), "is UTF-32. Convert it to UTF-8"),
        ("a.csv.gz", gzip.compress(gzip.compress(b"text,label\nja,1\n")), "is compressed by gzip twice. Decompress it"),
        ("a.csv", "text,label\nja,1\n".encode("utf-16-le"), "is not UTF-8 text, but UTF-16 or not text at all"),
        ("a.csv", b"%PDF-1.7", "is a PDF"),
        ("a.pkl", b"\x80\x05\x95", "is a pickle, which may run anything"),
        ("a.parquet", b"a.csv".ljust(257, b"\0") + b"ustar\x0000", "is a tar archive. Unpack it"),
        ("a.jsonl", b'{"text": "a", "label": 1, "text": "b"}', "row 1: an object has the key 'text' twice"),
        ("a.json", b'[{"text": "a", "label": 1, "label": 0}]', "an object has the key 'label' twice"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1", "is a pointer of git LFS"),
        ("a.csv", "text,label\n\u4eca,1\n".encode("iso2022_jp"), "is in ISO 2022"),
        ("a.txt", b"<!-- saved from url --><p>x", "is a web page or XML"),
        ("a.json", b'{"text": {"0": "a"}, "label": {"0": 1}}', "not dict (of 'text', 'label'). Save a list of objects"),
        ("a.json", b'{"data": [["a", 1]], "version": 2}', "not dict, whose key 'data' has a list"),
        ("a.json", b'{"0": {"text": "a", "label": 1}, "1": {"text": "b", "label": 0}}', "not dict (of '0', '1')"),
    ],
    ids=[
        "zip",
        "rtf",
        "html",
        "utf-16",
        "utf-32",
        "gzip in gzip",
        "utf-16 bare",
        "pdf",
        "pickle",
        "tar",
        "key twice in a line",
        "key twice",
        "lfs",
        "iso 2022",
        "comment",
        "columns",
        "nested",
        "numbers as keys",
    ],
)
def test_files_that_hold_no_rows_say_what_they_are(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=re.escape(message)):
        read(tmp_path, path=str(tmp_path / name))


def test_a_packed_file_within_an_archive_and_one_under_another_name(tmp_path):
    packed = gzip.compress(written(tmp_path, "csv").read_bytes())
    (tmp_path / "a.csv").write_bytes(packed)
    assert read(tmp_path, path=str(tmp_path / "a.csv")) == CLEAN
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv.gz", packed)
    with pytest.raises(BadInput, match=r"a\.zip: is a zip archive"):
        read(tmp_path, path=str(tmp_path / "a.zip"))


def test_texts_and_labels_that_are_lists_are_named(tmp_path):
    pd.DataFrame({"text": [["a", "b"]], "label": ["x"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"row 1: the text is \['a', 'b'\]; expected a string"):
        read(tmp_path, path=str(tmp_path / "a.parquet"))
    pd.DataFrame({"text": ["a"], "label": [["x", "y"]]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"row 1: the label is \['x', 'y'\]; expected a name or a number"):
        read(tmp_path, path=str(tmp_path / "a.parquet"))


def test_columns_of_one_name_in_parquet_and_folders_are_refused(tmp_path):
    """pyarrow's rows keep only the last of two columns with one name, which would shift positions."""
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array([0, 1])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text", "label"]), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet: two columns have the same name, 'text'"):
        read(tmp_path, path=str(tmp_path / "a.parquet"))
    with pytest.raises(BadInput, match=r"is a folder\. Name the file in it"):
        read(tmp_path, path=str(tmp_path))


def test_links_are_files(tmp_path):
    (tmp_path / "link.csv").symlink_to(written(tmp_path, "csv"))
    assert read(tmp_path, path=str(tmp_path / "link.csv")) == CLEAN
    (tmp_path / "dead.csv").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadInput, match=r"dead\.csv is not a file"):
        read(tmp_path, path=str(tmp_path / "dead.csv"))


ODD = "one\u2028still one\u0085and\x0cone\x1cmore"


def test_lines_are_those_of_line_feeds(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(f"\ufeff{ODD}\r\n\ntwo\nthree".encode())
    assert list(files.text_lines(file)) == [ODD, "", "two", "three"]


def test_texts_to_predict_are_lines(tmp_path):
    from lockstep.tasks.text_classification import lines_of

    (tmp_path / "a.txt").write_bytes(f"\ufeff{ODD}\r\n  \ntwo\n".encode())
    assert lines_of(tmp_path / "a.txt") == [ODD, "two"]
    others = {"JSON": b'["one","two"]\n', "is a PDF": b"%PDF-1.7", "UTF-16": "one\ntwo".encode("utf-16-le")}
    for what, content in others.items():
        (tmp_path / "b.txt").write_bytes(content)
        with pytest.raises(BadInput, match=what):
            lines_of(tmp_path / "b.txt")


def test_documents_of_a_text_file_are_what_stands_between_empty_lines(tmp_path):
    from lockstep.config import reading
    from lockstep.data import documents

    (tmp_path / "a.txt").write_bytes(f"\ufeff{ODD}\r\nsecond line\r\n\r\nother\n".encode())
    data = reading.parse({"data": {"path": str(tmp_path / "a.txt")}}).data
    assert documents.read(data, tmp_path, [])[1] == [(f"{ODD}\nsecond line",), ("other",)]
    notes = []
    (tmp_path / "a.txt").write_text('{"text": "one"}\n\n{"text": "None"}\n', encoding="utf-8")
    data = reading.parse({"data": {"path": str(tmp_path / "a.txt")}}).data
    assert documents.read(data, tmp_path, notes)[1] == [("one",), ("None",)]
    assert notes == [
        f"{tmp_path / 'a.txt'} is read as JSON Lines, by its content and not by its name",
        "1 texts are a word for a missing value, such as nan or None: remove them if they are no text",
    ]


def test_rows_of_several_texts_are_told_where_one_is_read(tmp_path):
    from lockstep.config import reading
    from lockstep.data import documents

    notes = []
    (tmp_path / "a.jsonl").write_text('["a", "b"]\n["c", "d"]\n', encoding="utf-8")
    data = reading.parse({"data": {"path": str(tmp_path / "a.jsonl")}}).data
    assert documents.read(data, tmp_path, notes)[1] == [("a",), ("c",)]
    assert notes[0] == "rows have up to 2 columns, of which number 0 (data.text, from 0) is the text"


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["\u4eca\u5929 \u771f \u5f00\u5fc3", "\u597d \u96be\u8fc7 OK"], True),
        (["a fine day", "so \u4eca\u5929 so"], False),
        (["\uc88b\uc740 \ub0a0", "\ube44\uac00 \uc640\uc694"], False),  # Korean has blanks between its words
        (["\u4eca\u5929\u771f\u5f00\u5fc3"], False),  # and nothing to join
    ],
)
def test_blanks_go_where_they_stand_between_chinese_characters(tmp_path, texts, joined):
    (tmp_path / "a.json").write_text(json.dumps([[text, n % 2] for n, text in enumerate(texts)]))
    notes, path = [], str(tmp_path / "a.json")
    kept = [text for text, _ in read(tmp_path, notes, path=path)]
    assert kept == [text.replace(" ", "") if joined else text for text in texts]
    assert [note for note in notes if note.startswith("blanks")] == (
        [
            "blanks beside Chinese and Japanese characters are removed, since most blanks are between such"
            " characters; blanks between alphabetic words stay"
        ]
        * joined
    )


def test_words_of_alphabets_keep_their_blanks_among_chinese_ones(tmp_path):
    chinese = ["\u597d \u597d \u597d"] * 9
    texts = [*chinese, "\u4eca \u5929 iPhone 15 Pro Max \u771f \u597d", "the room was cold"]
    (tmp_path / "a.json").write_text(json.dumps([[text, n % 2] for n, text in enumerate(texts)]))
    kept = [text for text, _ in read(tmp_path, [], path=str(tmp_path / "a.json"))]
    assert kept[8:] == ["\u597d\u597d\u597d", "\u4eca\u5929iPhone 15 Pro Max\u771f\u597d", "the room was cold"]


def test_objects_by_position_must_have_one_order_or_numbers_for_names(tmp_path):
    (tmp_path / "a.json").write_text('[{"1": "title", "0": "text", "2": "x"}, {"0": "b", "1": "c", "2": "y"}]')
    assert read(tmp_path, [], path=str(tmp_path / "a.json"), text=0, label=2) == [("text", "x"), ("b", "y")]
    (tmp_path / "b.json").write_text('[{"text": "a", "label": "x"}, {"label": "y", "text": "b"}]')
    with pytest.raises(
        BadInput, match=r"row 2: its first keys are 'label', 'text', but those of row 1 are 'text', 'label'"
    ):
        read(tmp_path, [], path=str(tmp_path / "b.json"), text=0, label=1)


def test_latin_texts_that_lose_their_blanks_are_told(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([["a fine day", 0]]))
    notes = []
    assert read(tmp_path, notes, path=str(tmp_path / "a.json"), join_blanks=True)[0][0] == "afineday"
    assert notes == ["blanks between words are removed (data.join_blanks), though most are between alphabetic words"]


def test_labels_of_a_data_set_that_names_them_are_its_names(tmp_path):
    """The hub stores numbers with names; -1 is a withheld label."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = {"text": ["a", "b"], "label": [1, 0]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path, hub=str(tmp_path), revision="main") == [("a", "pos"), ("b", "neg")]
    assert read(tmp_path, hub=str(tmp_path), revision="main", labels=["-", "+"]) == [("a", "1"), ("b", "0")]
    # The same names in another order are names, not other names for the numbers.
    assert read(tmp_path, hub=str(tmp_path), revision="main", labels=["pos", "neg"]) == [("a", "pos"), ("b", "neg")]
    Dataset.from_dict({"text": ["a"], "label": [-1]}, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="row 1: has no label"):
        read(tmp_path, hub=str(tmp_path), revision="main")
    assert Labels().names == []


def test_columns_of_a_parquet_file_that_nobody_asked_for_may_hold_anything(tmp_path):
    far = pa.array([2**62, 0], pa.timestamp("us"))  # Python has no year beyond 9999
    table = pa.table({"text": ["a", "b"], "label": ["x", "y"], "when": far})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path, path=str(tmp_path / "a.parquet")) == [("a", "x"), ("b", "y")]
    with pytest.raises(BadInput, match=r"a\.parquet: its rows can't be read: .*Write it anew"):
        read(tmp_path, path=str(tmp_path / "a.parquet"), text=0, label=1)


def test_a_damaged_parquet_file_is_one_message(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {n}" for n in range(999)], "label": ["x", "y", "z"] * 333}), file)
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.parquet: its rows can't be read"):
        read(tmp_path, path=str(file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\ufeff{\\rtf1\\ansi\n\nGood day.\\par}", "is RTF"),
        ("<h1>News</h1>\n\n<p>A text.</p>\n", "is a web page"),
        ("</div>\n\nA text.\n", "is a web page"),
    ],
)
def test_pages_and_documents_are_no_texts_though_they_are_named_so(tmp_path, content, said):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=said):
        read(tmp_path, path=str(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    "row", [{"text": {str(n): "x" * 99 for n in range(999)}, "label": 1}, {str(n): n for n in range(9999)}]
)
def test_a_message_does_not_hold_the_whole_row(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput) as raised:
        read(tmp_path, path=str(tmp_path / "a.jsonl"))
    assert len(str(raised.value)) < 1000
