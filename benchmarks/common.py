"""What all benchmarks share: a results folder prepared for them, a script of Lockstep's, a line of the table."""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
SCRIPTS = PROJECT / "workflow" / "scripts"
COMMON = {
    "train.epochs": 1,
    "train.eval_every": 0,
    "train.checkpoint": "last",
    "hardware.device": "cpu",
    "profile.steps": 0,
}
SMALL = {"model.layers": 2, "model.hidden_size": 128, "model.heads": 2}
LARGER = {"model.layers": 4, "model.hidden_size": 256, "model.heads": 4}


def command(script: str, results: Path, keys: dict, *more: str) -> list[str]:
    """A script's command; `more` may name configuration files: --config=FILE."""
    overrides = [f"--set={key}={value}" for key, value in (COMMON | keys).items()]
    return [sys.executable, str(SCRIPTS / f"{script}.py"), "--results", str(results), *overrides, *more]


def run(script: str, results: Path, keys: dict, configs: tuple[str, ...] = ()) -> None:
    files = [f"--config={file}" for file in configs]
    subprocess.run(command(script, results, keys, *files), check=True, cwd=PROJECT, stdout=subprocess.DEVNULL)


def prepared(folder: Path, keys: dict, configs: tuple[str, ...] = ()) -> Path:
    """A results folder with data and plans, by configuration files (the default one without any) and `keys`."""
    for script in ("prepare", "plan"):
        run(script, folder, keys, configs)
    return folder


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))


def refuse(
    parser: argparse.ArgumentParser, asked: argparse.Namespace, kind: str, known, count: str, page: Path
) -> None:
    """End the program where what is asked can't be measured, or is not the whole of a table to put into `page`.

    kind: what the names stand for, of which `known` are all; count: the option that says how often each is measured.
    """
    if unknown := set(asked.what) - set(known):
        parser.error(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    if getattr(asked, count) < 1:
        parser.error(f"--{count} must be 1 or more")
    if asked.data and not asked.data.is_file():
        parser.error(f"--data: {asked.data} is not a file")
    if asked.write and asked.what:
        parser.error(f"--write puts the whole table into {page.relative_to(PROJECT)}: leave out the names")


def between_marks(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    after = rest.partition(marks[1])[2]
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")


def line(name: str, ratios: list[float], target: str = "", digits: int = 2) -> list[str]:
    return [
        name,
        f"{statistics.median(ratios):.{digits}f}",
        f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}",
        str(len(ratios)),
        target,
    ]
