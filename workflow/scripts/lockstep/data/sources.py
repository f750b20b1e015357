"""Read rows of texts from a local file, an https address, a Hugging Face data set, or the embedded corpus.

Every reader yields (row number, row). Numbers start at 1, as in an editor; rows are lists or mappings.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import requests

from lockstep.config import containers
from lockstep.config.sections import Data
from lockstep.data import corpus, readers
from lockstep.data.labels import HALF, Labels, is_no_text, of_missing_texts
from lockstep.errors import BadInput, listed, no_room, shortened
from lockstep.files import atomic_file, hash_file

BLANK = re.compile(r"(\S) +(?=(\S))")  # blanks, with the characters on both sides
BESIDE_CHARACTERS = "beside characters"  # the value of join_blanks that "auto" chooses if most blanks are there
BLANKS_LOOK = 1000  # the number of rows by which "auto" decides
BLOCK = 2**16  # bytes of a download that are read at a time; an incomplete block is lost with the connection
MAX_DOWNLOAD = 4 * 2**30  # bytes; larger data should be a data set on the hub


def read(data: Data, downloads: Path, notes: list[str], labels: Labels) -> tuple[str, Iterator[tuple[str, int, int]]]:
    """The source's name, and its (text, label's number in `labels`, row number) triples, at most `data.limit`.

    Texts are cleaned and never empty. Downloads are kept in `downloads`. Remarks on the source for readers of the
    results are added to `notes`, by the time the last row is read.
    """
    name, rows = records(data, downloads, notes)
    data, rows = with_blanks_decided(data, rows, [(data.text, 0)], notes)
    return name, _columns(rows, data, name, labels, notes)


def records(
    data: Data, downloads: Path, notes: list[str], labelled: bool = True
) -> tuple[str, Iterator[tuple[int, object]]]:
    """The source's name, and its unprocessed rows with their numbers, at most `data.limit`."""
    if data.embedded:
        name, rows = "the embedded synthetic corpus", enumerate(corpus.generate(data.seed), 1)
    elif data.hub and not data.path and not data.url:
        name, rows = f"{data.hub}@{data.revision}", hub_rows(data)
    else:
        file = Path(data.path) if data.path else download(data.url, data.sha256, downloads)
        name, rows = str(data.path or data.url), readers.rows(file, data, notes, labelled)
    return name, itertools.islice(_in_one_order(rows, data, name), data.limit)


def _in_one_order(rows: Iterator[tuple[int, object]], data: Data, name: str) -> Iterator[tuple[int, object]]:
    """Yield the rows. Raises BadInput if columns are given by position, but objects order their keys differently."""
    asked = [column for column in (data.text, data.label, data.prompt, data.completion) if isinstance(column, int)]
    count, first = max(asked, default=-1) + 1, None
    for number, row in rows:
        if count and isinstance(row, dict):
            names = list(itertools.islice(row, count))
            first = first or (number, names)
            if names != first[1] and not set(map(str, asked)) <= row.keys():
                raise BadInput(
                    f"{name}, row {number}: its first keys are {listed(map(repr, names))}, but those of row {first[0]}"
                    f" are {listed(map(repr, first[1]))}, and columns are given by position. Name them, as in"
                    " data.text: text, data.label: label."
                )
        yield number, row


def _columns(rows, data: Data, name: str, labels: Labels, notes: list[str]) -> Iterator[tuple[str, int, int]]:
    missing = 0
    for number, row in rows:
        where = f"{name}, row {number}"
        text, label = text_of(row, data.text, 0, "text", where, data), _column(row, data.label, 1, "label", where)
        missing += is_no_text(text)
        yield text, labels.number(label, where), number
    notes += of_missing_texts(missing)


def with_blanks_decided(
    data: Data, rows: Iterator[tuple[int, object]], columns: list[tuple[str | int, int]], notes: list[str]
) -> tuple[Data, Iterator[tuple[int, object]]]:
    """`data` with `join_blanks: auto` resolved by the first texts, and all of `rows`.

    columns: the columns that hold texts, each with its position in rows without names.
    """
    first = list(itertools.islice(rows, BLANKS_LOOK))
    between = characters = 0
    for _, row in first:
        for column, position in columns:
            text = _cell(row, column, position)
            if isinstance(text, str):
                pairs = [_is_character(before) and _is_character(after) for before, after in BLANK.findall(text)]
                between, characters = between + len(pairs), characters + sum(pairs)
    mostly_characters = between > 0 and 2 * characters > between
    if data.join_blanks == "auto":
        data = replace(data, join_blanks=BESIDE_CHARACTERS if mostly_characters else False)
        if mostly_characters:
            notes.append(
                "blanks beside Chinese and Japanese characters are removed, since most blanks are between such"
                " characters; blanks between alphabetic words stay"
            )
    elif data.join_blanks and between and not mostly_characters:
        notes.append("blanks between words are removed (data.join_blanks), though most are between alphabetic words")
    return data, itertools.chain(first, rows)


def _is_character(letter: str) -> bool:
    """Whether a character belongs to a script without blanks between words, such as Chinese or Japanese."""
    return unicodedata.east_asian_width(letter) in ("W", "F") and not "\uac00" <= letter <= "\ud7a3"


def _without_blanks_beside_characters(text: str) -> str:
    words = text.split(" ")
    joined = [words[0]]
    for word in words[1:]:
        before = joined[-1][-1:]
        if not (word and _is_character(word[0])) and not (before and _is_character(before)):
            joined.append(" ")
        joined.append(word)
    return "".join(joined)


def _cell(row, column: str | int, position: int):
    """A row's value in a column; None if it has no such column."""
    try:
        return _column(row, column, position, "text", "")
    except BadInput:
        return None


def text_of(row, column: str | int, position: int, key: str, where: str, data: Data) -> str:
    """A row's cleaned text in the column of the setting data.`key`. Raises BadInput if it is no text, or is empty."""
    text = _column(row, column, position, key, where)
    if not isinstance(text, str):
        raise BadInput(f"{where}: the {key} is {shortened(text)}; expected a string.")
    if data.join_blanks == BESIDE_CHARACTERS:
        text = _without_blanks_beside_characters(text)
    elif data.join_blanks:
        text = text.replace(" ", "")
    cleaned = text.strip()
    if not cleaned:
        raise BadInput(f"{where}: the {key} is empty. Remove the row.")
    if HALF.search(cleaned):
        raise BadInput(f"{where}: the {key} holds half a character (a lone surrogate). Fix the row.")
    return cleaned


def _column(row, column: str | int, position: int, key: str, where: str):
    if isinstance(row, list):
        # Rows of two columns without names are a text and its label. Of more, nobody has said which is which.
        if isinstance(column, str) and (column != key or (key == "label" and len(row) > 2)):
            raise BadInput(
                f"{where}: has {len(row)} columns without names, and data.{key} is {column!r}. Set data.{key} to the"
                " column's position, counted from 0."
            )
        index = column if isinstance(column, int) else position
        if index < len(row):
            return row[index]
        raise BadInput(f"{where}: has {len(row)} columns, but data.{key} needs the one at position {index}.")
    if isinstance(row, dict):
        if column in row:
            return row[column]
        if isinstance(column, int) and str(column) in row:  # pandas' names of unnamed columns
            return row[str(column)]
        if isinstance(column, int) and column < len(row):
            return list(row.values())[column]
        raise BadInput(
            f"{where}: has no column {column!r} (it has {listed(map(repr, row)) or 'none'})."
            f" Set data.{key} to its name."
        )
    raise BadInput(
        f"{where}: is {json.dumps(row, ensure_ascii=False)[:60]}; expected a list or an object with a text and a label."
    )


def hub_rows(data: Data) -> Iterator[tuple[int, dict]]:
    """The rows of a Hugging Face data set, numbered from 1. Raises BadInput if they can't be fetched."""
    from datasets import load_dataset_builder

    from lockstep.data import hub  # imports the hub's library, which is slow

    where = f"data.hub: {data.hub} at revision {data.revision}"
    try:
        builder = load_dataset_builder(data.hub, name=data.subset, revision=data.revision)
        if hub.COMMIT.fullmatch(data.revision) and builder.hash != data.revision and not Path(data.hub).is_dir():
            # If the hub does not answer, datasets silently uses another revision from its cache.
            raise BadInput(
                f"{where} can't be read: the hub can't be reached, and the cache holds revision {builder.hash}. Connect"
                " to the network, or set data.revision to that one."
            )
        files = itertools.chain.from_iterable((builder.config.data_files or {}).values())
        hub.fetch_rows(sorted({file for file in files if file.startswith("hf://")}))
        builder.download_and_prepare()
        rows = builder.as_dataset(split=data.split)
    except BadInput:
        raise
    except Exception as error:  # the network, the hub, its library and Arrow each raise their own
        if no_room(error):
            raise
        reason = hub.why_no_rows(error, data.hub, data.revision)
        raise BadInput(f"{where} can't be read: {reason}") from None
    names = getattr((rows.features or {}).get(data.label), "names", None)
    # Numbers stand for positions in data.labels only if that has other names for the classes.
    named = bool(names) and (data.labels is None or not set(names).isdisjoint(data.labels))
    for number, row in enumerate(rows, 1):
        if named:  # the data set stores numbers, and -1 for a withheld label
            row[data.label] = names[row[data.label]] if row[data.label] not in (None, -1) else None
        yield number, row


def download(url: str, sha256: str, folder: Path) -> Path:
    """Fetch `url` into `folder` once, and check its hash. Raises BadInput; never leaves an incomplete file."""
    file = Path(url)
    file = folder / f"{sha256[:16]}{Path(file.stem).suffix if file.suffix.lower() == '.gz' else ''}{file.suffix}"
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
    """Append the rest of `url`'s content to a file, from the file's end on. Returns whether it is complete.

    If the connection breaks, the next call resumes. Raises requests' errors if nothing was received.
    """
    begin = stream.tell()
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
    try:
        with requests.get(url, stream=True, timeout=60, headers=headers) as response:
            response.raise_for_status()
            if not response.url.startswith("https://"):
                raise BadInput(f"data.url: {url} leads to {response.url}, which is not https.")
            if begin and response.status_code != requests.codes.partial_content:  # the server sends the whole file
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
