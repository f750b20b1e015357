"""Read the data, split it, tokenise it once, and write the initial weights: everything that all runs share.

All of it is made aside first, and takes the place of what is there at the end: a failure leaves what is there.
"""

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, files
from lockstep.data import prepare
from lockstep.model import metrics, models
from lockstep.run import journal

PARTS = ("dataset", "tokenizer", "weights")


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    folder = arguments.results / "data"
    arguments.results.mkdir(parents=True, exist_ok=True)
    aside = tempfile.TemporaryDirectory(dir=arguments.results, prefix=".data.")  # there, as it may be large
    with files.named_when_full(folder), aside as work:
        made = Path(work) / "data"
        splits, summary = prepare.split(config.data, arguments.results / "download", Path(work))
        tokenizer = models.make_tokenizer(config.model, prepare.texts(splits["train"]), config.data.max_length)
        model = models.initialise(
            config.model, tokenizer, summary["labels"], config.data.max_length, config.train.seed, summary["notes"]
        )
        with files.atomic_folder(made / "dataset") as temporary:
            summary |= prepare.store(splits, tokenizer, temporary)
        with files.atomic_folder(made / "tokenizer") as temporary:
            tokenizer.save_pretrained(temporary)
        with files.atomic_folder(made / "weights") as temporary:
            model.save_pretrained(temporary)
        summary |= {
            "pad_id": tokenizer.pad_token_id or 0,
            "model": config.model.name,
            "parameters": model.num_parameters(),
            "shape": asdict(metrics.Shape.of(model)),
            "weights": models.hash_weights(models.load(made / "weights").state_dict()),
            "asked": config.data_settings,
            "files": files.inventory(made, PARTS),
        }
        replace(folder, made)
    files.write_json(folder / "data.json", summary)
    journal.note(arguments.results, "preparation", folder, ("data.json",))
    files.write_text(folder / "ready" / config.data_key, f"{summary['hash']}\n")

    texts = ", ".join(f"{part['texts']} {name}" for name, part in summary["splits"].items())
    print(
        f"{summary['source']}: {summary['rows_read']} rows, {summary['duplicates_removed']} duplicates removed; {texts}"
    )
    for note in summary["notes"]:
        print(note)
    print(f"{config.model.name}: {summary['parameters']:,} parameters, {len(tokenizer):,} tokens in the vocabulary")


def replace(folder: Path, made: Path) -> None:
    """Put what was made into its place. Without data.json and ready/, which come last, the folder is not complete."""
    folder.mkdir(exist_ok=True)
    (folder / "data.json").unlink(missing_ok=True)
    for part in ("ready", "plan", *PARTS):  # plans are made for a data set
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in PARTS:
        (made / part).replace(folder / part)


if __name__ == "__main__":
    cli.run(main)
