"""Compare two results folders row by row: B's training time over A's, and what else differed."""

import argparse
from pathlib import Path

from lockstep import cli
from lockstep.report import comparison
from lockstep.terminal import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("A", type=Path, help="a results folder with a report")
    parser.add_argument("B", type=Path, help="another one")
    parser.add_argument(
        "--across",
        action="append",
        default=[],
        choices=comparison.KINDS,
        help="compare although this differs; again for more",
    )
    arguments = parser.parse_args()
    compared = comparison.compare(arguments.A, arguments.B, set(arguments.across))
    lines = []
    for line in compared.lines:
        ratio = line.ratio
        interval = f"{ratio.low:.3g} to {ratio.high:.3g}" if ratio.kind else ""
        verdict = "one run says nothing" if not ratio.kind else "" if ratio.distinct else "not distinguishable"
        differs = "; ".join(f"{kind}: {what}" for kind, what in line.differs.items())
        times = [f"{seconds:.3g}" for seconds in line.seconds]
        lines.append([line.row, *times, f"{ratio.value:.3g}", interval, verdict, differs])
    print(
        "An interval covers how much runs of one session vary, not what differs between two: repeat both to see that."
    )
    print_table(["row", "A s", "B s", "B/A", "interval", "difference", "not the same"], lines)
    for name in compared.alone:
        print(f"{name}: only one of both has it")
    for what in compared.environment:
        print(f"differs: {what}")


if __name__ == "__main__":
    cli.run(main)
