"""Test a run's converted model on the test split: classification report, confusion matrix, every prediction."""

import argparse
from pathlib import Path

from lockstep import cli, paths
from lockstep.config import registry
from lockstep.report import evaluation
from lockstep.run import journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, as in results/runs/ddp/n2/rep1")
    arguments = parser.parse_args()
    scores = evaluation.test(arguments.run)
    journal.note_test(arguments.run)
    print((arguments.run / paths.TEST_TEXT).read_text(encoding="utf-8"))
    print(registry.format_scores(scores))


if __name__ == "__main__":
    cli.run(main)
