"""Chooses the view that Snakemake shows. profiles/default/config.yaml calls it before Snakemake makes its logger."""

import contextlib
import math
import os
import sys

from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from lockstep.errors import BadInput, exit_on_bad_input
from lockstep.run.progress import VIEW

NAME = "lockstep"
ASKED = "LOCKSTEP_VIEW"
VIEWS = ("live", "plain", "snakemake")
UP_AND_ERASE = "\x1b[A\x1b[2K"  # goes up one line, and erases it
# What Snakemake (9.27) prints just before this is called: the profile that it reads by default.
READS = "Using workflow specific profile profiles/default for setting default command line arguments."
# Options that select Snakemake's own output, and their letters; --mode marks a job that another Snakemake started.
OTHERS = ("--dry-run", "--dryrun", "--quiet", "--verbose", "--debug-dag", "--logger", "--printshellcmds", "--mode")
LETTERS = set("nqp")


@exit_on_bad_input()
def choose(words: list[str]) -> str:
    """Choose the view for Snakemake with these words on its command line, and register it with Snakemake.

    Empty if Snakemake's own output is to be shown, which is in its log file (.snakemake/log) in any case. Raises
    BadInput if LOCKSTEP_VIEW names no view.
    """
    os.environ.pop(VIEW, None)
    asked = os.environ.get(ASKED, "")
    if asked not in ("", *VIEWS):
        raise BadInput(f"{ASKED}={asked}: there is no such view. Set it to live, plain or snakemake, or leave it out.")
    otherwise = any(word.partition("=")[0] in OTHERS or _short(word) & LETTERS for word in words)
    if asked == "snakemake" or otherwise:
        return ""
    drawn = asked != "plain" and os.isatty(2) and os.environ.get("TERM") not in (None, "", "dumb")
    os.environ[VIEW] = "1"
    from lockstep.view import live, plain  # these import rich, which takes a tenth of a second

    if drawn and not {word.partition("=")[0] for word in words} & {"--profile", "--workflow-profile"}:
        _erase(READS)
    module = live if drawn else plain
    LoggerPluginRegistry().register_plugin(f"snakemake_logger_plugin_{NAME}", module)
    return "live" if drawn else "plain"


def _short(word: str) -> set[str]:
    """The letters of several short options in one word, such as -nq; none of -call or -Ctrain=..."""
    return set(word[1:]) if word[:1] == "-" and word[1:2] != "-" and set(word[1:]) <= set("nqpFRkr") else set()


def _erase(line: str) -> None:
    """Erase `line`, the last output of the terminal; a narrow terminal has wrapped it.

    The line stays in a terminal that does not report its size, such as a container's.
    """
    with contextlib.suppress(OSError):
        columns = os.get_terminal_size(2).columns
        lines = math.ceil(len(line) / columns) if columns else 0
        print(UP_AND_ERASE * lines, end="", file=sys.stderr, flush=True)
