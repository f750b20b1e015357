"""Turn a run's own checkpoint into a plain Hugging Face folder: model.safetensors, config, tokenizer."""

import argparse
from pathlib import Path

from lockstep import cli, paths
from lockstep.proof import conversion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, as in results/runs/ddp/n2/rep1")
    arguments = parser.parse_args()
    model = arguments.run / paths.MODEL
    weights = conversion.convert(arguments.run, model)
    print(f"{model}: equal to the live weights, value by value (sha256 {weights[:16]})")


if __name__ == "__main__":
    cli.run(main)
