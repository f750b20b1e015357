"""Read rows of local files: JSON, JSON Lines, Parquet, CSV, TSV and plain text, recognised by content as well as name.

Every reader yields (row number, row). Numbers start at 1, as in an editor; rows are lists or mappings.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import tables
from lockstep.errors import BadInput, brief, listed
from lockstep.files import GZIP, open_bytes, open_text, text_lines

ENDINGS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
ENDINGS |= {".tab": "tsv", ".pq": "parquet", ".txt": "text"}
NAMES = {"json": "a JSON list", "jsonl": "JSON Lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet"}
HEAD = 2**16  # the number of bytes by which a file is recognised
PARQUET = b"PAR1"
# The first bytes of files of other kinds that users try, what such a file is, and what to do.
OTHERS = {
    b"PK\x03\x04": ("a zip archive, as Excel's workbooks are too", "Unpack it, or save the sheet as CSV (UTF-8)"),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "Save the sheet as CSV (UTF-8)"),
    b"BZh": ("compressed by bzip2", "Decompress it: bunzip2 --keep"),
    b"\xfd7zXZ": ("compressed by xz", "Decompress it: unxz --keep"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "Decompress it: unzstd --keep"),
    b"ARROW1": ("a Feather file", "Save it as Parquet"),
    b"SQLite format 3": ("an SQLite database", "Export the table as CSV"),
    b"%PDF": ("a PDF", "Give its text as CSV or plain text"),
    b"{\\rtf": ("RTF, as word processors save it", "Save it as plain text (UTF-8)"),
    b"\x80\x04": ("a pickle, which may run anything when it is read", "Save it as Parquet, JSON or CSV"),
    b"\x80\x05": ("a pickle, which may run anything when it is read", "Save it as Parquet, JSON or CSV"),
    GZIP: ("compressed by gzip twice", "Decompress it once: gunzip --keep"),
    b"\xff\xfe\0\0": ("UTF-32", "Convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
    b"\0\0\xfe\xff": ("UTF-32", "Convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
    b"\xff\xfe": ("UTF-16", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
}
PAGES = re.compile(
    rb"<(!doctype|\?xml|!--|/?(html|head|body|p|div|h[1-6]|table|ul|ol|li|span|meta|title|script|style|article|section|main"
    rb"|svg|br|img)\b)"
)
TAR = 257, b"ustar"  # position and value of a tar archive's signature
LFS = b"version https://git-lfs"
ESCAPES = (b"\x1b$B", b"\x1b$@", b"\x1b$)", b"\x1b(J")  # escape sequences of the ISO 2022 encodings


def rows(file: Path, data: Data, notes: list[str], labelled: bool) -> Iterator[tuple[int, object]]:
    """The rows of a file. `labelled`: whether each row has a text and a label. Raises BadInput."""
    if file.is_dir():
        raise BadInput(f"data.path: {file} is a folder. Name the file in it that holds the rows.")
    if not file.is_file():
        raise BadInput(f"data.path: {file} is not a file. Name an existing one.{containers.outside(str(file))}")
    try:
        kind = _kind(file, data, notes, labelled)
        if kind == "json":
            yield from _json(file)
        elif kind == "jsonl":
            yield from _json_lines(file)
        elif kind == "parquet":
            yield from _parquet(file, data)
        elif kind == "text":
            yield from _text(file)
        else:
            yield from tables.rows(file, data, kind, notes)
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is not UTF-8 text (line {_undecodable(file)}). Convert it to UTF-8.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{file}: is not a whole gzip file: {error}. Fetch it again.") from None


def _kind(file: Path, data: Data, notes: list[str], labelled: bool) -> str:
    """The format of a file: data.format, or else by its content and its ending. Raises BadInput."""
    packed = file.suffix.lower() == ".gz"
    if packed and not _is_gzip(file):
        raise BadInput(f"{file}: is not a whole gzip file: it does not begin like one. Fetch it again.")
    ending = Path(file.stem).suffix if packed else file.suffix
    named = ENDINGS.get(ending.lower())
    with open_bytes(file) as stream:
        head = stream.read(HEAD)
    require_rows(file, head)
    if data.format != "auto":
        kind = data.format
    elif head.startswith(PARQUET):
        kind = "parquet"
    else:
        kind = _of_text(head, named, data, labelled)
    if kind is None:
        choices = ", ".join(sorted({*ENDINGS.values()}))
        raise BadInput(f"data.format: can't be recognised from {file.name}; set it to one of {choices}.")
    if kind == "parquet" and _is_gzip(file):
        raise BadInput(f"data.path: {file} is a gzip-compressed Parquet file. Decompress it: gunzip --keep {file}")
    if data.format == "auto" and named and kind != named and (named != "text" or not labelled):
        notes.append(f"{file} is read as {NAMES[kind]}, by its content and not by its name")
    return kind


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(GZIP)) == GZIP


def require_rows(file: Path, head: bytes) -> None:
    """Raise BadInput, naming the kind of file, if a file is of a kind that can't hold rows."""
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for begin, (what, remedy) in OTHERS.items():
        if begins.startswith(begin):
            raise BadInput(f"{file}: is {what}. {remedy}.")
    if head[TAR[0] :].startswith(TAR[1]):
        raise BadInput(f"{file}: is a tar archive. Unpack it: tar -xf {file}.")
    if PAGES.match(begins[:20].lower()):
        raise BadInput(f"{file}: is a web page or XML. Save what it shows as CSV or plain text.")
    if head.startswith(LFS):
        raise BadInput(f"{file}: is a pointer of git LFS, not the file itself. Fetch it: git lfs pull.")
    if not head.startswith(PARQUET) and any(escape in head for escape in ESCAPES):
        raise BadInput(
            f"{file}: is in ISO 2022, as Japanese mail is. Convert it to UTF-8: iconv -f ISO-2022-JP -t UTF-8."
        )
    if b"\0" in head and not head.startswith(PARQUET):
        raise BadInput(f"{file}: is not UTF-8 text, but UTF-16 or not text at all. Convert it to UTF-8.")


def _of_text(head: bytes, named: str | None, data: Data, labelled: bool) -> str | None:
    """The format of a text file, by its beginning (`head`) and by the format that its ending names (`named`)."""
    text = head.decode("utf-8-sig", errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    if named == "text" and not labelled and not isinstance(_value(first), dict):
        return named
    if not first.startswith(("{", "[")):
        header_of_columns = isinstance(data.text, str) and data.text in first
        is_table = named == "text" or (named in ("json", "jsonl", "parquet") and header_of_columns)
        return "csv" if is_table else named
    rows_inside = first[0] == "[" and first[1:].lstrip()[:1] in ("[", "{", "]", "")
    if len(lines) == 1 and len(head) == HEAD:  # the first line is longer than the part that was read
        return "json" if rows_inside and named != "jsonl" else "jsonl"
    value = _value(first)
    if value is None:  # the value continues in the next line, or this is not JSON
        if named in ("csv", "tsv", "text"):
            return "csv" if named == "text" else named
        return "jsonl" if named == "jsonl" and first[-1] not in "[{," else "json"
    if len(lines) == 1 and (rows_inside or (isinstance(value, dict) and named == "json")):
        return "json"
    return "jsonl"


def _value(line: str):
    """The JSON value in a line; None if the line is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def require_lines(file: Path) -> None:
    """Raise BadInput, naming the kind of file, if a file does not hold plain text, one text per line."""
    with open_bytes(file) as stream:
        head = stream.read(HEAD)
    require_rows(file, head)
    first = next((line for line in head.decode("utf-8-sig", errors="replace").split("\n") if line.strip()), "")
    if head.startswith(PARQUET) or isinstance(_value(first), list | dict) or first.strip() == "[":
        raise BadInput(f"{file}: holds {'Parquet' if head.startswith(PARQUET) else 'JSON'}. Give it one text a line.")


def _undecodable(file: Path) -> int:
    """The number of a file's first line that is not UTF-8; the decoder's error has only a position within a block."""
    with open_bytes(file) as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _parse(text: str, where: str):
    """Parse one JSON value. Raises BadInput if Python can't read it completely, JSONDecodeError if it is not JSON."""

    def whole(pairs: list[tuple[str, object]]) -> dict:
        read = dict(pairs)
        if len(read) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BadInput(f"{where}: an object has the key {twice!r} twice. Remove or rename one.")
        return read

    try:
        return json.loads(text, object_pairs_hook=whole)
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise BadInput(f"{where}: a number has too many digits. Shorten it.") from None
    except RecursionError:
        raise BadInput(
            f"{where}: its lists or objects are nested too deeply. Give rows of a text and a label."
        ) from None


def _json(file: Path):
    with open_text(file) as stream:
        text = stream.read()
    try:
        values = _parse(text, str(file))
    except json.JSONDecodeError as error:
        row = _rows_before(text, error.pos) + 1
        raise BadInput(
            f"{file}, row {row} (line {error.lineno}, column {error.colno}): broken JSON: {error.msg}."
        ) from None
    if not isinstance(values, list):
        raise BadInput(f"{file}: expected a JSON list of rows, not {_instead(values)}")
    yield from enumerate(values, 1)


def _instead(value) -> str:
    """What a JSON file holds instead of a list of rows, and what to do about it."""
    if not isinstance(value, dict):
        return f"{type(value).__name__}. For one row per line, set data.format to jsonl."
    lists = [key for key, inner in value.items() if isinstance(inner, list)]
    if len(lists) == 1:
        return f"dict, whose key {lists[0]!r} has a list. Save only that list in a file."
    return (
        f"dict (of {listed(map(repr, value), most=5)}). Save a list of objects, in pandas by"
        " to_json(..., orient='records'). For one object per line, set data.format to jsonl."
    )


def _rows_before(text: str, position: int) -> int:
    """The number of complete rows of a broken JSON list before the error."""
    decoder, at, rows_before = json.JSONDecoder(), text.find("[") + 1, 0
    while at < position:
        try:
            _, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n,")))
        except (ValueError, RecursionError):
            break
        rows_before += 1
    return rows_before


def _json_lines(file: Path):
    for number, line in enumerate(text_lines(file), 1):
        if line.strip():
            try:
                yield number, _parse(line, f"{file}, row {number}")
            except json.JSONDecodeError as error:
                raise BadInput(f"{file}, row {number}, column {error.colno}: broken JSON: {error.msg}.") from None


def _parquet(file: Path, data: Data):
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file}: is not a Parquet file: {error}.") from None
    names = table.schema_arrow.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"{file}: two columns have the same name, {twice!r}. Rename or remove one.")
    asked = {column for column in (data.text, data.label, data.prompt, data.completion) if column is not None}
    only = [name for name in names if name in asked] if asked <= set(names) else None  # others may hold anything
    try:
        yield from enumerate(
            itertools.chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(columns=only)), 1
        )
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
        raise BadInput(
            f"{file}: its rows can't be read: {brief(error)}. Write it anew, with the columns of data.text and"
            " data.label alone."
        ) from None


def _text(file: Path):
    """Each block of lines between empty lines is a row of one column, numbered by its first line."""
    numbered = enumerate(text_lines(file), 1)
    for filled, group in itertools.groupby(numbered, lambda numbered_line: bool(numbered_line[1].strip())):
        if filled:
            block = list(group)
            yield block[0][0], ["\n".join(line for _, line in block)]
