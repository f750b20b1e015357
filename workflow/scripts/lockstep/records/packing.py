"""A record: what a results folder proves, in one file, without weights, texts, or names of machines, users and folders.

A record is a tar archive, packed by LZMA, whose first member is a manifest with the sha256 of every other one. The same
results always give the same bytes. Repetitions of a row have the same ledger, which LZMA stores once.
"""

import getpass
import io
import json
import lzma
import os
import platform
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lockstep import paths
from lockstep.config.kinds import Kind
from lockstep.errors import BadInput
from lockstep.files import hash_bytes, hash_text, read_json
from lockstep.run import journal

MANIFEST = paths.packed_file(Path()).name
FORMAT = 1
ENDING = ".record"
MOST = 5_000_000  # bytes of a record
MOST_UNPACKED = 200_000_000  # bytes; a record that claims more is refused unread
ACCEPT = "accept.json"

# What is packed. All else is left out: weights, texts, logs, pictures, pages.
OF_RESULTS = (
    *("config.yaml", "manifest.json", "journal.jsonl", "blocks/*.json", "network/network.json", "data/peak.json"),
    *("data/data.json", "data/plan/*.npz", "data/plan/*.json"),
    *(f"report/{name}" for name in (paths.SUMMARY, paths.TABLE, paths.RUNS_TABLE, paths.METHODS, paths.INSTALLED)),
)
OF_A_RUN = (
    *(paths.RECORD, paths.FAILED, paths.SETTINGS, paths.ENVIRONMENT, paths.LEDGER, paths.STEPS, paths.EVENTS),
    *(paths.WATCH, paths.VERDICT, paths.PROFILE, paths.TEST_REPORT, f"{paths.RANKS}/*.json"),
)
NUMBERS = (".npz", ".npy")  # arrays, which hold no words

# Absolute paths of two names or more: those that are a whole value, which may have blanks, and those within a text. The
# last name stays, since a configuration is not understood without it.
VALUE = re.compile(r"""(?:(?<=["'])|(?<=: )|(?<=- ))(?:file://|~)?/[^"'\n]*/(?=[^"'\n/])""")
WITHIN = re.compile(r"(?:file://|(?<![\w.:/<>~-]))~?/(?:[\w.@+-]+/)+(?=[\w.@+-])")
OF_EVERY_MACHINE = ("/usr/", "/bin/", "/lib/", "/etc/", "/proc/", "/sys/", "/dev/", "/opt/rh/")
TOO_COMMON = ("root", "user", "localhost")  # names that tell nobody's


@dataclass(frozen=True)
class Record:
    """A record that was unpacked into a folder."""

    manifest: dict
    folder: Path

    @property
    def identity(self) -> str:
        """The first 12 digits of the manifest's sha256, which covers every file."""
        return _hash_of(self.manifest)[:12]


@dataclass(frozen=True)
class Packed:
    """A record before it is written. removed: how often a name of each kind was removed."""

    content: bytes
    name: str
    identity: str
    files: int
    removed: dict[str, int]


def pack(results: Path, with_host: bool = False) -> Packed:
    """Pack a results folder, or that of `lockstep accept`.

    Raises BadInput if it has neither a report nor acceptance, or if the record would be larger than MOST.
    """
    names = Names(results, with_host)
    contents = {name: (results / name).read_bytes() for name in _chosen(results)}
    listed = _listed(results)
    files, packed = {}, {}
    for name, content in contents.items():
        packed[name] = content if name.endswith(NUMBERS) else names.remove(content)
        files[name] = {"sha256": hash_bytes(packed[name])}
        if packed[name] != content:
            files[name]["before"] = hash_bytes(content)
    about = read_json(paths.manifest_file(results)) if paths.manifest_file(results).is_file() else {}
    manifest = {
        "format": FORMAT,
        "made": about.get("time"),
        "command": names.remove(str(about.get("command") or "lockstep accept").encode()).decode(),
        "commit": about.get("commit"),
        "files": files,
        "left_out": {name: sha256 for name, sha256 in listed.items() if name not in contents},
    }
    content = _archive({MANIFEST: _text(manifest).encode()} | packed)
    if len(content) > MOST:
        raise BadInput(
            f"{results}: its record would have {len(content) / 1e6:.1f} MB, and may have {MOST / 1e6:g}. Most of it are"
            " ledgers, a line for each sample of each step; submit a benchmark of fewer steps (train.max_steps)."
        )
    identity = _hash_of(manifest)[:12]
    name = f"{(manifest['made'] or 'accept')[:10]}-{identity}{ENDING}"
    return Packed(content, name, identity, len(packed), names.removed)


def unpack(file: Path, folder: Path) -> Record:
    """Unpack a record into an empty folder. Raises BadInput if it is none, or not as it was written."""
    members = {}
    for name, content in _members(file):
        if name in members:
            raise BadInput(f"{file}: holds {name} twice, which no record does.")
        members[name] = content
    if MANIFEST not in members:
        raise BadInput(f"{file}: is not a record, as it has no {MANIFEST}. `lockstep record submit` makes one.")
    try:
        about = members.pop(MANIFEST)
        manifest = json.loads(about)
        files, left_out = manifest["files"], manifest["left_out"]
        hashes = {name: entry["sha256"] for name, entry in files.items()}
        if manifest["format"] != FORMAT:
            raise BadInput(f"{file}: is of format {manifest['format']}, and this version of Lockstep reads {FORMAT}.")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{file}: its {MANIFEST} is damaged.") from None
    if stray := sorted(members.keys() ^ hashes.keys()):
        raise BadInput(f"{file}: was changed: {stray[0]} is {'not in it' if stray[0] in hashes else 'not listed'}.")
    if left_out.keys() & files.keys():
        raise BadInput(f"{file}: its {MANIFEST} lists {min(left_out.keys() & files.keys())} twice.")
    for name, content in members.items():
        if hash_bytes(content) != hashes[name]:
            raise BadInput(f"{file}: was changed: {name} is not as it was packed.")
        if not _may_be_packed(name):
            raise BadInput(f"{file}: holds {name}, which no record has.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / MANIFEST).write_bytes(about)
    return Record(manifest, folder)


class Names:
    """Names that tell whose machine it was. `removed` counts them."""

    def __init__(self, results: Path, with_host: bool):
        file = paths.manifest_file(results)
        hosts = {platform.node(), read_json(file).get("host") if file.is_file() else None}
        words = {} if with_host else {host: "<host>" for host in hosts if host}
        words |= {_user(): "<user>"}
        self.words = {word: mark for word, mark in words.items() if word not in TOO_COMMON and len(word) > 1}
        self.removed: dict[str, int] = {}

    def remove(self, content: bytes) -> bytes:
        """A text without them. Raises BadInput if it is no text."""
        text = content.decode("utf-8")
        for pattern in (VALUE, WITHIN):
            text = pattern.sub(self._path, text)
        for word, mark in self.words.items():
            text, times = re.subn(rf"(?<![\w-]){re.escape(word)}(?![\w-])", mark, text)
            self._count(mark, times)
        return text.encode()

    def _path(self, match: re.Match) -> str:
        if match[0].startswith(OF_EVERY_MACHINE):
            return match[0]
        self._count("<path>", 1)
        return "<path>/"

    def _count(self, mark: str, times: int) -> None:
        if times:
            self.removed[mark] = self.removed.get(mark, 0) + times


def _chosen(results: Path) -> list[str]:
    """The names of the files to pack, relative to the results folder. Raises BadInput if there is nothing to share."""
    if (results / ACCEPT).is_file():
        patterns = (ACCEPT, *(f"{part}/{name}" for part in ("proofs", "times") for name in _patterns()))
    elif (paths.report_folder(results) / paths.SUMMARY).is_file():
        patterns = _patterns()
    else:
        raise BadInput(
            f"{results}: holds no report and no {ACCEPT}. Name the folder of a finished benchmark, or of `accept`."
        )
    files = sorted({file for pattern in patterns for file in results.glob(pattern) if file.is_file()})
    return [file.relative_to(results).as_posix() for file in files]


def _patterns() -> tuple[str, ...]:
    runs = [f"{kind}/{paths.run_name('*', '*', '*')}" for kind in (Kind.TIMED, Kind.TRIAL, Kind.PROFILE)]
    return (*OF_RESULTS, *(f"{run}/{name}" for run in runs for name in OF_A_RUN))


def _may_be_packed(name: str) -> bool:
    """Whether a record may have a file of this name: one of those that are packed, in its own folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    inside = PurePosixPath(*path.parts[1:]) if path.parts[0] in ("proofs", "times") else path
    return name == ACCEPT or any(
        len(PurePosixPath(pattern).parts) == len(inside.parts) and inside.match(pattern) for pattern in _patterns()
    )


def _listed(results: Path) -> dict[str, str]:
    """The sha256 of each file in the journal, by its name relative to the results folder; the last line counts."""
    listed = {}
    for line in journal.read(results):
        for name, sha256 in line.get("files", {}).items():
            listed[os.path.normpath(f"{line['folder']}/{name}")] = sha256
    return listed


def _archive(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", format=tarfile.PAX_FORMAT, preset=9) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member. Nothing is written, whatever the archive says."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        unpacked = decompressor.decompress(file.read_bytes(), MOST_UNPACKED)
        if not decompressor.needs_input and not decompressor.eof:
            raise BadInput(f"{file}: unpacks to more than {MOST_UNPACKED // 10**6} MB, which no record does.")
        if not decompressor.eof or decompressor.unused_data:
            raise BadInput(f"{file}: was changed: it is {'longer' if decompressor.eof else 'shorter'} than it was.")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isreg() else None
                if stream is None:
                    raise BadInput(f"{file}: {member.name} is not a file, and a record holds files only.")
                yield member.name, stream.read()
    except (tarfile.TarError, lzma.LZMAError, ValueError) as error:
        raise BadInput(f"{file}: is not a record, or was damaged ({error}).") from None
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror or error}.") from None


def _text(manifest: dict) -> str:
    return json.dumps(manifest, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _hash_of(manifest: dict) -> str:
    return hash_text(_text(manifest))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user has no name
        return ""
