"""python -m catalogue: prove every row of config/accept.yaml for several kinds of models, and keep the verdicts.

    python -m catalogue [--minutes N] [--write] [MODEL ...]
    python -m catalogue --write --add results/accept/accept.json ...

MODEL: bert, llama, convolution, unet; all without any. --write puts the verdicts into docs/catalogue.csv, and the
newest ones into docs/catalogue.md. --add takes those of `lockstep accept` elsewhere, as of the nightly run. The exit
code is 1 if a verdict is wrong that the kept ones do not have as wrong already, for the same versions, or if there was
no time for a proof.
"""

import argparse
import csv
from pathlib import Path

import yaml

from benchmarks.common import PROJECT, between_marks
from catalogue.proving import found_in, not_reached, prove
from catalogue.table import FIELDS, MODELS, PAGE, ROWS, key_of, lines_of, markdown, merged
from lockstep import cli
from lockstep.config import registry
from lockstep.files import write_json
from lockstep.proof.verdicts import WRONG

DATABASE = PROJECT / "docs" / "catalogue.csv"
MARKS = ("<!-- catalogue: begin -->", "<!-- catalogue: end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--minutes", type=float, default=60.0, help="the time for each model")
    parser.add_argument("--results", type=Path, default=Path("results/catalogue"), help="where trials are trained")
    parser.add_argument("--add", nargs="+", default=[], type=Path, metavar="FILE", help="accept.json of other machines")
    parser.add_argument("--write", action="store_true", help="write docs/catalogue.csv and docs/catalogue.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if arguments.add and arguments.what:
        parser.error("--add takes what was proven, and proves nothing: leave out the models")
    known = [key_of(line) for line in read() if line["verdict"] in WRONG]
    files, lines = list(arguments.add), [line for file in arguments.add for line in lines_of(file)]
    if arguments.write and lines:
        write(lines)
    for model in () if arguments.add else arguments.what or MODELS:
        configs = [PROJECT / "config" / name for name in MODELS[model].configs]
        if MODELS[model].normalises_batches:
            configs.append(over_all_ranks(arguments.results / f"{model}.yaml"))
        files.append(prove(arguments.results / model, model, arguments.minutes, configs))
        proven = lines_of(files[-1])
        if arguments.write:  # at once, as the next model takes an hour
            write(proven)
        lines += proven
    wrong = [line for line in lines if line["verdict"] in WRONG]
    new = [line for line in wrong if key_of(line) not in known]
    print(f"{len(lines)} verdicts, {len(wrong)} of them wrong, {len(wrong) - len(new)} of these as is known", end="")
    print(*("", *new), sep="\n  ")
    left = [f"{file}: {what}" for file in files for what in not_reached(found_in(file))]
    if left:
        print("there was no time for these; give more --minutes:", *left, sep="\n  ")
    return bool(new or left)


def over_all_ranks(file: Path) -> Path:
    """Write a file that has each row take the statistics of batch normalisation over all ranks, where it can.

    With those of each device's share a row trains another model by design, and its verdict tells nothing else.
    """
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"]
    options = {name: registry.literals(row["strategy"])["SYNCS_BATCH_NORM"] for name, row in rows.items() if row}
    able = {name: rows[name] | dict.fromkeys(options[name], True) for name in options if options[name]}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"rows": able})  # JSON is YAML
    return file


def write(new: list[dict[str, str]]) -> None:
    """Add verdicts to those that are kept, and write the page anew."""
    lines = merged(read(), new)
    with DATABASE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    between_marks(PAGE, MARKS, markdown(lines))


def read() -> list[dict[str, str]]:
    """The verdicts that are kept."""
    if not DATABASE.is_file():
        return []
    with DATABASE.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


if __name__ == "__main__":
    cli.run(main)
