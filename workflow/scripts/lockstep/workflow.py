"""What the Snakefile asks: the checked configuration, the manifest, and which code a rule depends on.

Imports nothing heavy, because Snakemake reads the Snakefile at every start.
"""

import ast
import datetime
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import yaml

from lockstep import commands, config, containers
from lockstep.errors import BadInput
from lockstep.files import write_json, write_text

SCRIPTS = Path("workflow/scripts")
RESULTS = Path("results")


def configuration(raw: dict, files: list) -> config.Config:
    """Check Snakemake's merged configuration and every row's hardware; end the program with one message if wrong."""
    try:
        checked = config.parse(raw, " + ".join([*map(str, files), "command line"]))
        for row in checked.rows.values():
            row.settings()
            row.refuse()
        if checked.data.path and not Path(checked.data.path).is_file():
            raise BadInput(f"data.path: {checked.data.path} does not exist. Name an existing file.")
        return checked
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def available_rows(checked: config.Config, contained: bool) -> dict[str, config.Row]:
    """The rows that can be trained here. Says of the others why they can't, as their line in the report does.

    In containers all can: what they need is in the images, whatever is installed outside.
    """
    missing = {} if contained else {name: row.unavailable for name, row in checked.rows.items() if row.unavailable}
    for name, reason in missing.items():
        print(f"{name} is unavailable: {reason}", file=sys.stderr)
    return {name: row for name, row in checked.rows.items() if name not in missing}


def use_this_python() -> None:
    """Run the scripts in the environment that Snakemake runs in, also where that is not activated."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def contain(checked: config.Config, settings) -> bool:
    """Whether rules run in containers (`settings` is Snakemake's deployment settings), which are then set up.

    Ends the program where Apptainer or an image is missing, before anything is trained.
    """
    if not any(method.name == "APPTAINER" for method in settings.deployment_method):
        return False
    try:
        arguments = containers.arguments(checked, containers.check(checked))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    settings.apptainer_args = f"{arguments} {settings.apptainer_args or ''}".strip()
    return True


def write_manifest(checked: config.Config, command: list[str], contained: bool) -> None:
    """Say what was asked, before anything runs: results/config.yaml (the scripts read it), results/manifest.json."""
    text = yaml.safe_dump(checked.source, allow_unicode=True, sort_keys=False)
    write_text(RESULTS / "config.yaml", text)
    write_json(
        RESULTS / "manifest.json",
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "command": shlex.join(["snakemake", *command[1:]]),
            "container": "apptainer" if contained else containers.kind(),
            "rows": list(checked.rows),
            "repeats": checked.repeats,
        }
        | commands.commit(),
    )


def report_what_there_is() -> None:
    """Predictions and report over the rows that succeeded, after others failed."""
    if (RESULTS / "data" / "data.json").is_file() and (RESULTS / "runs").is_dir():  # not after `tune` alone
        for script in ("predict", "report"):
            command = ["python", str(SCRIPTS / f"{script}.py"), "--config", str(RESULTS / "config.yaml")]
            subprocess.run(command, check=False)  # without any model there is nothing to predict


def data_files(checked: config.Config) -> list[str]:
    """The local files that `prepare` reads: editing one runs it again."""
    if checked.data.synthetic:
        return ["resources/corpus.yaml"]
    return [checked.data.path] if checked.data.path else []


def code_files(script: str, strategy: str | None = None) -> list[str]:
    """A script, and the files of Lockstep that it and the strategy import, however indirectly."""
    todo, found = [Path(script)], set()
    if strategy:
        todo += [SCRIPTS / "train.py", SCRIPTS / "lockstep" / "strategies" / f"{strategy}.py"]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _imports(file)
    return sorted(map(str, found))


@cache
def _imports(file: Path) -> list[Path]:
    """The files of Lockstep that `file` imports anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            package = SCRIPTS.joinpath(*node.module.split("."))
            candidates = [package / "__init__.py", package.with_suffix(".py")]
            candidates += [package / f"{alias.name}.py" for alias in node.names]
            candidates += [package / alias.name / "__init__.py" for alias in node.names]
            found += [candidate for candidate in candidates if candidate.is_file()]
    return found
