"""Rows of CSV and TSV files: what separates columns, what quotation marks mean, and whether there is a header.

By RFC 4180 a quotation mark at a field's beginning encloses it, line ends too. In files that were written line by line
it is a letter like any other, and that rule makes one row of many. So the file as a whole is looked at first.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.sections import Data
from lockstep.data.labels import listed
from lockstep.errors import BadInput
from lockstep.files import open_text

SEPARATORS = ",;\t|"
LOOK = 100  # rows that tell a file's separator
REMEMBERED = 10_000  # different labels
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a field that quotation marks enclose, those inside it doubled
ESCAPED = re.compile(r'"(?:[^"\\]|\\.)*\\"(?:[^"\\]|\\.)*"')  # the same, with backslashes before those inside it


@dataclass
class Dialect:
    """How a file is to be read. letters: whether quotation marks are letters, and each line is a row."""

    separator: str
    letters: bool = False


def rows(file: Path, data: Data, kind: str, notes: list[str]) -> Iterator[tuple[int, list[str] | dict[str, str]]]:
    """Each row with the number of the line on which it begins: by name below a header line, else a list.

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
            notes.append(f"row 1 of {file} ({', '.join(header)[:80]}) is taken for its header, and not for data")
        _require_one_of_each(header, data, file)
        # Columns without a name, as spreadsheets leave them, and those that share one are had by position alone.
        names = [
            name if name and header.count(name) == 1 else f"({number}) {name}".strip()
            for number, name in enumerate(header, 1)
        ]
        by_name = by_name or data.label in header  # of one that was found, the text's column may be a position
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
                f"{file}, row {number}: a quotation mark opens a field that goes on to row {number + lines - 1}, and"
                " takes in lines that are rows. Where it is a letter, write it twice, and one around the whole field."
            )
        yield number, dict(zip(names, row, strict=True)) if by_name else row


def _require_one_of_each(header: list[str], data: Data, file: Path) -> None:
    """Raises BadInput where a column that is asked for by its name is there twice."""
    for key, name in (("text", data.text), ("label", data.label)):
        if header.count(name) > 1:
            raise BadInput(
                f"{file}, row 1: two columns have one name, {name!r}. Rename one, or set data.{key} to a number."
            )


def _lines(file: Path) -> Iterator[str]:
    with open_text(file, newline="") as lines:
        yield from lines


def _records(file: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not empty, with the number of the line on which it begins."""
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
        return 'a field begins with a quotation mark (") that none closes'
    return f"{error}; a quotation mark inside a field is written twice, and one stands around the whole field"


class Survey:
    """What a file's quotation marks tell, of all its lines."""

    def __init__(self, separator: str):
        self.separator = separator
        self.marks = False  # whether there is any
        self.lines = 0  # that are not empty
        self.every_line_a_row = True  # with as many separators as the first line
        self.enclosing = True  # whether marks stand as a program writes them that quotes where it must
        self.enclosed, self.filled = Counter(), Counter()  # by column: fields within marks, and all that hold something
        self.doubled = False  # whether any field within marks holds one that is written twice
        self.escaped = 0  # the first line with a field within marks that holds one after a backslash
        self.unreadable = False  # by RFC 4180
        self.over_lines: dict[int, int] = {}  # rows of several lines; and how many
        self.swallowed: dict[int, int] = {}  # rows of several lines, of which two are rows by themselves; and how many

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
        """Every line, as if quotation marks were letters."""
        width, needless = None, set()  # columns with fields within marks that need none
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
        # A program that quotes where it must quotes a whole column, or none that does not need it; but for the header.
        self.enclosing &= all(self.enclosed[column] >= self.filled[column] - 1 for column in needless)
        self.width = width or 0

    def _by_rule(self, file: Path, data: Data) -> None:
        """Every row by RFC 4180, and of those over several lines whether these are rows by themselves."""
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
                    at = _column_of_label(row, data)
                if len(lines) > 1:
                    several.append((first_line, lines))
                    self.over_lines[first_line] = len(lines)
                elif at < len(row) and len(known) < REMEMBERED:
                    known.add(row[at].strip())
        except csv.Error:
            self.unreadable = True
        labels = known | set(data.labels or ())
        for number, lines in several:
            split = [[field.strip().strip('"').strip() for field in line.split(self.separator)] for line in lines]
            if sum(len(fields) == self.width and fields[at] in labels for fields in split) > 1:
                self.swallowed[number] = len(lines)

    def quotes_are_letters(self) -> bool:
        """Whether each line is a row, and quotation marks are part of what it says."""
        if not self.marks:
            return False
        readable = not self.unreadable and not self.swallowed
        if self.separator == "\t":
            return not (readable and (self.enclosing or not self.every_line_a_row))
        mostly_enclosed = any(2 * self.enclosed[column] > self.filled[column] for column in self.filled)
        return self.every_line_a_row and not readable and not mostly_enclosed and not self.doubled

    def notes(self, file: Path, dialect: Dialect) -> list[str]:
        if dialect.letters and (self.unreadable or self.swallowed):
            return [f"{file}: each line is a row, and quotation marks are letters, as they enclose no fields"]
        if self.over_lines and not dialect.letters:
            numbers, longest = listed(map(str, self.over_lines)), max(self.over_lines.values())
            return [
                f"{file}: rows {numbers} hold line ends within quotation marks, up to {longest} lines; each"
                " is taken for one row"
            ]
        return []

    def of_quotes(self, dialect: Dialect) -> str:
        """What an error about columns adds where a quotation mark may be why."""
        if not self.marks:
            return ""
        if dialect.letters:
            return " Quotation marks are taken for letters there, as they don't enclose fields throughout."
        return " A quotation mark that is a letter may be why: write it twice, and one around the whole field."


def _column_of_label(header: list[str], data: Data) -> int:
    """Where labels stand, by a file's first row."""
    if isinstance(data.label, int):
        return data.label
    names = [name.strip() for name in header]
    return names.index(data.label) if data.label in names else 1


def _separator(file: Path, data: Data, kind: str, notes: list[str]) -> str:
    """What stands between a file's columns: what gives its first rows several columns each, all as many, with the names
    that are asked for above them. Where none does, a tab in TSV and a comma in CSV.

    Where several do, by which columns have no names, the one with the fewest different labels; of as many, the usual.
    """
    usual = "\t" if kind == "tsv" else ","
    names = {name for name in (data.text, data.label) if isinstance(name, str)} if isinstance(data.text, str) else set()
    labels: dict[str, int] = {}  # how many different ones each separator gives
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
            f"{file}: {chosen!r} is taken for what separates its columns; {listed(map(repr, others))} would divide each"
            " row, too"
        )
    return chosen


def _is_header(first: list[str], data: Data, file: Path, dialect: Dialect) -> bool:
    """Whether the first row names the columns: its label is none of those that the other rows have.

    Where the labels are not known, the others must be numbers or come again and again, for the first to stand out.
    """
    if data.label in [name.strip() for name in first]:
        return True
    at = data.label if isinstance(data.label, int) else 1
    label = first[at].strip() if at < len(first) else ""
    if [name.strip() for name in first] == [str(position) for position in range(len(first))]:
        return True  # as pandas calls columns without names
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
