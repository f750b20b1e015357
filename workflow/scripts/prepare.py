"""Prepare everything that all runs share: read and split the data, tokenise or decode it, write the initial weights.

It is made in a temporary folder, which replaces existing data only at the end, so a failure leaves that unchanged.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from lockstep import cli, files, paths
from lockstep.config import registry
from lockstep.config.sections import Model
from lockstep.data import plan
from lockstep.errors import BadInput, listed
from lockstep.model import lora, models, padding
from lockstep.run import journal

SHOWN = 30  # the number of labels that are printed
PARTS = (paths.DATASET, paths.TOKENIZER, paths.WEIGHTS)


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    task = registry.load_task(config.task)(config.train)
    folder = paths.data_folder(arguments.results)
    arguments.results.mkdir(parents=True, exist_ok=True)
    aside = tempfile.TemporaryDirectory(dir=arguments.results, prefix=".data.")  # not in /tmp, as it may be large
    with files.named_when_full(folder), aside as work:
        prepared = Path(work) / "data"
        summary = task.prepare(config, paths.download_folder(arguments.results), Path(work), prepared)
        files.write_json(prepared / paths.ABOUT_DATA, summary)  # already here, as loading a split reads it
        samples = task.load(paths.split_folder(prepared, "train"))
        plan.save_lengths(prepared, samples.lengths)
        model = models.load(prepared / paths.WEIGHTS)
        weights = models.hash_weights(model.state_dict())  # before a forward pass, which may change a user's own model
        require_numbers(model, config.model.name)
        look_at_padding(model, samples, config.model, summary["notes"])
        parts = [part for part in PARTS if (prepared / part).is_dir()]
        summary |= {
            "task": config.task,
            "unit": task.UNIT,
            "model": config.model.name,
            "parameters": models.count_parameters(model),
            "batch_statistics": models.has_batch_statistics(model),
            "weights": weights,
            "heads": models.heads_of_attention(model),
            "lora_layers": lora.sizes(model),
            "unused_parameters": task.unused_parameters(model, samples),
            "asked": config.data_settings,
            "files": files.inventory(prepared, parts),
        }
        replace(folder, prepared)
    files.write_json(paths.data_file(arguments.results), summary)
    journal.note(arguments.results, "preparation", folder, (paths.ABOUT_DATA,))
    files.write_text(paths.ready_file(arguments.results, config.data_key), f"{summary['hash']}\n")

    sizes = ", ".join(f"{part['texts']} {name}" for name, part in summary["splits"].items())
    print(
        f"{summary['source']}: {summary['rows_read']} rows, {summary['duplicates_removed']} duplicates removed; {sizes}"
    )
    if names := summary["labels"]:
        counts = Counter()
        for part in summary["splits"].values():
            counts.update(part["labels"])
        print(f"labels: {listed((f'{name}: {counts[name]}' for name in names), most=SHOWN)}")
    for note in summary["notes"]:
        print(note)
    print(f"{config.model.name}: {summary['parameters']:,} parameters, {summary['inputs']}")


def require_numbers(model, name: str) -> None:
    """Raise BadInput if a weight is NaN or infinite, which training can't repair."""
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadInput(f"model.name: {name}: {key} contains nan or inf. Name another model.")


def look_at_padding(model, samples, asked: Model, notes: list[str]) -> None:
    """Add a note, or for a pretrained model raise BadInput, if padding changes a sample's scores."""
    change = padding.influence(model, samples)
    if not change:
        return
    finding = f"padding changes a text's scores by up to {change:.2g} of the largest score"
    if not asked.file:
        raise BadInput(
            f"model.name: {asked.name}: {finding}. It may need padding on the left, or ignore attention_mask. Name"
            " another model."
        )
    notes.append(f"{asked.name}: {finding}: it ignores attention_mask somewhere")


def replace(folder: Path, prepared: Path) -> None:
    """Move the prepared data into its place. The folder is incomplete until data.json and ready/ are written."""
    folder.mkdir(exist_ok=True)
    (folder / paths.ABOUT_DATA).unlink(missing_ok=True)
    for part in (paths.READY, paths.PLANS, *PARTS):  # plans belong to the old data
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in PARTS:
        if (prepared / part).is_dir():
            (prepared / part).replace(folder / part)


if __name__ == "__main__":
    cli.run(main)
