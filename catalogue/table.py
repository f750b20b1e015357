"""Verdicts as lines of a table: one for each row, kind of model, and version."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.common import PROJECT
from benchmarks.common import markdown as as_markdown
from catalogue.proving import found_in

PAGE = PROJECT / "docs" / "catalogue.md"
ROWS = PROJECT / "config" / "accept.yaml"
KEY = ("row", "model", "torch", "framework", "version", "device")  # a newer verdict of the same takes the place of one
FIELDS = (*KEY, "options", "ranks", "precision", "verdict", "floors", "why", "date", "commit", "machine")
# The package whose version decides, besides PyTorch.
FRAMEWORKS = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fabric": "lightning-fabric",
    "horovod": "horovod",
    "trainer": "transformers",
}
WORDS = {"equal": "equal", "within-tolerance": "within tolerance", "by design": "another model, by design"}


@dataclass(frozen=True)
class Model:
    """A kind of model, its task, the files in config/ that ask for it, and whether it has batch normalisation."""

    name: str
    task: str
    configs: tuple[str, ...] = ()
    normalises_batches: bool = False


MODELS = {
    "bert": Model("BERT, classifies texts", "text-classification"),
    "llama": Model("Llama, predicts tokens", "language-modelling", ("language.yaml",)),
    "convolution": Model("convolutions, classify images", "image-classification", ("digits.yaml",)),
    "unet": Model(
        "U-Net with batch normalisation over all ranks, segments images",
        "image-segmentation",
        ("segmentation.yaml",),
        normalises_batches=True,
    ),
}


def lines_of(file: Path) -> list[dict[str, str]]:
    """The verdicts in accept.json, and what could not be proven with the reason. Raises BadInput as `found_in` does."""
    found = found_in(file)
    machine = found["machine"]
    model = next(name for name, model in MODELS.items() if model.task == found["task"])
    made = found["time"][:10]
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"]
    gpus = machine["gpus"]
    about = {"model": model, "torch": _release(machine["packages"]["torch"]), "date": made}
    about |= {"commit": (machine["commit"] or "")[:10], "device": "cuda" if gpus else "cpu"}
    about["machine"] = gpus[0] if gpus else f"{machine['cores']} cores, {machine['cpu']}"
    lines = []
    for name, verdict in found["proofs"].items():
        above = verdict["above_floor"]
        line = {"verdict": "by design" if verdict["nature"] else verdict["proof"], "precision": verdict["precision"]}
        line |= {"why": verdict["nature"] or verdict["reason"], "ranks": str(verdict["world_size"])}
        lines.append(_named(name, rows, machine) | about | line | {"floors": "" if above is None else f"{above:.1g}"})
    for name, why in found["cannot"].items():
        line = {"verdict": "not possible", "why": why, "ranks": "", "precision": "", "floors": ""}
        lines.append(_named(name, rows, machine) | about | line)
    return lines


def key_of(line: dict[str, str]) -> tuple[str, ...]:
    """What a verdict is on: the values of KEY."""
    return tuple(line[name] for name in KEY)


def merged(before: list[dict[str, str]], new: list[dict[str, str]]) -> list[dict[str, str]]:
    """All lines, the latest of those with the same KEY, in the order of config/accept.yaml."""
    by_date = sorted([*before, *new], key=lambda line: line["date"])
    lines = {key_of(line): line for line in by_date}
    order = list(yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"])
    place = {name: number for number, name in enumerate(order)}
    return sorted(lines.values(), key=lambda line: (place.get(line["row"], len(place)), line["model"], line["torch"]))


def markdown(lines: list[dict[str, str]]) -> str:
    """A table of rows beside kinds of models: the newest verdict of each on each device, with an anchor to link to."""
    newest: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for line in sorted(lines, key=lambda line: (line["date"], _numbers(line["torch"]))):
        newest.setdefault(line["row"], {})[line["model"], line["device"]] = line
    cells = []
    for name in dict.fromkeys(line["row"] for line in lines):
        found = newest[name]
        first = max(found.values(), key=lambda line: line["date"])
        version = f"{first['framework']} {first['version']}"
        verdicts = [_cell([line for (kind, _), line in found.items() if kind == model]) for model in MODELS]
        cells.append([f'<a id="{name}"></a>`{name}`', f"`{first['options']}`", version, *verdicts, first["date"]])
    header = ["row", "options", "version", *(model.name for model in MODELS.values()), "last proven"]
    return as_markdown(header, cells)


def _cell(lines: list[dict[str, str]]) -> str:
    """The verdicts on one row and model, each with its device if there are several."""
    if not lines:
        return "not tried"
    return "; ".join(f"{line['device']}: {_verdict(line)}" if len(lines) > 1 else _verdict(line) for line in lines)


def _verdict(line: dict[str, str]) -> str:
    if line["verdict"] in WORDS:
        ranks = "1 rank" if line["ranks"] == "1" else f"{line['ranks']} ranks"
        return f"{WORDS[line['verdict']]} ({ranks}, {line['precision']})"
    return " ".join(f"{line['verdict']}: {line['why']}".split()).replace("|", "\\|").replace("<", "&lt;")


def _named(name: str, rows: dict, machine: dict) -> dict[str, str]:
    """A row's name, options, and the framework that decides, with its version."""
    options = dict(rows.get(name) or {})
    strategy = options.pop("strategy", name)
    package = FRAMEWORKS.get(strategy, "torch")
    said = ", ".join([strategy, *(f"{key}: {str(value).lower()}" for key, value in options.items())])
    version = _release(machine["packages"].get(package) or "unknown")
    return {"row": name, "options": said, "framework": package, "version": version}


def _release(version: str) -> str:
    """A version without its build, as 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
