"""What the commands in workflow/scripts share: their common options, and how they end."""

import argparse
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

# Bars of progress and warnings would open each command's output, and fill the logs. Libraries read this when imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("DATASETS_VERBOSITY", "error")
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # datasets would tell yet another host what is read here
logging.getLogger("DeepSpeed").addFilter(lambda entry: entry.levelno >= logging.ERROR)


def parser(description: str, *, configured: bool = True) -> argparse.ArgumentParser:
    """A parser with --results, and with --config and --set for commands that are `configured`."""
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
            help="configuration file, over config/config.yaml; again for more, each over the one before",
            default=argparse.SUPPRESS,
        )
        argument_parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, as in data.limit=600"
        )
    return argument_parser


def add_model(argument_parser: argparse.ArgumentParser) -> None:
    """The options that name a model, and somebody's weights for it."""
    argument_parser.add_argument("--model", type=Path, metavar="FOLDER", help="the folder of a model")
    argument_parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="somebody's checkpoint of the model in --model, a file or a folder"
    )
    argument_parser.add_argument(
        "--labels", metavar="A,B,...", help="the names of the model's classes by their numbers, where it has no names"
    )


def add_snapshot(argument_parser: argparse.ArgumentParser) -> None:
    """The option that takes, in place of a run's own model, the one that it kept at the end of an epoch."""
    argument_parser.add_argument(
        "--snapshot", type=int, metavar="EPOCH", help="the run's model at the end of this epoch (train.snapshot_every)"
    )


def snapshot(run: Path, epoch: int) -> Path:
    """The folder of a run's snapshot. Raises BadInput where there is none of this epoch."""
    paths.must_be_run(run)
    there = paths.snapshots(run)
    if epoch not in there:
        epochs = f"there are those of {', '.join(map(str, there))}" if there else "there is none (train.snapshot_every)"
        raise BadInput(f"--snapshot {epoch}: {run} kept no model at the end of that epoch; {epochs}.")
    return there[epoch]


def labels(arguments: argparse.Namespace) -> list[str] | None:
    """The names in --labels. Raises BadInput where they are not two at least, and all different."""
    if arguments.labels is None:
        return None
    names = [name.strip() for name in arguments.labels.split(",")]
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise BadInput(f"--labels: {arguments.labels}: give two different names at least, as in --labels bad,good.")
    return names


def configuration(arguments: argparse.Namespace, finished: bool = False) -> Config:
    """The configuration that was asked for; for a command on `finished` results, the one that they were made with.

    As with Snakemake's --configfile, files are read over the default one; where none is named and there are GPUs, that
    is config/gpu.yaml. The one that results were made with holds every key and row, and stands alone: whatever the
    default one says by now, it must not add to it.
    """
    made_with = paths.config_file(arguments.results)
    files = getattr(arguments, "config", [made_with] if finished and made_with.is_file() else [])
    if not files:
        overridden = {key: value for key, _, value in (override.partition("=") for override in arguments.set)}
        files = reading.for_gpus(overridden.get("hardware.device", "auto"))
    files = list(map(Path, files))
    whole = bool(files) and made_with.is_file() and files[0].is_file() and files[0].samefile(made_with)
    return reading.read(files if whole else [Path(reading.DEFAULT), *files], arguments.set)


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit: 0 on success, 2 on bad input, 1 on a failed run; never a traceback for either."""
    signal.signal(signal.SIGTERM, _interrupt)  # or temporary files would stay
    sys.exit(exit_code(main))


def _interrupt(number, frame):
    raise KeyboardInterrupt
