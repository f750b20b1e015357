"""Write files atomically, and hash their content.

A program that is killed while it writes leaves an incomplete file, and every checkpoint format silently loads a flipped
byte. So files are written under a temporary name, synced and renamed, and those that are read again are hashed.
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

GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
MANIFEST = "manifest.json"
OF_ITSELF = "manifest"  # the key of that file's own hash


@contextlib.contextmanager
def atomic_file(path: Path):
    """Yield a temporary path beside `path`, which replaces `path` only if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_when_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            let_read([temporary])
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path):
    """Yield a temporary folder beside `path`, which replaces `path` only if the block succeeds."""
    with named_when_full(path):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # not by tempfile, whose folders only their owner can read
        mode = temporary.stat().st_mode
        try:
            yield temporary
            files = [file for file in temporary.rglob("*") if file.is_file()]
            for file in files:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            let_read(files)
            temporary.chmod(mode)  # copying a tree into it may have changed its mode
            if path.exists():
                shutil.rmtree(path)
            temporary.replace(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, final: Path) -> None:
    """Replace a folder by a complete new one, and sync the change to disk."""
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(source: str, target: str) -> None:
    """Create a hard link, or a copy if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def let_read(files: list[Path]) -> None:
    """Give group and others the same permissions for these files as for any new file in their folder.

    safetensors creates files that only their owner can read. The usual permissions are read from a probe file, since
    they depend on the folder's access control list and on the umask, which Python can only read by changing it for all
    threads.
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
    """Remove temporary folders in `folder` and its subfolders that a program left unfinished.

    Their files are truncated first, since a file that is still open, as after a failure of PyTorch's writer, keeps its
    space on disk. Files with other hard links are not truncated.
    """
    for left in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        if not left.is_dir():
            continue
        with contextlib.suppress(OSError):  # another rank may be removing it, too
            for file in left.rglob("*"):
                with contextlib.suppress(OSError):
                    if file.is_file() and file.stat().st_nlink == 1:
                        os.truncate(file, 0)
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def named_when_full(path: Path):
    """Turn an error about a full disk into RunFailed, which names the file."""
    try:
        yield
    except Exception as error:
        if why := no_room(error):
            raise RunFailed(f"{path}: can't be written: {why}. {MAKE_ROOM}") from None
        raise


def seal(folder: Path, about: dict) -> None:
    """Write `folder`/manifest.json with the content of `about`, the sha256 of each file, and a hash of itself.

    Every file is synced to disk.
    """
    hashes, files = {}, sorted(file for file in folder.rglob("*") if file.is_file())
    let_read(files)
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        hashes[str(file.relative_to(folder))] = hash_file(file)
    manifest = about | {"files": hashes}
    write_json(folder / MANIFEST, manifest | {OF_ITSELF: _hash_of(manifest)})


def _hash_of(manifest: dict) -> str:
    return hash_text(json.dumps(manifest, sort_keys=True))


def verify(folder: Path, remedy: str) -> dict:
    """Check that every file in a sealed folder is unchanged, and return the folder's manifest.

    Raises RunFailed, whose message ends with the `remedy`.
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
    """Open a file for reading, and decompress it if its content is gzip, whatever its name."""
    with path.open("rb") as stream:
        is_packed = stream.read(len(GZIP)) == GZIP
    return gzip.open(path, "rb") if is_packed else path.open("rb")


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a UTF-8 text file for reading, without a byte-order mark; decompressed if it is gzip."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file as `wc -l` counts them, without their ends (LF or CR LF).

    str.splitlines would also split at form feeds, U+0085 and U+2028.
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
    """Read a JSON file. Raises BadInput if it is not valid JSON, for example truncated, or contains NaN or Infinity."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is damaged ({error}). Remove it, and make it again.") from None


def read_object(path: Path, keys: tuple[str, ...]) -> dict:
    """Read a JSON object. Raises BadInput if the file holds something else, or lacks one of `keys`."""
    content = read_json(path)
    if not isinstance(content, dict) or (missing := [key for key in keys if key not in content]):
        damage = f"lacks {', '.join(missing)}" if isinstance(content, dict) else "is not an object"
        raise BadInput(f"{path}: is damaged ({damage}). Remove it, and make it again.")
    return content


def _no_number(word: str):
    raise ValueError(f"{word} is not a number in JSON")


def inventory(folder: Path, parts: tuple[str, ...]) -> dict[str, int]:
    """The size in bytes of every file in these parts of a folder, by its path relative to the folder."""
    files = sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def lacking(folder: Path, listed: dict[str, int]) -> list[Path]:
    """The files of an inventory that are missing or have another size."""
    files = {folder / name: size for name, size in listed.items()}
    return [file for file, size in files.items() if not file.is_file() or file.stat().st_size != size]


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_text(text: str) -> str:
    return hash_bytes(text.encode())


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hash_arrays(arrays: dict) -> str:
    """sha256 over named NumPy arrays: their names, types, shapes and bytes.

    An array may be given in pieces, as (type, shape, iterable of arrays), so that only one piece is in memory at a
    time.
    """
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items(), key=lambda item: item[0]):
        kind, shape, pieces = array if isinstance(array, tuple) else (array.dtype, array.shape, [array])
        digest.update(f"{name} {kind.str} {shape}\n".encode())
        for piece in pieces:
            digest.update(piece.tobytes())
    return digest.hexdigest()


def write_csv(path: Path, header: list[str], rows) -> None:
    """Write a CSV file in UTF-8 with a byte-order mark, without which spreadsheets garble Chinese."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([_harmless(cell) for cell in header])
        writer.writerows([_harmless(cell) for cell in row] for row in rows)


def _harmless(cell):
    """Put an apostrophe before a text that a spreadsheet would run as a formula (OWASP, "CSV Injection")."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
