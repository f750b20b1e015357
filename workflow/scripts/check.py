"""Check a results folder against the rules of a fair comparison, and list every breach. Exit code 1 if there is one."""

import argparse
from pathlib import Path

from lockstep import cli, paths
from lockstep.proof import fairness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=paths.RESULTS, help="the folder of all results")
    checked = fairness.check(parser.parse_args().results)
    for where, breach in checked.breaches:
        print(f"{where}: {breach}")
    runs = "1 run" if checked.runs == 1 else f"{checked.runs} runs"
    rows = "1 row" if checked.rows == 1 else f"{checked.rows} rows"
    breaches = "1 breach" if len(checked.breaches) == 1 else f"{len(checked.breaches) or 'no'} breaches"
    print(f"{runs} of {rows}: {breaches}")
    print(
        "Files can't show whether the journal was rewritten with them, nor disturbances that the watcher does not see."
    )
    return bool(checked.breaches)


if __name__ == "__main__":
    cli.run(main)
