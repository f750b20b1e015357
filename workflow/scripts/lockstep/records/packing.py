"""A record: what a results folder proves, in one file, without weights and texts (and see privacy.py).

A record is a tar archive, packed by LZMA, whose first member is a manifest with the sha256 of every other one. The same
results always give the same archive. Repetitions of a row have the same ledger, which LZMA stores once.
"""

import io
import json
import lzma
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jsonschema
import yaml

from lockstep import paths
from lockstep.config.kinds import Kind
from lockstep.errors import BadInput
from lockstep.files import hash_bytes, hash_text, read_object
from lockstep.records.privacy import MARKS, Names
from lockstep.run import journal

MANIFEST = paths.packed_file(Path()).name
FORMAT = 1
ENDING = ".record"
MOST = 5_000_000  # bytes of a record
MOST_UNPACKED = 200_000_000  # bytes; what claims more is refused unread
MOST_OF_CONFIG = 1_000_000  # bytes, since YAML is read slowly
MOST_ALIASES = 20  # of YAML
MEMORY = 200_000_000  # bytes that unpacking may take; what `pack` makes takes a third

# What is packed. All else is left out: weights, texts, logs, errors, pictures, pages.
HERE = Path()  # a results folder, for names relative to it
REQUIRED = [
    paths.config_file(HERE).as_posix(),
    paths.journal_file(HERE).as_posix(),
    (paths.report_folder(HERE) / paths.SUMMARY).as_posix(),
]
OF_RESULTS = (
    *REQUIRED,
    *(paths.manifest_file(HERE).as_posix(), paths.decision_file(HERE, "*").as_posix()),
    *(paths.network_file(HERE).as_posix(), paths.peak_file(HERE).as_posix(), paths.data_file(HERE).as_posix()),
    paths.foretold_file(HERE).as_posix(),
    *(paths.plan_file(HERE, "*").as_posix(), paths.plan_summary_file(HERE, "*").as_posix()),
    *(
        f"{paths.report_folder(HERE)}/{name}"
        for name in (paths.TABLE, paths.RUNS_TABLE, paths.METHODS, paths.INSTALLED)
    ),
)
OF_A_RUN = (*journal.OF_A_RUN, paths.VERDICT, paths.PROFILE, paths.TEST_REPORT)
RUNS = [f"{kind}/{paths.run_name('*', '*', '*')}" for kind in (Kind.TIMED, Kind.TRIAL, Kind.PROFILE)]
PATTERNS = (*OF_RESULTS, *(f"{run}/{name}" for run in RUNS for name in OF_A_RUN))
ERRORS = ".error.json"  # of ranks; they quote programs and data
ARRAYS = ".npz"  # compressed
NUMBERS = (ARRAYS, ".npy")  # arrays, which hold no words
OF_ACCEPTANCE = ("proofs", "times")  # folders of `lockstep accept`, each laid out as results are

NAME = {"type": "string", "maxLength": 200}
HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
SCHEMA = {
    "type": "object",
    "required": ["format", "kind", "made", "command", "commit", "files", "left_out"],
    "additionalProperties": False,
    "properties": {
        "format": {"const": FORMAT},
        "kind": {"enum": ["benchmark", "acceptance"]},
        "made": {"type": "string", "pattern": "^20\\d\\d-[01]\\d-[0-3]\\dT[0-9:+.]+$"},
        "command": {"type": "string"},
        "commit": {"type": ["string", "null"]},
        "files": {
            "type": "object",
            "propertyNames": NAME,
            "additionalProperties": {
                "type": "object",
                "required": ["sha256"],
                "additionalProperties": False,
                "properties": {"sha256": HASH, "before": HASH},
            },
        },
        "left_out": {"type": "object", "propertyNames": NAME, "additionalProperties": HASH},
    },
}


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

    Raises BadInput if it has neither a report nor acceptance, is damaged, or if the record would be larger than MOST.
    """
    contents = {name: (results / name).read_bytes() for name in _chosen(results)}
    told = about(results)
    names = Names(with_host)
    for name, content in contents.items():
        names.learn(name, content)
    files, packed = {}, {}
    for name, content in contents.items():
        packed[name] = content if name.endswith(NUMBERS) else names.clean(name, content)
        files[name] = {"sha256": hash_bytes(packed[name])}
        if packed[name] != content:
            files[name]["before"] = hash_bytes(content)
    left_out = {name: sha256 for name, sha256 in journal.listed(journal.read(results)).items() if name not in contents}
    manifest = {"format": FORMAT, **told, "files": files, "left_out": left_out}
    manifest["command"] = names.text(told["command"])
    content = lzma.compress(_tar({MANIFEST: _text(manifest).encode()} | packed), preset=9)
    if len(content) > MOST:
        raise BadInput(
            f"{results}: its record would have {len(content) / 1e6:.1f} MB, and may have {MOST / 1e6:g}. Most of it are"
            " ledgers, a line for each sample of each step; submit a benchmark of fewer steps (train.max_steps)."
        )
    identity = _hash_of(manifest)[:12]
    return Packed(content, f"{told['made'][:10]}-{identity}{ENDING}", identity, len(packed), dict(names.removed))


def unpack(file: Path, folder: Path) -> Record:
    """Unpack a record into an empty folder. Raises BadInput if the file is not a record, or was changed since."""
    members = _members(file)
    if MANIFEST not in members:
        raise BadInput(f"{file}: is not a record, as it has no {MANIFEST}. `lockstep record submit` makes one.")
    content_of_manifest = members.pop(MANIFEST)
    try:
        manifest = json.loads(content_of_manifest)
        jsonschema.validate(manifest, SCHEMA)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        raise BadInput(f"{file}: its {MANIFEST} is damaged, or of another version of Lockstep.") from None
    files = manifest["files"]
    if differing := sorted(members.keys() ^ files.keys()):
        name = differing[0]
        raise BadInput(f"{file}: was changed: {name} is {'not in it' if name in files else 'not listed'}.")
    for name, content in members.items():
        if hash_bytes(content) != files[name]["sha256"]:
            raise BadInput(f"{file}: was changed: {name} is not as it was packed.")
        if not may_be_packed(name):
            raise BadInput(f"{file}: holds {name}, which no record has.")
        marked = not name.endswith((*NUMBERS, paths.VERDICT)) and any(mark.encode() in content for mark in MARKS)
        if "before" in files[name] and not marked:
            raise BadInput(f"{file}: says that names were removed from {name}, which has none to remove.")
    for name in manifest["left_out"]:
        if may_be_packed(name):
            raise BadInput(f"{file}: leaves out {name}, which a record has.")
    needed = [paths.ACCEPT] if manifest["kind"] == "acceptance" else REQUIRED
    if missing := [name for name in needed if name not in members]:
        raise BadInput(f"{file}: is of {manifest['kind']}, and has no {missing[0]}.")
    asked = members.get(REQUIRED[0], b"")
    if len(asked) > MOST_OF_CONFIG or _aliases(asked) > MOST_ALIASES:
        raise BadInput(f"{file}: its configuration is longer, or has more aliases, than any that Lockstep writes.")
    if sum(_of_arrays(content) for name, content in members.items() if name.endswith(ARRAYS)) > MOST_UNPACKED:
        raise BadInput(f"{file}: its arrays unpack to more than {MOST_UNPACKED // 10**6} MB, which no record does.")
    if manifest["kind"] == "benchmark" and paths.ACCEPT in members:
        raise BadInput(f"{file}: is of a benchmark, and has {paths.ACCEPT}.")
    for name, content in ({MANIFEST: content_of_manifest} | members).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return Record(manifest, folder)


def may_be_packed(name: str) -> bool:
    """Whether a record may have a file of this name: one of those that are packed, in its own folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name in ("", "."):
        return False
    inside = PurePosixPath(*path.parts[1:]) if path.parts[0] in OF_ACCEPTANCE else path
    return name == paths.ACCEPT or (
        not name.endswith(ERRORS)
        and any(len(PurePosixPath(each).parts) == len(inside.parts) and inside.match(each) for each in PATTERNS)
    )


def about(results: Path) -> dict:
    """What a manifest tells of a folder: kind, made, command, commit. Raises BadInput if the folder does not say."""
    return _about_acceptance(results) if (results / paths.ACCEPT).is_file() else _about_benchmark(results)


def _chosen(results: Path) -> list[str]:
    """The names of the files to pack, relative to the results folder. Raises BadInput if there is nothing to share."""
    if (results / paths.ACCEPT).is_file():
        patterns = (paths.ACCEPT, *(f"{part}/{name}" for part in OF_ACCEPTANCE for name in PATTERNS))
    elif (paths.report_folder(results) / paths.SUMMARY).is_file():
        patterns = PATTERNS
    else:
        raise BadInput(
            f"{results}: holds no report and no {paths.ACCEPT}. Name the folder of a finished benchmark, or of"
            " `lockstep accept`."
        )
    files = {file for pattern in patterns for file in results.glob(pattern) if file.is_file()}
    names = sorted(file.relative_to(results).as_posix() for file in files)
    return [name for name in names if not name.endswith(ERRORS)]


def _about_acceptance(results: Path) -> dict:
    found = read_object(results / paths.ACCEPT, ("time", "command", "machine", "proofs", "times", "finished"))
    if not found["machine"]:
        raise BadInput(f"{results}: its {paths.ACCEPT} is of a run that had proven nothing when it ended.")
    told = {"made": found["time"], "command": found["command"], "commit": found["machine"].get("commit")}
    return {"kind": "acceptance"} | told


def _about_benchmark(results: Path) -> dict:
    """The command is that of the last request before the last run."""
    read_object(paths.report_folder(results) / paths.SUMMARY, ("rows", "runs", "headline", "environment"))
    lines = journal.read(results)
    runs = [number for number, line in enumerate(lines) if line["what"] == "run"]
    requests = [line for line in lines[: runs[-1] if runs else None] if line["what"] == "request" and "command" in line]
    if not requests:
        raise BadInput(f"{results}: its journal has no request, so nobody could repeat it. Run the benchmark again.")
    asked = read_object(paths.manifest_file(results), ("time", "commit"))
    return {"kind": "benchmark", "made": asked["time"], "command": requests[-1]["command"], "commit": asked["commit"]}


def _tar(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _members(file: Path) -> dict[str, bytes]:
    """The members by name. Nothing is written, whatever the archive says. Raises BadInput if `pack` did not make it."""
    try:
        if file.stat().st_size > MOST:
            raise BadInput(f"{file}: has {file.stat().st_size / 1e6:.1f} MB, and a record has {MOST / 1e6:g} at most.")
        packed = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror or error}.") from None
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
    try:
        unpacked = decompressor.decompress(packed, MOST_UNPACKED)
        if not decompressor.eof and not decompressor.needs_input:
            raise BadInput(f"{file}: unpacks to more than {MOST_UNPACKED // 10**6} MB, which no record does.")
        if not decompressor.eof or decompressor.unused_data:
            raise BadInput(f"{file}: is not a record, or was cut off or added to.")
        members = {}
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise BadInput(f"{file}: {member.name} is not a plain file, and a record holds nothing else.")
                members[member.name] = archive.extractfile(member).read()
        if _tar(members) != unpacked:  # as with two members of one name, or bytes after the last one
            raise BadInput(f"{file}: is no archive as `lockstep record submit` makes them.")
    except (tarfile.TarError, lzma.LZMAError, ValueError, MemoryError) as error:
        raise BadInput(f"{file}: is not a record, or was damaged ({error}).") from None
    return members


def _aliases(content: bytes) -> int:
    """The aliases in a YAML file. Nested ones can stand for more values than fit into memory."""
    try:
        return sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        return 0  # damaged, which is told where it is read


def _of_arrays(content: bytes) -> int:
    """How many bytes the arrays in a file of NumPy's have once they are unpacked; no more are read of it."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return 0  # damaged, which is told where it is read


def _text(manifest: dict) -> str:
    return json.dumps(manifest, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _hash_of(manifest: dict) -> str:
    return hash_text(_text(manifest))
