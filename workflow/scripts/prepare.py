"""Read the data, split it, tokenise it once, and write the initial weights: everything that all runs share.

All of it is made aside first, and takes the place of what is there at the end: a failure leaves what is there.
"""

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, files, paths
from lockstep.data import prepare
from lockstep.model import metrics, models
from lockstep.run import journal

PARTS = (paths.DATASET, paths.TOKENIZER, paths.WEIGHTS)


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    folder = paths.data_folder(arguments.results)
    arguments.results.mkdir(parents=True, exist_ok=True)
    aside = tempfile.TemporaryDirectory(dir=arguments.results, prefix=".data.")  # there, as it may be large
    with files.named_when_full(folder), aside as work:
        made = Path(work) / "data"
        splits, summary = prepare.split(config.data, paths.download_folder(arguments.results), Path(work))
        tokenizer = models.make_tokenizer(config.model, prepare.texts(splits["train"]), config.data.max_length)
        model = models.initialise(
            config.model, tokenizer, summary["labels"], config.data.max_length, config.train.seed, summary["notes"]
        )
        with files.atomic_folder(made / paths.DATASET) as temporary:
            summary |= prepare.store(splits, tokenizer, temporary)
        with files.atomic_folder(made / paths.TOKENIZER) as temporary:
            tokenizer.save_pretrained(temporary)
        with files.atomic_folder(made / paths.WEIGHTS) as temporary:
            model.save_pretrained(temporary)
        summary |= {
            "pad_id": tokenizer.pad_token_id or 0,
            "model": config.model.name,
            "parameters": model.num_parameters(),
            "shape": asdict(metrics.Shape.of(model)),
            "weights": models.hash_weights(models.load(made / paths.WEIGHTS).state_dict()),
            "asked": config.data_settings,
            "files": files.inventory(made, PARTS),
        }
        replace(folder, made)
    files.write_json(paths.data_file(arguments.results), summary)
    journal.note(arguments.results, "preparation", folder, (paths.ABOUT_DATA,))
    files.write_text(paths.ready_file(arguments.results, config.data_key), f"{summary['hash']}\n")

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
    (folder / paths.ABOUT_DATA).unlink(missing_ok=True)
    for part in (paths.READY, paths.PLANS, *PARTS):  # plans are made for a data set
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in PARTS:
        (made / part).replace(folder / part)


if __name__ == "__main__":
    cli.run(main)
