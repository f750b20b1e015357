"""Files written whole or not at all, and hashes of what they hold.

Killed while it writes, a program leaves half a file; a flipped byte loads silently from every checkpoint format.
So everything here is written under a temporary name, synced and renamed, and hashed where it is read again.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from lockstep.errors import BadInput


@contextlib.contextmanager
def atomic_file(path: Path):
    """Yield a temporary path beside `path`; rename it onto `path` only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path):
    """Yield a temporary folder beside `path`; it takes the place of `path` only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        for file in (file for file in temporary.rglob("*") if file.is_file()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            file.chmod(0o644)
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def read_json(path: Path):
    """Raises BadInput where the file is no JSON, as after it was cut off or edited; NaN and Infinity are none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except ValueError as error:
        raise BadInput(f"{path}: is damaged ({error}). Remove it, and make it again.") from None


def _no_number(word: str):
    raise ValueError(f"{word} is no number of JSON")


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
