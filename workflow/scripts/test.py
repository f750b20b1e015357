"""Test a run's converted model on the test split: classification report, confusion matrix, every prediction."""

from pathlib import Path

from lockstep import cli, evaluation


def main() -> None:
    parser = cli.parser(__doc__, configured=False)
    parser.add_argument("run", type=Path, help="the run's folder, as in results/runs/ddp/n2/rep1")
    arguments = parser.parse_args()
    scores = evaluation.test(arguments.run / "model", arguments.results / "data", arguments.run / "test")
    print((arguments.run / "test" / "report.txt").read_text(encoding="utf-8"))
    print(f"{scores['support']} texts, accuracy {scores['accuracy']:.4f}, macro-F1 {scores['macro_f1']:.4f}")


if __name__ == "__main__":
    cli.run(main)
