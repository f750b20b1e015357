"""Share results: pack a results folder into one file that others can check, or check such files.

    lockstep record submit FOLDER     pack it, without weights, texts, and names of machines and folders
    lockstep record check FILE ...    check every hash and every rule. Exit code 1 if one is broken

FOLDER is that of a finished benchmark (results), which must be without breaches, or of `lockstep accept`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lockstep import cli, paths
from lockstep.errors import BadInput, printable
from lockstep.files import atomic_file
from lockstep.proof import fairness
from lockstep.records import checking, packing
from lockstep.records.checking import Checked

TELLS = (
    "It tells: hardware, packages, configuration with the names of classes and files, times, losses, scores, verdicts."
    " Names in free text may have been missed: look through it (tar -xJf) before you share it."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="submit | check")
    submit = commands.add_parser("submit", help="pack a folder", description="Pack a results folder into one file.")
    submit.add_argument("folder", type=Path)
    submit.add_argument("--output", type=Path, metavar="FILE", help="by default named by date and hash")
    submit.add_argument("--with-host", action="store_true", help="keep hosts' names and addresses in it")
    check = commands.add_parser("check", help="check records", description="Check every hash and every rule.")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")
    check.add_argument("--unpack", type=Path, metavar="FOLDER", help="keep its files, as a results folder")
    arguments = parser.parse_args()
    if arguments.command == "submit":
        return pack(arguments.folder, arguments.output, arguments.with_host)
    cli.must_be_new(arguments.unpack, "--unpack")
    if arguments.unpack and len(arguments.files) > 1:
        raise BadInput("--unpack: takes one record at a time")
    return check_all(arguments.files, arguments.unpack)


def pack(folder: Path, output: Path | None, with_host: bool) -> int:
    """Pack a folder, and check the record as others will. One that breaks a rule is not written."""
    cli.must_be_new(output, what="file")
    if paths.packed_file(folder).is_file():
        raise BadInput(f"{folder}: is a record that was unpacked. Share the file that it came from.")
    packed = packing.pack(folder, with_host)
    if not (folder / paths.ACCEPT).is_file():
        refuse(folder, fairness.check(folder).breaches)  # on this machine, where its configuration means what it meant
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        file = Path(temporary) / packed.name
        file.write_bytes(packed.content)
        refuse(folder, checking.check(file).breaches)
    output = output or Path(packed.name)
    if output.exists():
        raise BadInput(f"{output}: exists already; the same results give the same name. Name another by --output.")
    with atomic_file(output) as temporary:
        temporary.write_bytes(packed.content)
    removed = ", ".join(f"{times} times {mark}" for mark, times in packed.removed.items())
    print(f"{output}: record {packed.identity}, {packed.files} files in {len(packed.content) / 1e6:.2f} MB")
    print(f"Names that were removed: {removed or 'none was found'}. {TELLS}")
    print(f"Anyone checks it by: lockstep record check {output}")
    return 0


def refuse(folder: Path, breaches: list[tuple[str, str]]) -> None:
    """Raise BadInput if there are breaches."""
    if breaches:
        more = f", and {len(breaches) - 1} more" if len(breaches) > 1 else ""
        listed = "" if (folder / paths.ACCEPT).is_file() else f": lockstep check {folder} lists them"
        raise BadInput(f"{folder}: breaks the rules ({': '.join(breaches[0])}{more}), so it can't be a record{listed}")


def check_all(files: list[Path], keep: Path | None) -> int:
    """Check records, and print what each says; a damaged one does not keep the others from it."""
    broken, damaged = 0, 0
    for file in files:
        try:
            checked = checking.check(file, keep)
        except BadInput as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            damaged += 1
            continue
        for line in told(checked):
            print(printable(line))
        broken += bool(checked.breaches)
    return 2 if damaged else int(bool(broken))


def told(checked: Checked):
    """What a record says, in lines."""
    manifest, machine = checked.manifest, checked.machine
    commit = str(manifest["commit"] or "unknown")[:10]
    yield f"{checked.file}: record {checked.identity} of {manifest['made'][:10]}, commit {commit}"
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    yield f"  {machine['cpu']}, {machine['cores']} cores, {gpus}; PyTorch {machine['packages']['torch']}"
    yield f"  {checked.proven} verdicts say: the same model"
    if checked.is_benchmark:
        yield f"  {len(checked.runs)} runs of {len({run.row for run in checked.runs})} rows; {fastest(checked)}"
    yield f"  it was made by: {manifest['command']}"
    for where, breach in checked.breaches:
        yield f"  {where}: {breach}"
    many = {0: "no breach", 1: "1 breach"}.get(len(checked.breaches), f"{len(checked.breaches)} breaches")
    without = sum("before" in file for file in manifest["files"].values())
    files = len(manifest["files"])
    yield f"  all {files} files are as they were packed, {without} of them with names removed; {many}"


def fastest(checked: Checked) -> str:
    """The answer of a benchmark's record, computed from its runs."""
    if not checked.fastest:
        return "no proven row of the closed division has undisturbed runs"
    ratio = checked.speedup
    if ratio is None:
        return f"{checked.fastest} is the fastest of those that are proven"
    interval = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.kind else ""
    times = f"{ratio.value:.2f}{interval} times as fast as {checked.baseline}"
    return f"{checked.fastest} is the fastest of those that are proven, {times}"


if __name__ == "__main__":
    cli.run(main)
