"""Test a model: classification report, confusion matrix, every prediction.

    python workflow/scripts/test.py results/runs/ddp/n2/rep1                         a run's model, on the test split
    python workflow/scripts/test.py results/runs/ddp/n2/rep1 --snapshot 3            its model at the end of epoch 3
    python workflow/scripts/test.py --model FOLDER [--weights FILE] --data FILE      any classifier, on any samples

FOLDER is a model in the format of transformers or Lockstep; FILE is somebody's checkpoint of that model (convert.py
lists the formats). All samples of --data are tested; --set data.text=..., data.label=... name its columns.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from lockstep import cli, evaluation, paths
from lockstep.config import registry
from lockstep.errors import BadInput
from lockstep.proof import conversion
from lockstep.run import journal


def main() -> None:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder, such as results/runs/ddp/n2/rep1")
    cli.add_snapshot(parser)
    cli.add_model(parser)
    parser.add_argument("--data", type=Path, help="a file of texts with labels, or a folder of images by class")
    parser.add_argument("--output", type=Path, help="a folder for the report and all predictions; by default none")
    arguments = parser.parse_args()
    if bool(arguments.run) == bool(arguments.model):
        raise BadInput("Give a run's folder, or --model FOLDER with --data FILE.")
    if arguments.snapshot is not None and not arguments.run:
        raise BadInput("--snapshot: give the folder of the run that kept it.")
    if arguments.run:
        folder = arguments.run
        if arguments.snapshot is not None:
            folder = conversion.converted(cli.snapshot(arguments.run, arguments.snapshot))
        scores = evaluation.test(folder)
        journal.note_test(folder)
        print((folder / paths.TEST_TEXT).read_text(encoding="utf-8"))
    else:
        scores = _test_file(arguments)
    print(registry.format_scores(scores))


def _test_file(arguments: argparse.Namespace) -> dict:
    if not arguments.data:
        raise BadInput("--model needs --data FILE: the samples to test it on.")
    if not arguments.data.exists():
        raise BadInput(f"--data: {arguments.data} does not exist.")
    named = replace(cli.configuration(arguments).data, path=str(arguments.data), url=None, hub=None, files={})
    with (
        tempfile.TemporaryDirectory() as temporary,
        evaluation.of_weights(arguments.model, arguments.weights, cli.labels(arguments)) as stored,
    ):
        folder = arguments.output or Path(temporary)
        scores = evaluation.test_file(stored, named, folder)
        print((folder / paths.TEST_TEXT).read_text(encoding="utf-8"))
    if arguments.output:
        print(f"all predictions: {arguments.output / paths.TEST_PREDICTIONS}")
    return scores


if __name__ == "__main__":
    cli.run(main)
