"""Read rows of CSV and TSV files: detect the separator, the meaning of quotation marks, and a header.

By RFC 4180 a quotation mark at the beginning of a field encloses it, including line ends. In files that were written
line by line, a quotation mark is an ordinary character, and that rule would merge many rows into one. So the whole file
is surveyed first.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.sections import Data
from lockstep.errors import BadInput, listed
from lockstep.files import open_text

SEPARATORS = ",;\t|"
LABEL = "label"  # the default of data.label
LOOK = 100  # the number of rows by which the separator is detected
REMEMBERED = 10_000  # the largest number of distinct labels that is kept
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a field in quotation marks; marks inside are doubled
SEPARATOR_LINE = re.compile(r"sep=.\s*")  # the first line by which Excel tells itself the separator
ESCAPED = re.compile(r'"(?:[^"\\]|\\.)*\\"(?:[^"\\]|\\.)*"')  # the same with a backslash before marks inside


@dataclass
class Dialect:
    """How to read a file. letters: whether quotation marks are ordinary characters, so that each line is a row."""

    separator: str
    letters: bool = False


def rows(file: Path, data: Data, kind: str, notes: list[str]) -> Iterator[tuple[int, list[str] | dict[str, str]]]:
    """Yield each row with the number of its first line: as a mapping if there is a header, otherwise as a list.

    kind: "csv" or "tsv". Raises BadInput.
    """
    by_name = isinstance(data.text, str)
    separator = _separator(file, data, kind, notes)
    survey = Survey.of(file, separator, data)
    if survey.escaped:
        raise BadInput(
            f'{file}, row {survey.escaped}: a quotation mark inside a field has a backslash before it (\\"). Write it'
            " twice in its place, as most programs do (in Spark: option escape, '\"')."
        )
    dialect = Dialect(separator, survey.quotes_are_letters())
    records = _records(file, dialect)
    first = next(records, None)
    if first is None:
        return
    notes += survey.notes(file, dialect)
    header = [name.strip() for name in first[1]]
    if by_name or _is_header(first[1], data, file, dialect):
        if not by_name:
            notes.append(f"row 1 of {file} ({', '.join(header)[:80]}) is taken for the header, not for data")
        _require_one_of_each(header, data, file)
        # Columns without a name, common in spreadsheets, and columns that share a name are available by position only.
        names = [
            name if name and header.count(name) == 1 else f"({number}) {name}".strip()
            for number, name in enumerate(header, 1)
        ]
        if isinstance(data.label, str) and data.label not in header and not by_name and data.label != LABEL:
            raise BadInput(
                f"{file}, row 1: has no column {data.label!r} (it has {listed(map(repr, header))}). Set data.label to"
                " its name, or to its position, counted from 0."
            )
        by_name = by_name or data.label in header  # with a detected header, data.text may still be a position
    else:
        records = itertools.chain([first], records)
    for number, row in records:
        if len(row) != len(header):
            raise BadInput(
                f"{file}, row {number}: has {len(row)} columns; the first has {len(header)}.{survey.of_quotes(dialect)}"
            )
        if not dialect.letters and number in survey.swallowed:
            lines = survey.swallowed[number]
            raise BadInput(
                f"{file}, row {number}: a quotation mark opens a field that ends in row {number + lines - 1}, and the"
                " lines between look like rows. If the mark is part of the text, double it and quote the whole field."
            )
        yield number, dict(zip(names, row, strict=True)) if by_name else row


def _require_one_of_each(header: list[str], data: Data, file: Path) -> None:
    """Raise BadInput if the name of a requested column occurs twice."""
    for key, name in (("text", data.text), ("label", data.label)):
        if header.count(name) > 1:
            raise BadInput(
                f"{file}, row 1: two columns have the same name, {name!r}. Rename one, or set data.{key} to a number."
            )


def _lines(file: Path) -> Iterator[str]:
    with open_text(file, newline="") as lines:
        for number, line in enumerate(lines):
            yield "\n" if number == 0 and SEPARATOR_LINE.fullmatch(line) else line


def _records(file: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield every row that is not empty, with the number of its first line."""
    reader, number = _reader(_lines(file), dialect), 0
    try:
        for row in reader:
            first_line, number = number + 1, reader.line_num
            if row:
                yield first_line, row
    except csv.Error as error:
        raise BadInput(f"{file}, row {number + 1}: broken {_name(dialect)}: {_explained(error)}.") from None


def _reader(lines: Iterator[str], dialect: Dialect):
    csv.field_size_limit(2**31 - 1)
    return csv.reader(
        lines,
        delimiter=dialect.separator,
        strict=True,
        skipinitialspace=True,
        quoting=csv.QUOTE_NONE if dialect.letters else csv.QUOTE_MINIMAL,
    )


def _name(dialect: Dialect) -> str:
    return "TSV" if dialect.separator == "\t" else "CSV"


def _explained(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return 'a field begins with a quotation mark (") that is never closed'
    return f"{error}; double a quotation mark inside a field, and quote the whole field"


class Survey:
    """How quotation marks are used in a file, from all its lines."""

    def __init__(self, separator: str):
        self.separator = separator
        self.marks = False  # whether the file has any quotation mark
        self.lines = 0  # the number of lines that are not empty
        self.every_line_a_row = True  # whether every line has as many separators as the first one
        self.enclosing = True  # whether marks are used as by a program that quotes only fields that need it
        self.enclosed, self.filled = Counter(), Counter()  # by column: quoted fields, and fields that are not empty
        self.doubled = False  # whether any quoted field contains a doubled mark
        self.escaped = 0  # the first line with a quoted field that contains a mark after a backslash
        self.unreadable = False  # whether RFC 4180's rules fail
        self.over_lines: dict[int, int] = {}  # rows that span several lines, with their number of lines
        self.swallowed: dict[int, int] = {}  # those of them in which at least two lines look like rows themselves

    @classmethod
    def of(cls, file: Path, separator: str, data: Data) -> "Survey":
        survey = cls(separator)
        if not any('"' in line for line in _lines(file)):
            return survey
        survey.marks = True
        survey._line_by_line(file)
        survey._by_rule(file, data)
        return survey

    def _line_by_line(self, file: Path) -> None:
        """Survey every line as if quotation marks were ordinary characters."""
        width, needless = None, set()  # columns with quoted fields that need no quotation marks
        for number, line in enumerate(_lines(file), 1):
            fields = line.rstrip("\r\n").split(self.separator)
            if not line.strip():
                continue
            width = width or len(fields)
            self.lines += 1
            self.every_line_a_row &= len(fields) == width
            for column, field in enumerate(field.strip() for field in fields):
                if '"' not in field:
                    self.filled[column] += bool(field)
                    continue
                self.filled[column] += 1
                if not QUOTED.fullmatch(field):
                    self.enclosing = False
                    if ESCAPED.fullmatch(field):
                        self.escaped = self.escaped or number
                    continue
                self.enclosed[column] += 1
                if '"' in field[1:-1]:
                    self.doubled = True
                else:
                    needless.add(column)
        # A program quotes either whole columns, except the header, or only fields that need it.
        self.enclosing &= all(self.enclosed[column] >= self.filled[column] - 1 for column in needless)
        self.width = width or 0

    def _by_rule(self, file: Path, data: Data) -> None:
        """Survey the rows as RFC 4180 defines them, and find rows over several lines whose lines look like rows."""
        taken: list[str] = []

        def followed() -> Iterator[str]:
            for line in _lines(file):
                taken.append(line)
                yield line

        reader, number = _reader(followed(), Dialect(self.separator)), 1
        at, known, several = None, set(), []
        try:
            for row in reader:
                lines, taken[:] = taken[:], []
                first_line, number = number, number + len(lines)
                if not row:
                    continue
                if at is None:
                    at, self.width = _column_of_label(row, data), len(row)  # its first line may be a part of it only
                if len(lines) > 1:
                    several.append((first_line, lines))
                    self.over_lines[first_line] = len(lines)
                elif at < len(row) and len(known) < REMEMBERED:
                    known.add(row[at].strip())
        except csv.Error:
            self.unreadable = True
        if data.label == data.text:  # texts without labels, so only the number of columns tells what looks like a row
            if self.width > 1 and self.every_line_a_row and not self._mostly_enclosed() and not self.doubled:
                self.swallowed = {number: len(lines) for number, lines in several}
            return
        labels = known | set(data.labels or ())
        for number, lines in several:
            split = [[field.strip().strip('"').strip() for field in line.split(self.separator)] for line in lines]
            if sum(len(fields) == self.width and at < self.width and fields[at] in labels for fields in split) > 1:
                self.swallowed[number] = len(lines)

    def quotes_are_letters(self) -> bool:
        """Whether each line is a row, so that quotation marks are part of the text."""
        if not self.marks:
            return False
        readable = not self.unreadable and not self.swallowed
        if self.separator == "\t":
            return not (readable and (self.enclosing or not self.every_line_a_row))
        return self.every_line_a_row and not readable and not self._mostly_enclosed() and not self.doubled

    def _mostly_enclosed(self) -> bool:
        """Whether most fields of a column are quoted."""
        return any(2 * self.enclosed[column] > self.filled[column] for column in self.filled)

    def notes(self, file: Path, dialect: Dialect) -> list[str]:
        if dialect.letters and (self.unreadable or self.swallowed):
            return [f"{file}: each line is a row, and quotation marks are part of the text, as they enclose no fields"]
        if self.over_lines and not dialect.letters:
            numbers, longest = listed(map(str, self.over_lines)), max(self.over_lines.values())
            return [
                f"{file}: rows {numbers} contain line ends in quotation marks, up to {longest} lines; each is taken for"
                " one row"
            ]
        return []

    def of_quotes(self, dialect: Dialect) -> str:
        """A hint for an error about columns, if quotation marks may be the cause."""
        if not self.marks:
            return ""
        if dialect.letters:
            return " Quotation marks are taken for part of the text, as they don't enclose fields consistently."
        return " A quotation mark in the text may be the cause: double it, and quote the whole field."


def _column_of_label(header: list[str], data: Data) -> int:
    """The position of the labels' column, by a file's first row."""
    if isinstance(data.label, int):
        return data.label
    names = [name.strip() for name in header]
    return names.index(data.label) if data.label in names else 1


def _separator(file: Path, data: Data, kind: str, notes: list[str]) -> str:
    """Detect the separator of a file's columns.

    A separator fits if the first rows then have the same number of columns, at least two, and the first row has the
    requested names. If several fit, the one with the fewest distinct labels is chosen, and among equals the usual one.
    If none fits, it is the usual one: a tab in TSV, a comma in CSV.
    """
    usual = "\t" if kind == "tsv" else ","
    names = {name for name in (data.text, data.label) if isinstance(name, str)} if isinstance(data.text, str) else set()
    labels: dict[str, int] = {}  # the number of distinct labels by separator
    for separator in sorted(SEPARATORS, key=lambda separator: separator != usual):
        for letters in (False, True):
            try:
                first = [row for _, row in itertools.islice(_records(file, Dialect(separator, letters)), LOOK)]
            except BadInput:
                continue
            several_alike = len({len(row) for row in first}) == 1 < len(first[0])
            if several_alike and names <= {name.strip() for name in first[0]}:
                at = _column_of_label(first[0], data)
                labels.setdefault(separator, len({row[at].strip() for row in first if at < len(row)}))
    chosen = min(labels, key=labels.get, default=usual)
    if others := [separator for separator in labels if separator != chosen]:
        notes.append(
            f"{file}: {chosen!r} is taken for the separator of columns; {listed(map(repr, others))} would divide each"
            " row, too"
        )
    return chosen


def _is_header(first: list[str], data: Data, file: Path, dialect: Dialect) -> bool:
    """Whether the first row is a header: the value in its label column is not a label of any other row.

    If data.labels is not set, the other labels must be numbers, or occur at least four times each on average.
    """
    if data.label in [name.strip() for name in first]:
        return True
    at = data.label if isinstance(data.label, int) else 1
    label = first[at].strip() if at < len(first) else ""
    if [name.strip() for name in first] == [str(position) for position in range(len(first))]:
        return True  # pandas' names of unnamed columns
    others: Counter[str] = Counter()
    for _, row in itertools.islice(_records(file, dialect), 1, None):
        others[row[at].strip() if at < len(row) else ""] += 1
        if len(others) > REMEMBERED:
            return False
    count = others.total()
    if data.labels:
        names = {*data.labels, *map(str, range(len(data.labels)))}
        return label not in names and count > 0 and all(other in names for other in others)
    stands_out = all(other.isdecimal() for other in others) or count >= 4 * len(others)
    return label not in others and count > 0 and not label.isdecimal() and stands_out
