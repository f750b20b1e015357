"""Rows of texts, from a local file, an https address, a Hugging Face data set, or the embedded corpus.

Every reader yields (row number, row): numbers from 1 as an editor counts them, rows as lists or mappings.
"""

import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import requests

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import corpus
from lockstep.errors import BadInput, no_room
from lockstep.files import atomic_file, hash_file

HALF = re.compile("[\ud800-\udfff]")
SEPARATORS = ",;\t|"
LOOK = 100  # rows that tell a file's separator, and whether its first line is a header
BLOCK = 2**16  # bytes of a download at a time; what has come of one is lost with the connection
MAX_DOWNLOAD = 4 * 2**30  # bytes; larger data belongs into a data set id
ENDINGS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
ENDINGS |= {".txt": "text"}


def read(data: Data, downloads: Path, notes: list[str] | None = None) -> tuple[str, Iterator[tuple[str, object]]]:
    """The source's name, and its (text, label, row number) triples, at most `data.limit` of them.

    Text is a cleaned, non-empty string; label is as it stands in the source. Downloads are kept in `downloads`. What a
    reader of the results must know of the source is added to `notes`, at the latest with the first row.
    """
    notes = [] if notes is None else notes
    name, rows = records(data, downloads, notes)
    return name, _columns(rows, data, name)


def records(data: Data, downloads: Path, notes: list[str]) -> tuple[str, Iterator[tuple[int, object]]]:
    """The source's name, and its rows as they stand there with their numbers, at most `data.limit` of them."""
    if data.embedded:
        name, rows = "the embedded synthetic corpus", enumerate(corpus.generate(data.seed), 1)
    elif data.hub and not data.path and not data.url:
        name, rows = f"{data.hub}@{data.revision}", hub_rows(data)
    else:
        file = Path(data.path) if data.path else download(data.url, data.sha256, downloads)
        name, rows = str(data.path or data.url), _file(file, data, notes)
    return name, itertools.islice(rows, data.limit)


def _columns(rows, data: Data, name: str) -> Iterator[tuple[str, object, int]]:
    for number, row in rows:
        where = f"{name}, row {number}"
        text, label = text_of(row, data.text, 0, "text", where, data), _column(row, data.label, 1, "label", where)
        if isinstance(label, float) and label.is_integer():  # a column of numbers with gaps is read as floats
            label = int(label)
        if isinstance(label, str):
            label = label.strip()
        if not isinstance(label, (str, int)) or label == "":
            raise BadInput(f"{where}: the label is {label!r}; expected a name or a whole number.")
        if HALF.search(str(label)):
            raise BadInput(f"{where}: the label holds half a character (a lone surrogate). Fix the row.")
        yield text, label, number


def text_of(row, column: str | int, position: int, key: str, where: str, data: Data) -> str:
    """A row's cleaned text in one column, which `data.key` names. Raises BadInput where it is none, or empty."""
    text = _column(row, column, position, key, where)
    if not isinstance(text, str):
        raise BadInput(f"{where}: the {key} is {text!r}; expected a string.")
    cleaned = (text.replace(" ", "") if data.join_blanks else text).strip()
    if not cleaned:
        raise BadInput(f"{where}: the {key} is empty. Remove the row.")
    if HALF.search(cleaned):
        raise BadInput(f"{where}: the {key} holds half a character (a lone surrogate). Fix the row.")
    return cleaned


def _column(row, column: str | int, position: int, key: str, where: str):
    if isinstance(row, list):
        index = column if isinstance(column, int) else position
        if index < len(row):
            return row[index]
        raise BadInput(f"{where}: has {len(row)} columns; data.{key} wants the one at position {index}.")
    if isinstance(row, dict):
        if column in row:
            return row[column]
        if isinstance(column, int) and column < len(row):
            return list(row.values())[column]
        raise BadInput(
            f"{where}: has no column {column!r} (it has {', '.join(map(repr, row)) or 'none'})."
            f" Set data.{key} to its name."
        )
    raise BadInput(
        f"{where}: is {json.dumps(row, ensure_ascii=False)[:60]}; expected a list or an object with a text and a label."
    )


def _file(file: Path, data: Data, notes: list[str]) -> Iterator[tuple[int, object]]:
    if not file.is_file():
        raise BadInput(f"data.path: {file} is not a file. Name an existing one.{containers.outside(str(file))}")
    ending = Path(file.stem).suffix if packed(file) else file.suffix
    kind = ENDINGS.get(ending.lower()) if data.format == "auto" else data.format
    if kind is None:
        raise BadInput(
            f"data.format: can't tell it from {file.name}; set it to {', '.join(sorted({*ENDINGS.values()}))}."
        )
    if kind == "parquet" and packed(file):
        raise BadInput(f"data.path: {file} is a gzip-compressed Parquet file. Decompress it: gunzip --keep {file}")
    reader = {"json": _json, "jsonl": _json_lines, "csv": _csv, "tsv": _csv, "parquet": _parquet, "text": _text}[kind]
    try:
        yield from reader(file, data, kind, notes)
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is not UTF-8 text (line {_undecodable(file)}). Convert it to UTF-8.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{file}: is not a whole gzip file: {error}. Fetch it again.") from None


def _undecodable(file: Path) -> int:
    """The number of a file's first line that is not UTF-8. A decoder tells a place in one of the file's parts only."""
    with (gzip.open if packed(file) else open)(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def packed(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _open(file: Path, newline: str | None = None):
    """The file's text, unpacked where it is packed by gzip."""
    return (gzip.open if packed(file) else open)(file, "rt", encoding="utf-8-sig", newline=newline)


def _parse(text: str, where: str):
    """One JSON value. Raises BadInput for what Python reads no further, and JSONDecodeError for what is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise BadInput(f"{where}: holds a number of too many digits. Fix it.") from None
    except RecursionError:
        raise BadInput(
            f"{where}: its lists or objects are nested too deeply. Give rows of a text and a label."
        ) from None


def _json(file: Path, data: Data, kind: str, notes: list[str]):
    with _open(file) as stream:
        text = stream.read()
    try:
        rows = _parse(text, str(file))
    except json.JSONDecodeError as error:
        row = _rows_before(text, error.pos) + 1
        raise BadInput(
            f"{file}, row {row} (line {error.lineno}, column {error.colno}): broken JSON: {error.msg}."
        ) from None
    if not isinstance(rows, list):
        raise BadInput(
            f"{file}: expected a JSON list of rows, not {type(rows).__name__}."
            " For one object per line, set data.format to jsonl."
        )
    yield from enumerate(rows, 1)


def _rows_before(text: str, position: int) -> int:
    """How many whole rows of a broken JSON list stand before the fault."""
    decoder, at, rows = json.JSONDecoder(), text.find("[") + 1, 0
    while at < position:
        try:
            _, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n,")))
        except (ValueError, RecursionError):
            break
        rows += 1
    return rows


def _json_lines(file: Path, data: Data, kind: str, notes: list[str]):
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, _parse(line, f"{file}, row {number}")
                except json.JSONDecodeError as error:
                    raise BadInput(f"{file}, row {number}, column {error.colno}: broken JSON: {error.msg}.") from None


def _csv(file: Path, data: Data, kind: str, notes: list[str]):
    """Columns by name below a header line; by position, with or without one. Commas may be other separators."""
    by_name = isinstance(data.text, str)
    rows = _records(file, kind, _separator(file, data) if kind == "csv" else "\t")
    first = list(itertools.islice(rows, LOOK))
    if not first:
        return
    header = [name.strip() for name in first[0][1]]
    if any("\0" in name for name in header):
        raise BadInput(f"{file}: is not UTF-8 text, but UTF-16 as it seems. Convert it to UTF-8.")
    if by_name and len(set(header)) < len(header):
        raise BadInput(f"{file}, row 1: two columns have one name. Rename one, or set data.text to a number.")
    if by_name or _is_header([row for _, row in first], data):
        if not by_name:
            notes.append(f"row 1 of {file} ({', '.join(header)[:80]}) is taken for its header, and not for data")
        del first[0]
        by_name = by_name or data.label in header  # of one that was found, the text's column may be a position
    for number, row in itertools.chain(first, rows):
        if len(row) != len(header):
            raise BadInput(f"{file}, row {number}: has {len(row)} columns; the first has {len(header)}.")
        yield number, dict(zip(header, row, strict=True)) if by_name else row


def _records(file: Path, kind: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not empty, with the number of the line on which it begins."""
    csv.field_size_limit(2**31 - 1)
    with _open(file, newline="") as lines:
        reader, number = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True), 0
        try:
            for row in reader:
                first_line, number = number + 1, reader.line_num
                if row:
                    yield first_line, row
        except csv.Error as error:
            raise BadInput(f"{file}, row {number + 1}: broken {kind.upper()}: {error}.") from None


def _separator(file: Path, data: Data) -> str:
    """What stands between a CSV file's columns: the first that gives its first rows several columns each, all as many,
    with the names that are asked for above them. A comma where none does."""
    names = {name for name in (data.text, data.label) if isinstance(name, str)} if isinstance(data.text, str) else set()
    for separator in SEPARATORS:
        try:
            rows = [row for _, row in itertools.islice(_records(file, "csv", separator), LOOK)]
        except BadInput:
            continue
        if len({len(row) for row in rows}) == 1 < len(rows[0]) and names <= {name.strip() for name in rows[0]}:
            return separator
    return ","


def _is_header(rows: list[list[str]], data: Data) -> bool:
    """Whether the first row names the columns: its label is none of those that all other rows have.

    Where the labels are not known, the others must be numbers or come again and again, for the first to stand out.
    """
    if data.label in [name.strip() for name in rows[0]]:
        return True
    at = data.label if isinstance(data.label, int) else 1
    first, *others = [row[at].strip() if at < len(row) else "" for row in rows]
    if data.labels:
        label_names = {*data.labels, *map(str, range(len(data.labels)))}
        return first not in label_names and bool(others) and set(others) <= label_names
    stands_out = all(label.isdecimal() for label in others) or len(others) >= 4 * len(set(others))
    return first not in others and bool(others) and not first.isdecimal() and stands_out


def _parquet(file: Path, data: Data, kind: str, notes: list[str]):
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{file}: is not a Parquet file: {error}.") from None
    yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in table.iter_batches()), 1)


def _text(file: Path, data: Data, kind: str, notes: list[str]):
    """What stands between empty lines of a plain text file is a row of one column, numbered by its first line."""
    with _open(file) as lines:
        for filled, group in itertools.groupby(enumerate(lines, 1), lambda numbered: bool(numbered[1].strip())):
            if filled:
                block = list(group)
                yield block[0][0], ["".join(line for _, line in block)]


def hub_rows(data: Data) -> Iterator[tuple[int, dict]]:
    """The rows of a Hugging Face data set, numbered from 1. Raises BadInput where they can't be had."""
    from datasets import load_dataset_builder

    from lockstep.data import hub  # starts the hub's library

    where = f"data.hub: {data.hub} at revision {data.revision}"
    try:
        builder = load_dataset_builder(data.hub, name=data.subset, revision=data.revision)
        if hub.COMMIT.fullmatch(data.revision) and builder.hash != data.revision and not Path(data.hub).is_dir():
            # Where the hub does not answer, datasets takes what it has.
            raise BadInput(
                f"{where} can't be read: the hub can't be reached, and what was fetched before is revision"
                f" {builder.hash}. Connect to the network, or set data.revision to that one."
            )
        files = itertools.chain.from_iterable((builder.config.data_files or {}).values())
        hub.fetch_rows(sorted({file for file in files if file.startswith("hf://")}))
        builder.download_and_prepare()
        rows = builder.as_dataset(split=data.split)
    except BadInput:
        raise
    except Exception as error:  # of the network, the hub, its library, Arrow: each has its own
        if no_room(error):
            raise
        reason = hub.why_no_rows(error, data.hub, data.revision)
        raise BadInput(f"{where} can't be read: {reason}") from None
    yield from enumerate(rows, 1)


def download(url: str, sha256: str, folder: Path) -> Path:
    """Fetch `url` into `folder` once, and check it against its hash. Raises BadInput; leaves nothing half-written."""
    file = Path(url)
    file = folder / f"{sha256[:16]}{Path(file.stem).suffix if packed(file) else ''}{file.suffix}"
    if file.is_file() and hash_file(file) == sha256:
        return file
    with atomic_file(file) as temporary:
        try:
            with temporary.open("wb") as stream:
                while not _fetch(url, stream):
                    pass
        except requests.RequestException as error:
            how = containers.offline() or " Fetch it by hand and set data.path."
            raise BadInput(f"data.url: {url} can't be fetched: {error}.{how}") from None
        actual = hash_file(temporary)
        if actual != sha256:
            raise BadInput(f"data.url: {url} has sha256 {actual}, not {sha256} as data.sha256 says. Nothing was kept.")
    return file


def _fetch(url: str, stream: BinaryIO) -> bool:
    """Write to a file what is behind `url`, from where the file ends; whether that was all.

    Where the connection is cut it was not, and the next call goes on. Raises requests' errors where nothing came.
    """
    begin = stream.tell()
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
    try:
        with requests.get(url, stream=True, timeout=60, headers=headers) as response:
            response.raise_for_status()
            if not response.url.startswith("https://"):
                raise BadInput(f"data.url: {url} leads to {response.url}, which is not https.")
            if begin and response.status_code != requests.codes.partial_content:  # the whole file once more
                stream.seek(0)
                stream.truncate()
            for block in response.iter_content(BLOCK):
                if stream.tell() + len(block) > MAX_DOWNLOAD:
                    raise BadInput(f"data.url: {url} is larger than {MAX_DOWNLOAD >> 30} GiB.")
                stream.write(block)
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
        if stream.tell() <= begin:
            raise
        return False
    return True
