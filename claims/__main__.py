"""make claims: what five public articles say of training strategies, and whether it holds on this machine.

    python -m claims [--data FILE] [--repeats N] [--write] [NAME ...]

Names are those of the functions in claims/claims.py that need no rows: workers, set_epoch, ...; without any all claims
are measured, by training the rows of config/claims.yaml.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

from benchmarks.common import PROJECT, between_marks, markdown, refuse
from claims.claims import CLAIMS, HERE
from claims.runs import Runs, train
from lockstep.rank import environment
from lockstep.terminal import print_table

PAGE = PROJECT / "docs" / "claims.md"
MARKS = ("<!-- make claims: begin -->", "<!-- make claims: end -->")
HEADER = ["claim", "by", "verdict", "measured", "to measure it again"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alone = {claim.measure.__name__: claim for claim in CLAIMS if claim.command.startswith(HERE.format(""))}
    parser.add_argument("what", nargs="*", help="names as above; all claims without")
    parser.add_argument("--data", type=Path, help="texts to train on; the embedded corpus without")
    parser.add_argument("--repeats", type=int, default=5, help="how often each row is trained")
    parser.add_argument("--write", action="store_true", help="put the table into docs/claims.md too")
    arguments = parser.parse_args()
    refuse(parser, arguments, "claim", alone, "repeats", PAGE)
    chosen = [alone[name] for name in arguments.what] or CLAIMS
    with tempfile.TemporaryDirectory() as folder:
        done = Runs({}, {}, {}, {})
        if not arguments.what:
            data = arguments.data.resolve() if arguments.data else None
            done = train(Path(folder), data, arguments.repeats)
        lines = [[claim.said, claim.by, *claim.judge(done), f"`{claim.command}`"] for claim in chosen]
    print_table(HEADER[:-1], [line[:-1] for line in lines])
    if arguments.write:
        between_marks(PAGE, MARKS, f"{_conditions(arguments)}\n\n{markdown(HEADER, lines)}")


def _conditions(arguments: argparse.Namespace) -> str:
    here = environment.describe()
    machine = ", ".join(here["gpus"]) or f"{here['cores']} CPU cores ({here['cpu']})"
    data = "texts of its user's" if arguments.data else "the embedded corpus"
    return (
        f"On {machine}, torch {here['packages']['torch']}; {data}, {arguments.repeats} runs of each row, intervals of"
        f" 95 %; {datetime.datetime.now(datetime.UTC).date()}."
    )


if __name__ == "__main__":
    main()
