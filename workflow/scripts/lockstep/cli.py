"""What the commands in workflow/scripts share: their common options, and how they end."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep import config
from lockstep.errors import exit_code


def parser(description: str, *, configured: bool = True) -> argparse.ArgumentParser:
    """A parser with --results, and with --config and --set for commands that are `configured`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--results", type=Path, default=Path("results"), help="the folder of all results")
    if configured:
        made.add_argument(
            "--config",
            type=Path,
            action="append",
            metavar="FILE",
            help="configuration file; again for more, each over the one before (default: config/config.yaml)",
            default=argparse.SUPPRESS,
        )
        made.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, as in data.limit=600"
        )
    return made


def configuration(arguments: argparse.Namespace, finished: bool = False) -> config.Config:
    """The configuration that was asked for; for a command on `finished` results, the one that they were made with."""
    made_with = arguments.results / "config.yaml"
    default = made_with if finished and made_with.is_file() else Path("config/config.yaml")
    return config.read(getattr(arguments, "config", [default]), arguments.set)


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit: 0 on success, 2 on bad input, 1 on a failed run; never a traceback for either."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would fill the logs
    signal.signal(signal.SIGTERM, _interrupt)  # or temporary files would stay
    sys.exit(exit_code(main))


def _interrupt(number, frame):
    raise KeyboardInterrupt
