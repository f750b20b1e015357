"""Decide after a block of runs whether another block follows, and with which rows (`repeats: auto`)."""

from lockstep import cli
from lockstep.analysis import blocks
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.paths import decision_file
from lockstep.proof import verdicts
from lockstep.run import journal


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--block", type=int, required=True, help="the number of blocks so far")
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    if config.repeats != "auto":
        raise BadInput(f"repeats: is {config.repeats}, so there is nothing to decide. Set it to auto.")
    if arguments.block not in config.repetitions:
        raise BadInput(f"--block {arguments.block}: blocks are numbered from 1 to {config.repetitions[-1]}.")
    left_out = verdicts.not_compared(config, arguments.results)
    decided = blocks.decide(config, arguments.results, arguments.block, left_out)
    file = decision_file(arguments.results, arguments.block)
    write_json(file, decided)
    journal.note(arguments.results, "decision", file.parent, (decision_file(arguments.results, "*").name,))
    width = "not known" if decided["width"] is None else f"{100 * decided['width']:.1f} % wide"
    spent = f"{decided['seconds']:.0f} of {config.budget:g} s are spent"
    follows = (
        f"next: {', '.join(decided['rows'])}, about {decided['next_seconds']:.0f} s"
        if decided["rows"]
        else f"no more blocks ({decided['why']})"
    )
    print(f"after block {arguments.block}: the widest interval between the fastest is {width}; {spent}; {follows}")


if __name__ == "__main__":
    cli.run(main)
