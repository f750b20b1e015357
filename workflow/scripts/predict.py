"""Put texts through every row's trained model, or through one model, and print what each says."""

import os
import sys
from pathlib import Path

from lockstep import cli, paths
from lockstep.config.hardware import selection
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.report import evaluation
from lockstep.run import staleness
from lockstep.terminal import print_table


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, help="one converted model's folder, as in results/runs/ddp/n2/rep1/model")
    parser.add_argument("--text", action="append", help="a text to predict; again for more")
    arguments = parser.parse_args()
    if any(not text.strip() for text in arguments.text or ()):
        raise BadInput("--text: the text is empty.")
    if arguments.model:
        if not arguments.text:
            raise BadInput('--model needs a text too, as in --text "今天真开心"')
        answers = evaluation.predict(arguments.model, arguments.text)
        lines = [[text, label, f"{chance:.3f}"] for text, (label, chance) in zip(arguments.text, answers, strict=True)]
        print_table(["text", "prediction", "probability"], lines)
        return
    config, results = cli.configuration(arguments, finished=True), arguments.results
    os.environ.update(selection(config.hardware.gpus))
    labels = read_json(paths.require(paths.data_file(results), "prepare.py"))["labels"]
    chosen = [(text, "") for text in arguments.text or ()] or evaluation.choose_texts(
        config.predict, paths.data_folder(results), labels
    )
    texts, header, columns = [text for text, _ in chosen], ["text", "truth"], []
    for row in config.rows.values():
        folder = results / row.folder(1) / paths.MODEL
        if not (folder / "config.json").is_file():
            continue
        if why := staleness.folder(config, row, results):
            print(f"{row.name} is left out, as its model was {why}", file=sys.stderr)
        else:
            header.append(row.name)
            columns.append([label for label, _ in evaluation.predict(folder, texts)])
    if not columns:
        raise BadInput(f"{results / paths.RUNS}: no row has a converted model of these settings yet. Train one first.")
    lines = [[text, truth, *answers] for (text, truth), *answers in zip(chosen, *columns, strict=True)]
    print_table(header, lines)
    if not arguments.text:  # those of a moment are not the report's
        file = paths.predictions_file(results)
        evaluation.write_csv(file, header, lines)
        print(f"also in {file}")


if __name__ == "__main__":
    cli.run(main)
