"""Helpers of the Snakefile: the checked configuration, the manifest, commands, and what is done after a failure.

It imports nothing slow, because Snakemake reads the Snakefile at every start.
"""

import contextlib
import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from lockstep import paths, provenance
from lockstep.analysis import decision, staleness
from lockstep.config import containers, reading, schema
from lockstep.config.configuration import FIRST_BLOCKS, PRECISE, Config
from lockstep.config.row import Row
from lockstep.errors import MAKE_ROOM, BadInput, exit_on_bad_input
from lockstep.files import lacking, read_json, write_json, write_text
from lockstep.run import journal, lifetime

_before: dict[Path, str] = {}  # the previous content of the files that write_manifest overwrites
LITTLE = 2**20  # bytes of free space that are too few for a model or a page


def stamps(results: Path) -> list[Path]:
    """The files that the rules predict and report create when they are done."""
    folders = (paths.predictions_file(results).parent, paths.report_folder(results))
    return [folder / paths.COMPLETE for folder in folders]


@exit_on_bad_input()
def configuration(raw: dict, files: list) -> Config:
    """Check Snakemake's merged configuration and every row's hardware. Ends the program with one message if invalid."""
    checked = reading.parse(raw, " + ".join([*map(str, files), "command line"]))
    for row in checked.rows.values():
        row.refuse()
        checked.trial(row).refuse()
    if checked.data.path and not Path(checked.data.path).exists():  # `prepare` checks whether it is a file or a folder
        raise BadInput(
            f"data.path: {checked.data.path} does not exist. Name an existing file or folder."
            + containers.outside(checked.data.path)
        )
    return checked


@exit_on_bad_input()
def require_place(workflow) -> None:
    """End the program if Snakemake was started outside Lockstep's folder, unless another workflow uses Lockstep.

    If Lockstep is a module of another workflow, results are in that workflow's folder, under Lockstep's names.
    """
    if workflow.modifier.is_main_snakefile():
        if Path.cwd() != paths.PROJECT:
            here = f"Snakemake works in {Path.cwd()}, which is not Lockstep's folder."
            raise BadInput(f"{here} Start it there: cd {paths.PROJECT}")
    elif workflow.modifier.modify_path("results") != "results":
        raise BadInput(
            "module: Lockstep accepts no prefix, as its commands name their files themselves. Leave `prefix` and"
            " `replace_prefix` out; results/ is its folder."
        )


def available_rows(checked: Config, contained: bool) -> dict[str, Row]:
    """The rows that can be trained here. Prints the reasons for the others, which the report has, too.

    In containers all rows can be trained, since the images have what they need.
    """
    missing = {} if contained else {name: row.unavailable for name, row in checked.rows.items() if row.unavailable}
    for name, reason in missing.items():
        print(f"{name} is unavailable: {reason}", file=sys.stderr)
    return {name: row for name, row in checked.rows.items() if name not in missing}


def use_this_python() -> None:
    """Run scripts in Snakemake's Python environment, even if that is not activated."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@exit_on_bad_input()
def refuse_beside_others(results: Path) -> None:
    """End the program if another program's run is under way, since Snakemake would remove its files."""
    lifetime.refuse_held([file.parent for file in paths.run_files(results, paths.LOCK, kind="*")])


@exit_on_bad_input()
def contain(checked: Config, settings) -> bool:
    """Whether rules run in containers; then set Apptainer's arguments in `settings`, Snakemake's deployment settings.

    Ends the program if Apptainer or an image is missing, before anything is trained.
    """
    if not any(method.name == "APPTAINER" for method in settings.deployment_method):
        return False
    arguments = containers.arguments(checked, containers.check(checked))
    settings.apptainer_args = f"{arguments} {settings.apptainer_args or ''}".strip()
    return True


@exit_on_bad_input()
def require_slurm(workflow) -> None:
    """End the program if jobs would be submitted to Slurm, but its commands are missing."""
    missing = [command for command in ("sbatch", "squeue", "sacct", "srun") if not shutil.which(command)]
    if missing and workflow.executor_plugin.name == "slurm":
        raise BadInput(
            f"--profile profiles/slurm: {', '.join(missing)} can't be found here. Start it where jobs are submitted,"
            " such as the cluster's login node."
        )


def write_manifest(checked: Config, available: list[str], command: list[str], contained: bool) -> None:
    """Write the request before anything runs: results/config.yaml, which scripts read, and results/manifest.json."""
    asked_file, manifest = paths.config_file(checked.results), paths.manifest_file(checked.results)
    # Removed default rows are written as null, so that the file gives the same rows when it overrides the default one.
    rows = dict.fromkeys(schema.of_configuration()["properties"]["rows"]["default"]) | checked.source["rows"]
    text = yaml.safe_dump(checked.source | {"rows": rows}, allow_unicode=True, sort_keys=False)
    _before.update({file: file.read_text(encoding="utf-8") for file in (asked_file, manifest) if file.is_file()})
    write_text(asked_file, text)
    write_json(
        manifest,
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "command": _from_here(command),
            "container": "apptainer" if contained else containers.kind(),
            "rows": list(checked.rows),
            "repeats": checked.repeats,
        }
        | provenance.commit(),
    )
    asked = {"command": _from_here(command), "session": lifetime.session_name(), "repeats": checked.repeats}
    journal.note(checked.results, "request", checked.results, (asked_file.name,), **asked, rows=available)


@exit_on_bad_input()
def next_block(file: str) -> list[str]:
    """The rows of the next block, from a decision (lockstep/analysis/blocks.py)."""
    return decision.read(Path(file))["rows"]


def tell_blocks(checked: Config, rows: dict[str, Row]) -> None:
    """Print in advance what `repeats: auto` will do."""
    if checked.repeats == "auto":
        print(
            f"repeats: auto: {FIRST_BLOCKS} blocks of {len(rows)} rows; then blocks of the fastest rows, until"
            f" they are told apart to {100 * PRECISE:g} % or all runs have taken {checked.budget:g} s",
            file=sys.stderr,
        )


def _from_here(command: list[str]) -> str:
    """Snakemake's command line with paths relative to this folder, as in any other clone."""
    here = f"{Path.cwd()}{os.sep}"
    return shlex.join(["snakemake", *(word.replace(here, "") for word in command[1:])])


def report_what_there_is(checked: Config) -> None:
    """Make verdicts, predictions and the report for the rows that succeeded, after others failed.

    If not even the data could be prepared, all results belong to the previous request, which is restored.
    """
    results = checked.results
    if results.is_dir() and shutil.disk_usage(results).free < LITTLE:
        # On a full disk a job can't even write this to its log.
        print(f"{results.resolve()}: the disk is full. {MAKE_ROOM}", file=sys.stderr)
    if not paths.ready_file(results, checked.data_key).is_file():
        for file, text in _before.items():
            write_text(file, text)
        with contextlib.suppress(BadInput):  # check.py reports a damaged journal
            requests = [line for line in journal.read(results) if line["what"] == "request"]
            if len(requests) > 1:
                rows = requests[-2]["rows"]
                file = paths.config_file(results).name
                journal.note(results, "request", results, (file,), rows=rows, put_back=True)
        return
    if paths.run_files(results, paths.FAILED, paths.PARITY):
        run_script(results, "parity", "--show", "--exit-zero")
    if paths.data_file(results).is_file() and (results / paths.RUNS).is_dir():  # not after `tune` alone
        # With `repeats: auto`, runs are tested when the last block is known, which will not happen any more.
        for run in [file.parent for file in paths.run_files(results, paths.RECORD)]:
            if (run / paths.CHECKPOINT).is_dir() and not (run / paths.TEST_REPORT).is_file():
                subprocess.run(["python", script("evaluate"), str(run)], check=False)
        # As far as there is a model of what was asked for.
        rows = [row for row in checked.rows.values() if (results / row.folder(1) / paths.MODEL).is_dir()]
        if any(not staleness.folder(checked, row, results) for row in rows):
            run_script(results, "predict")
        run_script(results, "report")
        for stamp in stamps(results):  # so that Snakemake makes them again after success
            stamp.unlink(missing_ok=True)


def script(name: str) -> str:
    """The path of a command in workflow/scripts, as in rules."""
    return str(paths.of_project(f"workflow/scripts/{name}.py"))


def command(name: str, results: Path) -> list[str]:
    """A script's command for a results folder, with the configuration in it."""
    asked = ["--config", str(paths.config_file(results)), "--results", str(results)]
    return ["python", script(name), *asked]


def on_nodes(row: Row, train: str) -> str:
    """The shell command of a rule that trains a row: by srun on all nodes of a Slurm job, otherwise here, as node 0.

    Without Slurm, launch.py was started by hand on the other nodes, and waits for node 0.
    """
    nodes = row.hardware.nodes
    if nodes == 1:
        return train
    cores = f" --cpus-per-task={row.asked.node_cores}" if row.asked.node_cores else ""
    by_slurm = f"srun --nodes={nodes} --ntasks-per-node=1{cores} {train}"
    return f'if [ -n "${{{{SLURM_JOB_ID:-}}}}" ]; then {by_slurm}; else {train} --node-rank 0; fi'


def resources(row: Row) -> dict:
    """The resources of a rule that trains a row; profiles allow one `timed` job at a time."""
    nodes = row.hardware.nodes
    return {"timed": 1} | ({"nodes": nodes, "tasks": nodes, "mpi": "srun"} if nodes > 1 else {})


def run_script(results: Path, name: str, *arguments: str) -> None:
    """Run one of Lockstep's scripts on the existing results; the script reports its own errors."""
    subprocess.run([*command(name, results), *arguments], check=False)


@exit_on_bad_input()
def missing_data(checked: Config) -> list[str]:
    """The missing files of prepared data, if `prepare` was done for this configuration."""
    results = checked.results
    folder = paths.data_folder(results)
    if not paths.ready_file(results, checked.data_key).is_file():
        return []  # `prepare` will run anyway
    about = paths.data_file(results)
    if not about.is_file():
        return [str(about)]
    gone = lacking(folder, read_json(about).get("files", {}))
    if changed := [file for file in gone if file.exists()]:
        raise BadInput(f"{changed[0]}: has changed since it was written. Remove it, and it is made again.")
    return [str(file) for file in gone]
