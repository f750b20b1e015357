"""Read the data, split it, tokenise it once, and write the initial weights: everything that all runs share."""

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, data, files, metrics, models


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    folder = arguments.results / "data"
    arguments.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.results, prefix=".rows.") as work:  # there, as it may be large
        splits, summary = data.split(config.data, arguments.results / "download", Path(work))
        tokenizer = models.make_tokenizer(config.model, data.texts(splits["train"]), config.data.max_length)
        model = models.initialise(config.model, tokenizer, summary["labels"], config.data.max_length, config.train.seed)
        (folder / "data.json").unlink(missing_ok=True)  # written last: without it the folder is not complete
        with files.atomic_folder(folder / "dataset") as temporary:
            summary |= data.store(splits, tokenizer, temporary)
    with files.atomic_folder(folder / "tokenizer") as temporary:
        tokenizer.save_pretrained(temporary)
    with files.atomic_folder(folder / "weights") as temporary:
        model.save_pretrained(temporary)
    shutil.rmtree(folder / "plan", ignore_errors=True)  # plans are made for a data set
    summary |= {
        "pad_id": tokenizer.pad_token_id or 0,
        "model": config.model.name,
        "parameters": model.num_parameters(),
        "shape": asdict(metrics.Shape.of(model)),
        "weights": models.hash_weights(models.load(folder / "weights").state_dict()),
    }
    files.write_json(folder / "data.json", summary)

    texts = ", ".join(f"{part['texts']} {name}" for name, part in summary["splits"].items())
    print(
        f"{summary['source']}: {summary['rows_read']} rows, {summary['duplicates_removed']} duplicates removed; {texts}"
    )
    print(f"{config.model.name}: {summary['parameters']:,} parameters, {len(tokenizer):,} tokens in the vocabulary")


if __name__ == "__main__":
    cli.run(main)
