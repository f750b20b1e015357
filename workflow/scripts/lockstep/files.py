"""Files written whole or not at all, and hashes of what they hold.

Killed while it writes, a program leaves half a file; a flipped byte loads silently from every checkpoint format.
So everything here is written under a temporary name, synced and renamed, and hashed where it is read again.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from lockstep.errors import MAKE_ROOM, BadInput, RunFailed, no_room

GZIP = b"\x1f\x8b"  # what gzip's files begin with
MANIFEST = "manifest.json"
OF_ITSELF = "manifest"  # in that file: its own hash


@contextlib.contextmanager
def atomic_file(path: Path):
    """Yield a temporary path beside `path`; rename it onto `path` only if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_when_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            share([temporary])
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path):
    """Yield a temporary folder beside `path`; it takes the place of `path` only if the block succeeds."""
    with named_when_full(path):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # not by tempfile, whose folders are for nobody else
        mode = temporary.stat().st_mode
        try:
            yield temporary
            files = [file for file in temporary.rglob("*") if file.is_file()]
            for file in files:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            share(files)
            temporary.chmod(mode)  # a tree that was copied into it brings its own
            if path.exists():
                shutil.rmtree(path)
            temporary.replace(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a folder that is whole, in place of an older one, and have the disk know it."""
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(source: str, target: str) -> None:
    """The same file at another place, or a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def share(files: list[Path]) -> None:
    """Let group and others have of these files what they have of any other in that folder.

    safetensors makes files for their owner alone. What others have is seen on a file that is made to look at: the umask
    decides it, which Python reads by setting it, for all threads; and the folder, by an access control list.
    """
    for folder in {file.parent for file in files}:
        probe = folder / f".usual.{os.getpid()}.tmp"
        with probe.open("wb") as stream:
            usual = os.fstat(stream.fileno()).st_mode
        probe.unlink(missing_ok=True)
        for file in (file for file in files if file.parent == folder and not file.is_symlink()):
            mode = stat.S_IMODE(file.stat().st_mode)
            wanted = mode & ~0o077 | usual & 0o077
            if mode != wanted:
                file.chmod(wanted)


def remove_unfinished(folder: Path) -> None:
    """Remove the folders that were being written in `folder`, or in one of its folders, when a program ended.

    Their files are cut off first: the disk keeps room for what is still open, as PyTorch's writer is after it failed.
    Not those that lie elsewhere too, under another name.
    """
    for left in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        if not left.is_dir():
            continue
        with contextlib.suppress(OSError):  # another rank may be removing the same
            for file in left.rglob("*"):
                with contextlib.suppress(OSError):
                    if file.is_file() and file.stat().st_nlink == 1:
                        os.truncate(file, 0)
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def named_when_full(path: Path):
    """Say which file it was that found no room on the disk."""
    try:
        yield
    except Exception as error:
        if why := no_room(error):
            raise RunFailed(f"{path}: can't be written: {why}. {MAKE_ROOM}") from None
        raise


def seal(folder: Path, about: dict) -> None:
    """Write `folder`/manifest.json: what is known `about` it, and the sha256 of each file in it, every one synced.

    The manifest holds a hash of itself too.
    """
    hashes, files = {}, sorted(file for file in folder.rglob("*") if file.is_file())
    share(files)
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        hashes[str(file.relative_to(folder))] = hash_file(file)
    manifest = about | {"files": hashes}
    write_json(folder / MANIFEST, manifest | {OF_ITSELF: _hash_of(manifest)})


def _hash_of(manifest: dict) -> str:
    return hash_text(json.dumps(manifest, sort_keys=True))


def verify(folder: Path, remedy: str) -> dict:
    """The manifest of a sealed folder, after every file in it was found to be as it was written.

    Raises RunFailed, which ends in the `remedy`: what to do about it.
    """
    if not (folder / MANIFEST).is_file():
        raise RunFailed(f"{folder}: holds no {MANIFEST}, so it is not complete. {remedy}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RunFailed(f"{folder / MANIFEST}: names no files. {remedy}")
    if manifest.pop(OF_ITSELF, None) != _hash_of(manifest):
        raise RunFailed(f"{folder / MANIFEST}: has changed since it was written. {remedy}")
    for name, sha256 in manifest["files"].items():
        if not (folder / name).is_file() or hash_file(folder / name) != sha256:
            raise RunFailed(f"{folder / name}: is missing or has changed since it was written. {remedy}")
    return manifest


def open_bytes(path: Path) -> BinaryIO:
    """A file to read, unpacked where it is packed by gzip, whatever its name."""
    with path.open("rb") as stream:
        is_packed = stream.read(len(GZIP)) == GZIP
    return gzip.open(path, "rb") if is_packed else path.open("rb")


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """A file of UTF-8 text to read, without its byte-order mark; unpacked where it is packed by gzip."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file as `wc -l` counts them, without their ends: LF, or CR LF.

    Not as str.splitlines has them, which also cuts at form feeds, U+0085 and U+2028.
    """
    with open_text(path, newline="\n") as lines:
        for line in lines:
            yield line.removesuffix("\n").removesuffix("\r")


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def read_json(path: Path):
    """Raises BadInput where the file is not JSON, as after it was cut off or edited; NaN and Infinity are none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is damaged ({error}). Remove it, and make it again.") from None


def read_object(path: Path, keys: tuple[str, ...]) -> dict:
    """The JSON object in a file. Raises BadInput where it is none, or lacks one of `keys`."""
    content = read_json(path)
    if not isinstance(content, dict) or (missing := [key for key in keys if key not in content]):
        damage = f"lacks {', '.join(missing)}" if isinstance(content, dict) else "is not an object"
        raise BadInput(f"{path}: is damaged ({damage}). Remove it, and make it again.")
    return content


def _no_number(word: str):
    raise ValueError(f"{word} is not a number of JSON")


def inventory(folder: Path, parts: tuple[str, ...]) -> dict[str, int]:
    """Every file in these parts of a folder, by its path in it, with its size in bytes."""
    files = sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def lacking(folder: Path, listed: dict[str, int]) -> list[Path]:
    """Which files of an inventory are not there any more, or have another size."""
    files = {folder / name: size for name, size in listed.items()}
    return [file for file, size in files.items() if not file.is_file() or file.stat().st_size != size]


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_arrays(arrays: dict) -> str:
    """sha256 over named NumPy arrays: their names, types, shapes and bytes, whatever file holds them.

    An array may come in pieces, as (type, shape, iterable of arrays), so that only one has to be in memory at a time.
    """
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items(), key=lambda item: item[0]):
        kind, shape, pieces = array if isinstance(array, tuple) else (array.dtype, array.shape, [array])
        digest.update(f"{name} {kind.str} {shape}\n".encode())
        for piece in pieces:
            digest.update(piece.tobytes())
    return digest.hexdigest()


def write_csv(path: Path, header: list[str], rows) -> None:
    """A CSV file in UTF-8 with a byte-order mark, without which spreadsheets garble Chinese."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([_harmless(cell) for cell in header])
        writer.writerows([_harmless(cell) for cell in row] for row in rows)


def _harmless(cell):
    """A text that a spreadsheet would run as a formula gets an apostrophe before it (OWASP, "CSV Injection")."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
