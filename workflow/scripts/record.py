"""Share results: pack a results folder into one file that others can check, or check such files.

    lockstep record submit FOLDER     pack it, without weights, texts, and names of machines, users and folders
    lockstep record check FILE ...    check every hash and every rule. Exit code 1 if one is broken

FOLDER is that of a finished benchmark (results), which must be without breaches, or of `lockstep accept`.
"""

import argparse
import tempfile
from pathlib import Path

from lockstep import cli
from lockstep.errors import BadInput
from lockstep.files import atomic_file
from lockstep.records import checking, packing

TELLS = (
    "It tells: hardware, packages, configuration with the names of classes and files, times, losses, scores, verdicts."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="submit | check")
    submit = commands.add_parser("submit", help="pack a folder", description="Pack a results folder into one file.")
    submit.add_argument("folder", type=Path)
    submit.add_argument(
        "--output", type=Path, metavar="FILE", help="the record's file; by default date and hash name it"
    )
    submit.add_argument("--with-host", action="store_true", help="keep the host's name in it")
    check = commands.add_parser(
        "check", help="check records", description="Check every hash and every rule of records."
    )
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")
    check.add_argument("--unpack", type=Path, metavar="FOLDER", help="keep its files, as a results folder")
    arguments = parser.parse_args()
    if arguments.command == "submit":
        return pack(arguments.folder, arguments.output, arguments.with_host)
    cli.must_be_new(arguments.unpack, "--unpack")
    if arguments.unpack and len(arguments.files) > 1:
        raise BadInput("--unpack: takes one record at a time")
    broken = [file for file in arguments.files if not is_sound(file, arguments.unpack)]
    return bool(broken)


def pack(folder: Path, output: Path | None, with_host: bool) -> int:
    """Pack a folder, and check the record as others will. One that breaks a rule is not written."""
    cli.must_be_new(output, what="file")
    packed = packing.pack(folder, with_host)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        file = Path(temporary) / packed.name
        file.write_bytes(packed.content)
        breaches = checking.check(file).breaches
    if breaches:
        more = f", and {len(breaches) - 1} more" if len(breaches) > 1 else ""
        where, what = breaches[0]
        raise BadInput(f"{folder}: breaks the rules ({where}: {what}{more}), so it can't be a record: lockstep check")
    output = output or Path(packed.name)
    cli.must_be_new(output, what="file")
    with atomic_file(output) as temporary:
        temporary.write_bytes(packed.content)
    removed = ", ".join(f"{times} times {mark}" for mark, times in packed.removed.items())
    print(f"{output}: record {packed.identity}, {packed.files} files in {len(packed.content) / 1e6:.2f} MB")
    print(f"Names that were removed: {removed or 'none was found'}. {TELLS}")
    print(f"Anyone checks it by: lockstep record check {output}")
    return 0


def is_sound(file: Path, keep: Path | None = None) -> bool:
    """Check a record, print what it says, and keep its files in a folder if one is named."""
    checked = checking.check(file, keep)
    manifest, machine = checked.manifest, checked.machine
    commit = str(manifest["commit"] or "unknown")[:10]
    print(f"{file}: record {checked.identity} of {(manifest['made'] or 'an unknown day')[:10]}, commit {commit}")
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    print(f"  {machine.get('cpu')}, {machine.get('cores')} cores, {gpus}; PyTorch {machine['packages'].get('torch')}")
    if checked.is_benchmark:
        for line in checked.report["headline"]:
            print(f"  {line}")
    else:
        verdicts = [verdict["proof"] for verdict in checked.report["proofs"].values()]
        print("  proofs: " + ", ".join(f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(verdicts)))
    print(f"  repeat it by: {manifest['command']}")
    for where, breach in checked.breaches:
        print(f"  {where}: {breach}")
    many = {0: "no breach", 1: "1 breach"}.get(len(checked.breaches), f"{len(checked.breaches)} breaches")
    without = sum("before" in file for file in manifest["files"].values())
    print(f"  all {len(manifest['files'])} files are as they were packed, {without} of them with names removed; {many}")
    return not checked.breaches


if __name__ == "__main__":
    cli.run(main)
