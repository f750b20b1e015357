"""Check a results folder against the rules of a fair run, and list every breach. Exit code 1 if there is one."""

import argparse
from pathlib import Path

from lockstep import cli, paths
from lockstep.proof import fairness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=paths.RESULTS, help="the folder of all results")
    checked = fairness.check(parser.parse_args().results)
    for where, what in checked.breaches:
        print(f"{where}: {what}")
    print(f"{checked.runs} runs of {checked.rows} rows: {len(checked.breaches) or 'no'} breaches")
    print("What files can't tell: whether the journal was rewritten with them, and what no watcher sees.")
    return bool(checked.breaches)


if __name__ == "__main__":
    cli.run(main)
