"""Predict texts or images with every row's trained model, or with one model, and print the predictions."""

import os
import re
import sys
from pathlib import Path

from lockstep import cli, evaluation, paths
from lockstep.analysis import staleness
from lockstep.config import registry
from lockstep.config.machine import selection
from lockstep.errors import BadInput
from lockstep.files import read_json, write_csv
from lockstep.model import models
from lockstep.proof import conversion
from lockstep.terminal import print_table


def main() -> None:
    parser = cli.parser(__doc__)
    cli.add_snapshot(parser)
    cli.add_model(parser)
    parser.add_argument("--text", action="append", help="a text to predict; may be repeated")
    parser.add_argument("--image", action="append", help="the file of an image to predict; may be repeated")
    parser.add_argument("--output", type=Path, help="a folder for predicted masks; by default results/predict")
    arguments = parser.parse_args()
    drawings = arguments.output or paths.predictions_file(arguments.results).parent
    given = arguments.text or arguments.image
    kind = "image" if arguments.image else "text"
    if arguments.text and arguments.image:
        raise BadInput("--text and --image: give only one of them; a model takes either texts or images.")
    if any(not text.strip() for text in arguments.text or ()):
        raise BadInput("--text: the text is empty.")
    if (arguments.weights or arguments.labels) and not arguments.model:
        raise BadInput("--weights and --labels: name the folder of the model that they belong to by --model.")
    if arguments.snapshot is not None and arguments.model:
        raise BadInput("--snapshot: it selects a model of the rows' runs, but --model names another. Give one of them.")
    if arguments.model:
        if not given:
            raise BadInput('--model needs a text or an image too, as in --text "今天真开心" or --image my.png')
        with evaluation.of_weights(arguments.model, arguments.weights, cli.labels(arguments)) as stored:
            task = evaluation.task_of(stored)
            chosen = _given(task, given, kind)
            answers = evaluation.predict(stored, [sample for *_, sample in chosen], task)
        lines = [
            [shown, label, "" if chance is None else f"{chance:.3f}"]
            for (shown, *_), (label, chance, *_) in zip(chosen, answers, strict=True)
        ]
        print_table([task.INPUT, "prediction", "probability"], lines)
        _draw(chosen, answers, drawings)
        return
    config, results = cli.configuration(arguments, finished=True), arguments.results
    os.environ.update(selection(config.hardware.gpus))
    paths.require(paths.data_file(results), "prepare.py")
    prepared = read_json(paths.data_file(results)).get("task", config.task)
    if prepared != config.task:
        raise BadInput(
            f"{results}: its data is prepared for {prepared}, but this configuration is for {config.task}. Name the"
            " configuration that it was made with by --config FILE."
        )
    task = registry.load_task(config.task)(config.train)
    chosen = _given(task, given, kind) if given else task.choose(config.predict, paths.data_folder(results))
    inputs, header, columns = [sample for *_, sample in chosen], [task.INPUT, "truth"], []
    for row in config.rows.values():
        run = results / row.folder(1)
        if arguments.snapshot is not None:
            if arguments.snapshot not in paths.snapshots(run):
                continue
            run = conversion.converted(paths.snapshot(run, arguments.snapshot))
        folder = run / paths.MODEL
        if not models.is_stored(folder):
            continue
        if why := staleness.folder(config, row, results):
            print(f"{row.name} is left out, as its model was {why}", file=sys.stderr)
        else:
            header.append(row.name)
            answers = evaluation.predict(folder, inputs, task)
            columns.append([answer for answer, *_ in answers])
            _draw(chosen, answers, drawings, f".{row.name}")
    if not columns and arguments.snapshot is not None:
        raise BadInput(
            f"--snapshot {arguments.snapshot}: no row with these settings kept a model at the end of that epoch."
        )
    if not columns:
        raise BadInput(f"{results / paths.RUNS}: no row has a converted model with these settings. Train one first.")
    lines = [[shown, truth, *answers] for (shown, truth, _), *answers in zip(chosen, *columns, strict=True)]
    print_table(header, lines)
    if not given and arguments.snapshot is None:  # only predictions of held-out inputs belong to the report
        file = paths.predictions_file(results)
        write_csv(file, header, lines)
        print(f"also in {file}")


def _draw(chosen: list[tuple], answers: list[tuple], folder: Path, of: str = "") -> None:
    """Write predicted masks into `folder`, each named after its input and `of`, and print where."""
    files = []
    for number, ((shown, *_), (*_, drawn)) in enumerate(zip(chosen, answers, strict=True), 1):
        if isinstance(drawn, bytes):
            name = re.sub(r"[^\w.-]+", "-", Path(shown).stem)
            files.append(folder / f"{number}-{name}{of}.png")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            files[-1].write_bytes(drawn)
    if files:
        print(f"masks: {files[0]}{f' and {len(files) - 1} more' if files[1:] else ''}")


def _given(task, inputs: list[str], kind: str) -> list[tuple[str, str, object]]:
    if kind != task.INPUT:
        raise BadInput(f"--{kind}: this model takes no {kind}; give it one {task.INPUT} or more, {task.EXAMPLE}.")
    return task.given(inputs)


if __name__ == "__main__":
    cli.run(main)
