"""The base of the commands in workflow/scripts: their common options and their exit codes."""

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep import paths
from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.errors import BadInput, exit_code

# Progress bars and warnings would clutter each command's output and the logs. Libraries read these when imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("DATASETS_VERBOSITY", "error")
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # datasets would report downloads to another host
# Libraries are imported late in most commands. With Python's threshold of 700 objects, a fifth of that time is spent on
# looking for garbage among what they define.
gc.set_threshold(50_000)
logging.getLogger("DeepSpeed").addFilter(lambda entry: entry.levelno >= logging.ERROR)


def parser(description: str, *, configured: bool = True) -> argparse.ArgumentParser:
    """A parser with --results; for `configured` commands also with --config and --set."""
    argument_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    argument_parser.add_argument("--results", type=Path, default=paths.RESULTS, help="the folder of all results")
    if configured:
        argument_parser.add_argument(
            "--config",
            type=Path,
            action="append",
            metavar="FILE",
            help="a configuration file that overrides config/config.yaml; may be repeated, the last one wins",
            default=argparse.SUPPRESS,
        )
        argument_parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, as in data.limit=600"
        )
    return argument_parser


def add_model(argument_parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model, and somebody's weights for it."""
    argument_parser.add_argument("--model", type=Path, metavar="FOLDER", help="the folder of a model")
    argument_parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="somebody's checkpoint of the model in --model, a file or a folder"
    )
    argument_parser.add_argument(
        "--labels",
        metavar="A,B,...",
        help="the model's classes in the order of their numbers, if it has no names",
    )


def add_snapshot(argument_parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the model at the end of an epoch instead of the run's final model."""
    argument_parser.add_argument(
        "--snapshot", type=int, metavar="EPOCH", help="the run's model at the end of this epoch (train.snapshot_every)"
    )


def snapshot(run: Path, epoch: int) -> Path:
    """The folder of a run's snapshot. Raises BadInput if there is none for this epoch."""
    paths.must_be_run(run)
    there = paths.snapshots(run)
    if epoch not in there:
        epochs = f"it kept {', '.join(map(str, there))}" if there else "it kept none (train.snapshot_every)"
        raise BadInput(f"--snapshot {epoch}: {run} kept no model at the end of that epoch; {epochs}.")
    return there[epoch]


def labels(arguments: argparse.Namespace) -> list[str] | None:
    """The names in --labels. Raises BadInput unless there are at least two, all different."""
    if arguments.labels is None:
        return None
    names = [name.strip() for name in arguments.labels.split(",")]
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise BadInput(f"--labels: {arguments.labels}: give at least two different names, as in --labels bad,good.")
    return names


def users_command(words: list[str], example: str) -> list[str]:
    """The command of the user's own that stands after --. Raises BadInput if there is none."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise BadInput(f"name the command that starts your script, as in: {example}")
    return command


def must_be_new(output: Path | None, option: str = "--output", what: str = "folder") -> None:
    """Raise BadInput if a folder, or a file, that is to be made exists already."""
    if output and output.exists():
        raise BadInput(f"{option}: {output} exists already. Name a new {what}.")


def configuration(arguments: argparse.Namespace, finished: bool = False) -> Config:
    """The requested configuration; for a command on `finished` results, by default the one that they were made with.

    As with Snakemake's --configfile, files override the default one; if none is named and there are GPUs,
    config/gpu.yaml does. The configuration of existing results contains every key and row, so it is not combined with
    the default one, which may have changed since.
    """
    made_with = paths.config_file(arguments.results)
    files = getattr(arguments, "config", [made_with] if finished and made_with.is_file() else [])
    if not files:
        hardware = reading.overridden(arguments.set).get("hardware")
        files = reading.for_gpus(hardware.get("device", "auto") if isinstance(hardware, dict) else "auto")
    files = list(map(Path, files))
    whole = bool(files) and made_with.is_file() and files[0].is_file() and files[0].samefile(made_with)
    return reading.read(files if whole else [Path(reading.DEFAULT), *files], arguments.set)


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit: 0 on success, 2 on bad input, 1 on a failed run, without a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that temporary files are removed
    sys.exit(exit_code(main))


def _interrupt(number, frame):
    raise KeyboardInterrupt
