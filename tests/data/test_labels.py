"""Labels are normalised by one rule, in whatever file format they are."""

import json
from collections import Counter
from decimal import Decimal

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import labels
from lockstep.data.labels import Labels
from lockstep.errors import BadInput
from tests.data.test_data import split
from tests.data.test_sources import read


def names(values, expected=None) -> list[str]:
    """The label that each value is normalised to."""
    known = Labels(expected)
    numbers = [known.number(value, "here") for value in values]
    return [known.names[number] for number in numbers]


@pytest.mark.parametrize(
    "word",
    [
        "",
        "  ",
        "nan",
        "NaN",
        "None",
        "NULL",
        "N/A",
        "na",
        "-",
        "?",
        "<NA>",
        "#N/A",
        None,
        "N.A.",
        "\uff2e/A",
        "\u2014",
        "(blank)",
        "#VALUE!",
        "\u200b",
        ".",
    ],
)
def test_words_for_no_label_are_refused(word):
    with pytest.raises(BadInput, match=r"here: (the label is .* which means a missing value|has no label)"):
        names(["a", word])


def test_numbers_that_are_none_are_refused():
    for value in (float("nan"), Decimal("nan")):
        with pytest.raises(BadInput, match="has no label"):
            names([value])


def test_such_a_word_is_a_class_where_it_is_named():
    assert names(["none", "NA", "a"], ["none", "NA", "a"]) == ["none", "NA", "a"]


@pytest.mark.parametrize("values", [["0", "0.0", 0, 0.0, "0.", Decimal("0.0")], [" 12", "12.00", 12, 12.0, "12"]])
def test_a_whole_number_is_one_label_however_it_is_written(values):
    assert len(set(names(values))) == 1


@given(st.integers(-1000, 1000))
def test_every_format_gives_a_number_the_same_name(number):
    ways = [number, float(number), str(number), f"{number}.0", Decimal(number)]
    assert set(names(ways)) == {str(number)}


def test_numbers_in_files_of_all_formats_are_the_same_classes(tmp_path):
    """With data.labels they were once refused in CSV, and accepted in Parquet and JSON."""
    rows = [(f"text {n}", float(n % 2)) for n in range(8)]
    table = pd.DataFrame(rows, columns=["text", "label"])
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept = [read(tmp_path, path=str(file)) for file in sorted(tmp_path.glob("a.*"))]
    assert len(kept) == 5
    assert all(each == [(f"text {n}", str(n % 2)) for n in range(8)] for each in kept)


def test_fractions_are_names_in_every_format(tmp_path):
    rows = [["a", 4.5], ["b", 5.0]]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("text,label\na,4.5\nb,5.0\n")
    for name in ("a.json", "a.csv"):
        assert read(tmp_path, path=str(tmp_path / name)) == [("a", "4.5"), ("b", "5")]


def test_letters_in_two_parts_are_the_letter_in_one():
    assert len(set(names(["caf\u00e9", "cafe\u0301"]))) == 1
    assert names(["cafe\u0301"], ["caf\u00e9"]) == ["caf\u00e9"]


@pytest.mark.parametrize(
    "alike",
    [
        ("Good", "good"),
        ("very good", "very  good"),
        ("0", "00"),
        ("1", "\uff11"),
        ("True", "true"),
        (True, 1),
        ("0,5", "0.50"),
        ("\u65b0", "\u65b0 "),
        ("good", "good\u200b"),
        ("\u2764", "\u2764\ufe0f"),
        ("don't", "don\u2019t"),
        ("non-toxic", "non_toxic"),
        ("-1", "\u22121"),
        ("0", "-0"),
        ("1", "1.000000000000000000e+00"),
        *(("good", f"good{mark}") for mark in "\u202c\u061c\u3164\u2800\u0007\u2069"),
    ],
)
def test_labels_that_differ_in_nothing_but_spelling_are_told(alike):
    known = Labels()
    numbers = [known.number(value, "here") for value in (*alike, "other")]
    notes = known.notes(Counter(), "text")
    if numbers[0] == numbers[1]:  # but for blanks around it
        assert notes == []
    else:
        assert len(notes) == 1
        assert notes[0].startswith("labels that differ only in spelling are separate classes: ")


@pytest.mark.parametrize(
    ("names", "label"),
    [(["1.0", "0.0"], "0"), (["True", "False"], "0"), (["+1", "-1"], "1"), (["1 star", "2 stars", "3 stars"], "1")],
)
def test_a_number_is_no_position_among_names_that_are_numbers_themselves(names, label):
    with pytest.raises(BadInput, match=f"label '{label}' is not one of"):
        labels.position(label, names, "row 1")


def test_a_number_is_a_position_among_names_of_words():
    assert [labels.position(label, ["bad", "good"], "row 1") for label in ("0", "1", "bad")] == [0, 1, 0]


@pytest.mark.parametrize("word", ["n / a", "N.A", "N / A."])
def test_a_missing_value_may_be_written_with_blanks(word):
    with pytest.raises(BadInput, match="means a missing value"):
        Labels().number(word, "row 1")


def test_letters_of_two_alphabets_in_one_word_are_told():
    known = Labels()
    for value in ("bad", "b\u0430d", "good", "\u0434\u0430", "\u0434\u0430 good", "\u597d A"):
        known.number(value, "here")
    (note,) = known.notes(Counter(), "text")
    assert note == "labels with letters of two alphabets, some of which look alike: 'b\u0430d'"


def test_labels_that_differ_otherwise_are_not_told():
    known = Labels()
    for value in ("1", "10", "-1", "a", "b", "\u65b0", "2024-01-01", "2024-01-02", "1e5", "inf"):
        known.number(value, "here")
    assert known.notes(Counter(), "text") == []


def test_several_ways_of_writing_one_label_are_told():
    known = Labels()
    for value in ("1", "1.0", 0, "0"):
        known.number(value, "here")
    assert known.notes(Counter(), "text") == ["labels in several spellings are taken for one: '1' and '1.0' are '1'"]


def test_numbers_are_in_the_order_of_numbers():
    assert labels.in_order(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert labels.in_order(["b", "10", "9"]) == ["10", "9", "b"]


def test_a_label_that_a_name_is_meant_by_is_named(tmp_path):
    rows = [[f"\u6587{n}", ("good", "Bad")[n % 2]] for n in range(60)]
    with pytest.raises(
        BadInput, match=r"label 'Bad' is not one of good, bad or .* It differs from bad only in spelling"
    ):
        split(tmp_path, rows, labels=["good", "bad"])


def test_what_stands_in_a_column_of_something_else_is_not_listed_whole(tmp_path):
    rows = [[f"\u6587{n}", f"user {n}"] for n in range(150)]
    with pytest.raises(
        BadInput, match=r"and 140 more: .* Is data\.label the right column\? It has 150 labels"
    ) as error:
        split(tmp_path, rows, labels=None)
    assert len(str(error.value)) < 500
