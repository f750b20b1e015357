"""Compare results folders by row: the ratio of training times to the first folder's, and what else differs."""

import argparse
from pathlib import Path

from lockstep import cli
from lockstep.errors import BadInput
from lockstep.files import write_text
from lockstep.report import comparison, comparison_page
from lockstep.report.words import say
from lockstep.terminal import print_table

TITLE = f"<title>{say('compare_title').en}</title>".encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("A", type=Path, help="a results folder with a report")
    parser.add_argument("B", type=Path, nargs="+", help="other folders, each of which is compared with A")
    parser.add_argument(
        "--across",
        action="append",
        default=[],
        choices=comparison.KINDS,
        help="compare although this differs; may be repeated",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the comparison as a page")
    arguments = parser.parse_args()
    if arguments.page:
        refuse_what_is_no_page(arguments.page)
    compared = [comparison.compare(arguments.A, other, set(arguments.across)) for other in arguments.B]
    print(
        "An interval covers how much runs of one session vary, not what differs between two: repeat both to see that."
    )
    for other, result in zip(arguments.B, compared, strict=True):
        if len(compared) > 1:
            print(f"A: {arguments.A}; B: {other}")
        if result.copied:
            print(say("compare_copied", first=arguments.A, other=other).en)
        else:
            tell(result)
    if arguments.page:
        write_text(arguments.page, comparison_page.page([arguments.A, *arguments.B], compared))
        print(f"page: {arguments.page}")


def refuse_what_is_no_page(file: Path) -> None:
    """Raise BadInput if the page would overwrite a file that is not such a page."""
    if file.is_dir():
        raise BadInput(f"--page: {file} is a folder; name a file in it, as in {file / 'compared.html'}")
    if file.exists() and TITLE not in file.read_bytes():
        raise BadInput(f"--page: {file} exists already, and is not a page of compare.py. Choose another name.")


def tell(compared: comparison.Comparison) -> None:
    """Print the comparison of two folders."""
    lines = []
    for line in compared.lines:
        ratio = line.ratio
        interval = f"{ratio.low:.3g} to {ratio.high:.3g}" if ratio.kind else ""
        verdict = ""
        if not ratio.kind:
            verdict = "one run says nothing"
        elif not ratio.distinct:
            verdict = "not distinguishable"
        differs = "; ".join(f"{kind}: {difference}" for kind, difference in line.differs.items())
        times = [f"{seconds:.3g}" for seconds in line.seconds]
        lines.append([line.row, *times, f"{ratio.value:.3g}", interval, verdict, differs])
    print_table(["row", "A s", "B s", "B/A", "interval", "difference", "not the same"], lines)
    for name in compared.alone:
        print(f"{name}: only one of the folders has it")
    for difference in compared.environment:
        print(f"differs: {difference}")


if __name__ == "__main__":
    cli.run(main)
