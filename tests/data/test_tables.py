"""The meaning of quotation marks in CSV and TSV files; no row is lost to them."""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import reading
from lockstep.data import documents
from lockstep.errors import BadInput
from tests.data.test_sources import read

WORDS = ["red", "fine day", "rain, again", "so so", 'the 5" disk', '"Stop', 'stop"', '"whole"', 'he said "no" twice']


def as_letters(rows: list[tuple[str, str]], separator: str) -> str:
    return "".join(f"{text}{separator}{label}\n" for text, label in [("text", "label"), *rows])


def written(rows, **how) -> str:
    stream = io.StringIO()
    csv.writer(stream, **how).writerows([("text", "label"), *rows])
    return stream.getvalue()


def read_file(folder, name: str, content: str, notes=None, **data):
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return read(folder, notes, path=str(folder / name), join_blanks=False, **data)


def many(count: int, every: int) -> list[tuple[str, str]]:
    """Rows in which one in `every` begins with a quotation mark, and another ends with one."""
    begins, ends = ('"', ""), ("", '"')
    marks = [begins if n % every == 1 else ends if n % every == every - 1 else ("", "") for n in range(count)]
    return [(f"{a}visit number {n}{b}", ("bad", "good")[n % 2]) for n, (a, b) in enumerate(marks)]


def test_of_two_separators_that_divide_each_row_the_one_with_fewer_labels_is_taken(tmp_path):
    rows = [(f"well, number {n}", ("bad", "good")[n % 2]) for n in range(20)]
    notes = []
    content = "".join(f"{text};{label}\n" for text, label in rows)
    assert read_file(tmp_path, "a.csv", content, notes, text=0, label=1) == rows
    assert notes[0] == (
        f"{tmp_path / 'a.csv'}: ';' is taken for the separator of columns; ',' would divide each row, too"
    )


def test_marks_after_backslashes_are_refused_by_their_line(tmp_path):
    """Spark writes them; by RFC 4180 such a field ends there, or the backslash is part of the text."""
    content = 'text,label\n"fine day",good\n"he said \\"no\\" twice",bad\n' * 3
    with pytest.raises(BadInput, match=r"a\.csv, row 3: .* has a backslash before it"):
        read_file(tmp_path, "a.csv", content)
    folder = [("C:\\new\\", "good"), ("so so", "bad")] * 3  # a backslash at a field's end is a letter
    assert read_file(tmp_path, "b.csv", written(folder, quoting=csv.QUOTE_ALL)) == folder


@pytest.mark.parametrize(("name", "separator"), [("a.tsv", "\t"), ("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t")])
def test_marks_at_the_ends_of_texts_join_no_rows(tmp_path, name, separator):
    """By RFC 4180 a mark that opens a text would swallow all rows up to the next text that ends with one."""
    rows, notes = many(60, 7), []
    assert read_file(tmp_path, name, as_letters(rows, separator), notes) == rows
    assert notes == [
        f"{tmp_path / name}: each line is a row, and quotation marks are part of the text, as they enclose no fields"
    ]


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(["bad", "good"])), min_size=1, max_size=30))
def test_every_line_of_a_tsv_file_is_a_row_and_none_is_changed(tmp_path_factory, rows):
    """Quotation marks are part of the text there."""
    folder = tmp_path_factory.mktemp("tables")
    kept = read_file(folder, "a.tsv", as_letters(rows, "\t"))
    assert [label for _, label in kept] == [label for _, label in rows]
    if kept != rows:  # in a file whose every text is quoted, marks are the writer's
        assert kept == [(text.strip('"'), label) for text, label in rows]
        assert {text for text, _ in rows} == {'"whole"'}


@given(
    st.lists(
        st.tuples(st.sampled_from([*WORDS, "two\nlines", "a,\nb,\nc"]), st.sampled_from("xy")), min_size=1, max_size=20
    ),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from([",", "\t", ";"]),
)
def test_what_a_program_wrote_is_read_as_it_was(tmp_path_factory, rows, quoting, separator):
    folder = tmp_path_factory.mktemp("tables")
    name = "a.tsv" if separator == "\t" else "a.csv"
    content = written(rows, quoting=quoting, delimiter=separator, lineterminator="\n")
    assert read_file(folder, name, content) == rows


@pytest.mark.parametrize("count", range(2, 40, 3))
def test_no_row_is_lost_without_a_word(tmp_path, count):
    """Some texts of the file are quoted as needed, and others begin or end with a mark of their own."""
    rows = [(f"wind, and rain {n}" if n % 5 == 0 else text, label) for n, (text, label) in enumerate(many(count, 6))]
    lines = [f'"{text}",{label}' if ", and" in text else f"{text},{label}" for text, label in rows]
    content = "\n".join(["text,label", *lines, ""])
    try:
        kept, why = read_file(tmp_path, "a.csv", content), ""
    except BadInput as error:
        kept, why = [], str(error)
    named = re.search(r"row \d+: (a quotation mark opens a field|broken CSV|has \d columns)", why)
    assert len(kept) == count or named


def test_rows_that_a_field_swallows_are_refused_by_their_line(tmp_path):
    lines = ["text,label", "a,x", '"b, and c",y', '"d,x', "e,y", 'f",x', "g,y", ""]
    with pytest.raises(BadInput, match=r"row 4: a quotation mark opens a field that ends in row 6"):
        read_file(tmp_path, "a.csv", "\n".join(lines))


def test_without_labels_rows_are_not_swallowed_either(tmp_path):
    data = reading.parse({"data": {"path": str(tmp_path / "a.csv"), "text": "text"}}).data
    lines = ["id,text", *(f"{number},line {number}" for number in range(40))]
    lines[6], lines[11] = '5,"a mark opens', '10,and one closes"'
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = documents.read(data, tmp_path, [])[1]
    assert [row[0] for row in rows] == [line.split(",")[1] for line in lines[1:]]
    # A text of several lines is one where not every line is a row, or where fields are quoted as a rule.
    for content in ('id,text\n1,"one\ntwo, three\nfour"\n2,five\n', 'id,text\n1,"one\ntwo"\n2,"a, b\nc, d"\n3,"e"\n'):
        (tmp_path / "a.csv").write_text(content, encoding="utf-8")
        assert "\n" in documents.read(data, tmp_path, [])[1][0][0]


def test_the_line_by_which_excel_tells_the_separator_is_no_row(tmp_path):
    assert read_file(tmp_path, "a.csv", "sep=;\ntext;label\na, b;x\nc;y\n") == [("a, b", "x"), ("c", "y")]


def test_texts_over_several_lines_stay_whole_and_are_noted(tmp_path):
    rows, notes = [("good, day\nand, night\nand, morning", "x"), ("b", "y")], []
    assert read_file(tmp_path, "a.csv", written(rows), notes) == rows
    assert notes == [
        f"{tmp_path / 'a.csv'}: rows 2 contain line ends in quotation marks, up to 3 lines; each is taken for one row"
    ]


def test_a_short_file_with_a_text_of_two_lines_is_not_taken_line_by_line(tmp_path):
    """Each of its lines has as many separators as the header."""
    assert read_file(tmp_path, "a.csv", 'text,label\n"Hello, you\nand bye",x\n') == [("Hello, you\nand bye", "x")]
    assert read_file(tmp_path, "b.csv", 'label,text\nx,"one, two\nthree, four"\n') == [("one, two\nthree, four", "x")]


def test_a_mark_that_none_closes_is_named(tmp_path):
    with pytest.raises(
        BadInput, match=r"row 3: broken CSV: a field begins with a quotation mark \(\"\) that is never closed"
    ):
        read_file(tmp_path, "a.csv", 'text,label\n"a, b",x\n"c,y\nd,x\n')


def test_the_positions_that_pandas_writes_above_columns_are_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n" + "".join(f"t{n},{n % 2}\n" for n in range(20)))
    kept = read(tmp_path, [], path=str(tmp_path / "a.csv"), text=0, label=1)
    assert kept == [(f"t{n}", str(n % 2)) for n in range(20)]


@pytest.mark.parametrize("rows_with_that_label", [1, 2])
def test_a_first_row_is_no_header_where_its_label_comes_again_later(tmp_path, rows_with_that_label):
    """It was once dropped if its label was in none of the next hundred rows."""
    rows = [("first", "rare"), *[(f"t{n}", ("a", "b")[n % 2]) for n in range(150)]]
    rows += [("last", "rare")] * (rows_with_that_label - 1)
    (tmp_path / "a.csv").write_text("".join(f"{text},{label}\n" for text, label in rows))
    notes = []
    kept = read(tmp_path, notes, path=str(tmp_path / "a.csv"), text=0, label=1)
    assert kept == rows[rows_with_that_label == 1 :]
    assert len(notes) == (rows_with_that_label == 1)


def test_columns_without_a_name_and_others_that_share_one(tmp_path):
    """Spreadsheets leave such columns behind a table."""
    content = 'v1,v2,,,\nham,see you,,,\nspam,"win, now",,,\n'
    (tmp_path / "a.csv").write_text(content)
    keys = {"path": str(tmp_path / "a.csv"), "join_blanks": False}
    assert read(tmp_path, text="v2", label="v1", **keys) == [("see you", "ham"), ("win, now", "spam")]
    (tmp_path / "a.csv").write_text("id,text,id,label\n1,a,2,x\n3,b,4,y\n")
    assert read(tmp_path, **keys) == [("a", "x"), ("b", "y")]
    with pytest.raises(BadInput, match=r"row 1: two columns have the same name, 'id'\. Rename one, or set data\.label"):
        read(tmp_path, label="id", **keys)


@pytest.mark.parametrize("header", ['"text\n(in English)",label\n', '"first line\nsecond line",neg\n'])
def test_a_first_row_over_several_lines_is_one_row(tmp_path, header):
    rows = [("so so", "neg"), ("fine", "pos")] * 3
    content = header + "".join(f"{text},{label}\n" for text, label in rows)
    assert read_file(tmp_path, "a.csv", content, text=0, label=1)[-6:] == rows
    with pytest.raises(BadInput, match="has no column 'text'"):
        read_file(tmp_path, "a.csv", content, label=1)


@pytest.mark.parametrize(
    ("asked", "header", "said"),
    [
        (
            {"label": "sentiment"},
            "review,lang,Sentiment",
            r"row 1: has no column 'sentiment' \(it has 'review', 'lang', 'S",
        ),
        ({}, "review,lang,Sentiment", "has 3 columns without names, and data.label is 'label'"),
        ({"label": "sentiment"}, None, "has 3 columns without names, and data.label is 'sentiment'"),
    ],
)
def test_a_label_s_column_is_never_guessed_among_three(tmp_path, asked, header, said):
    lines = [header] if header else []
    lines += [f"text {n},{('en', 'de')[n % 2]},{('neg', 'pos')[n % 3 == 0]}" for n in range(40)]
    with pytest.raises(BadInput, match=said):
        read_file(tmp_path, "a.csv", "\n".join(lines) + "\n", text=0, **asked)
