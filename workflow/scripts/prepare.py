"""Read the data, split it, tokenise or decode it once, and write the initial weights: everything that all runs share.

All of it is made aside first, and takes the place of what is there at the end: a failure leaves what is there.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from lockstep import cli, files, paths
from lockstep.config import registry
from lockstep.config.sections import Model
from lockstep.data import plan
from lockstep.data.labels import listed
from lockstep.errors import BadInput
from lockstep.model import lora, models, padding
from lockstep.run import journal

SHOWN = 30  # labels
PARTS = (paths.DATASET, paths.TOKENIZER, paths.WEIGHTS)


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    task = registry.load_task(config.task)(config.train)
    folder = paths.data_folder(arguments.results)
    arguments.results.mkdir(parents=True, exist_ok=True)
    aside = tempfile.TemporaryDirectory(dir=arguments.results, prefix=".data.")  # there, as it may be large
    with files.named_when_full(folder), aside as work:
        prepared = Path(work) / "data"
        summary = task.prepare(config, paths.download_folder(arguments.results), Path(work), prepared)
        files.write_json(prepared / paths.ABOUT_DATA, summary)  # which a split's reader looks into
        samples = task.load(paths.split_folder(prepared, "train"))
        plan.save_lengths(prepared, samples.lengths)
        model = models.load(prepared / paths.WEIGHTS)
        weights = models.hash_weights(model.state_dict())  # before a forward pass, which may change one's own
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
    """Raises BadInput where a weight is no number: no training would make it one."""
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadInput(f"model.name: {name}: {key} holds what is no number (nan or inf). Name another model.")


def look_at_padding(model, samples, asked: Model, notes: list[str]) -> None:
    """Note, or of a pretrained model raise BadInput, where a sample's scores depend on what pads it."""
    share = padding.influence(model, samples)
    if not share:
        return
    finding = f"a text's scores move by up to {share:.2g} of the largest when it is padded, as beside a longer one"
    if not asked.file:
        raise BadInput(
            f"model.name: {asked.name}: {finding}. It may want padding on the left, or heed no attention_mask. Name"
            " another model."
        )
    notes.append(f"{asked.name}: {finding}: it does not heed attention_mask wherever padding could show")


def replace(folder: Path, prepared: Path) -> None:
    """Put what was made into its place. Without data.json and ready/, which come last, the folder is not complete."""
    folder.mkdir(exist_ok=True)
    (folder / paths.ABOUT_DATA).unlink(missing_ok=True)
    for part in (paths.READY, paths.PLANS, *PARTS):  # plans are made for a data set
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in PARTS:
        if (prepared / part).is_dir():
            (prepared / part).replace(folder / part)


if __name__ == "__main__":
    cli.run(main)
