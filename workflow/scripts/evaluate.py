"""Convert a run's checkpoint and test the model, as convert.py and test.py do one after the other, in one process."""

import argparse
from pathlib import Path

from lockstep import checkpoint, cli, evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, as in results/runs/ddp/n2/rep1")
    run = parser.parse_args().run
    checkpoint.convert(run, run / "model")
    scores = evaluation.test(run)
    print(f"{scores['support']} texts, accuracy {scores['accuracy']:.4f}, macro-F1 {scores['macro_f1']:.4f}")


if __name__ == "__main__":
    cli.run(main)
