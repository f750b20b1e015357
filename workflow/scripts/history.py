"""Write a page of all kept results: each row's times over commits, and where they changed."""

import argparse
import sys
from pathlib import Path

from lockstep import cli, paths
from lockstep.files import write_text
from lockstep.report import history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--history", type=Path, default=paths.HISTORY, help="the folder of kept results")
    folder = parser.parse_args().history
    kept, damaged = history.read(folder)
    for message in damaged:
        print(f"warning: {message}", file=sys.stderr)
    for name, points in history.rows(kept).items():
        for point in points:
            if point.finding == "change":
                print(f"{name}: {point.percent} in {point.kept.name}, commit {point.kept.commit}")
    write_text(folder / paths.HISTORY_PAGE, history.page(kept))
    print(f"page: {folder / paths.HISTORY_PAGE}")


if __name__ == "__main__":
    cli.run(main)
