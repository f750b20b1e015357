"""python -m catalogue.meshes: prove the rows that share out a model, on 2, 4 and 8 processes, and tell how equal.

    python -m catalogue.meshes [--minutes N] [--write] [KIND ...]

KIND: bert, llama, llama_muon (whose optimizer is Muon); all without any. The models are small and made by shape.
--write puts the table into docs/catalogue.md.
"""

import argparse
import json
from pathlib import Path

import yaml

from benchmarks.common import between_marks, markdown
from catalogue import proving
from catalogue.table import PAGE
from catalogue.table import ROWS as OF_ACCEPT
from lockstep import cli
from lockstep.proof.verdicts import WRONG

SIZES = (2, 4, 8)
# What each row is, those of its options that go with the number of processes, and the fewest of these.
ROWS = {
    "ddp": ({"strategy": "ddp"}, (), 2),
    "fsdp": ({"strategy": "fsdp"}, (), 2),
    "hsdp": ({"strategy": "fsdp", "replicate": 2}, (), 4),
    "zero3": ({"strategy": "deepspeed", "launcher": "torchrun", "stage": 3}, (), 2),
    "tp": ({"strategy": "tp"}, ("tensor",), 2),
    "tp_pairs": ({"strategy": "tp", "tensor": 2}, (), 4),
    "tp_sequence": ({"strategy": "tp", "sequence": True}, ("tensor",), 2),
    "tp_vocabulary": ({"strategy": "tp", "vocabulary": True}, ("tensor",), 2),
    "tp_fsdp": ({"strategy": "tp", "tensor": 2, "shard": True}, (), 4),
    "tp_hsdp": ({"strategy": "tp", "tensor": 2, "shard": True, "replicate": 2}, (), 4),
    "pp": ({"strategy": "pp", "accumulation": 3}, ("stages",), 2),
    "pp_pairs": ({"strategy": "pp", "stages": 2, "accumulation": 3}, (), 4),
    "pp_1f1b": ({"strategy": "pp", "accumulation": 8, "pipeline": "1f1b"}, ("stages",), 2),
    "pp_interleaved": ({"strategy": "pp", "stages": 2, "accumulation": 4, "pipeline": "interleaved"}, (), 2),
    "cp": ({"strategy": "cp"}, ("context",), 2),
    "cp_pairs": ({"strategy": "cp", "context": 2}, (), 4),
    "cp_hsdp": ({"strategy": "cp", "context": 2, "replicate": 2}, (), 4),
}
COMMON = {
    "model": {"hidden_size": 64, "layers": 8, "heads": 8},
    "data": {"limit": 400, "max_length": 32},
    "hardware": {"device": "cpu", "processes": 8, "threads": 1, "oversubscribe": True, "timeout": 300},
    "train": {"global_batch": 48},  # which all numbers of replicas and micro-batches here divide
    "trial_processes": 8,
}
# The heading of each kind's column, and what is added to the section `train`.
KINDS = {
    "bert": ("BERT", {}),
    "llama": ("Llama", {"best": "perplexity"}),
    "llama_muon": ("Llama, by Muon", {"best": "perplexity", "optimizer": "muon"}),
}
MARKS = ("<!-- meshes: begin -->", "<!-- meshes: end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--minutes", type=float, default=30.0, help="the time for each kind")
    parser.add_argument("--results", type=Path, default=Path("results/meshes"), help="where trials are trained")
    parser.add_argument("--write", action="store_true", help="write docs/catalogue.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if arguments.write and arguments.what:
        parser.error(f"--write puts the whole table into {PAGE.name}: leave out the kinds")
    found = {kind: prove(arguments.results / kind, kind, arguments.minutes) for kind in arguments.what or KINDS}
    proven = {kind: each["proofs"] for kind, each in found.items()}
    print(table(proven))
    if arguments.write:
        between_marks(PAGE, MARKS, table(proven))
    wrong = [
        f"{kind}: {name}" for kind, rows in proven.items() for name, each in rows.items() if each["proof"] in WRONG
    ]
    print(f"{sum(map(len, proven.values()))} verdicts, {len(wrong)} of them wrong", *wrong, sep="\n  ")
    left = [f"{kind}: {what}" for kind, each in found.items() for what in proving.not_reached(each)]
    if left:
        print("there was no time for these; give more --minutes:", *left, sep="\n  ")
    return bool(wrong or left)


def asked(kind: str) -> dict:
    """The configuration that `lockstep accept` is given: these rows at each size, in place of its own."""
    rows = dict.fromkeys(yaml.safe_load(OF_ACCEPT.read_text(encoding="utf-8"))["rows"])
    for name, (row, growing, fewest) in ROWS.items():
        for size in SIZES[SIZES.index(fewest) :]:
            rows[f"{name}_{size}"] = row | {"processes": size} | dict.fromkeys(growing, size)
    task = "language-modelling" if kind.startswith("llama") else "text-classification"
    return COMMON | {"task": task, "train": COMMON["train"] | KINDS[kind][1], "rows": rows}


def prove(folder: Path, kind: str, minutes: float) -> dict:
    """What is found of each row that the kind of model can have. Fails as `proving.prove` and `found_in` do."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(asked(kind)), encoding="utf-8")  # JSON is valid YAML
    return proving.found_in(proving.prove(folder, kind, minutes, [file]))


def table(proven: dict[str, dict[str, dict]]) -> str:
    """A line for each row, with how far it is from one process at each number of processes."""
    lines = []
    for name, (row, growing, _) in ROWS.items():
        options = row | dict.fromkeys(growing, "n")
        shown = ", ".join(f"{key}: {value}".lower() for key, value in options.items() if key != "launcher")
        of_kinds = [[cell(rows.get(f"{name}_{number}")) for number in SIZES] for rows in proven.values()]
        lines.append([f"`{shown.removeprefix('strategy: ')}`", *(", ".join(cells) for cells in of_kinds)])
    return markdown(["row", *(KINDS[kind][0] for kind in proven)], lines)


def cell(verdict: dict | None) -> str:
    """The largest distance in float64; where there is none, the one in fp32 as a multiple of what rounding does."""
    if verdict is None:
        return "–"
    if verdict["proof"] in WRONG:
        return f"**{verdict['proof']}**"
    exact = verdict.get("fp64")
    return f"{max(exact.values()):.0e}" if exact else f"fp32: {verdict['above_floor']:.1g}"


if __name__ == "__main__":
    cli.run(main)
