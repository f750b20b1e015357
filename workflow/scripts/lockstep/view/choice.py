"""Which view Snakemake shows. profiles/default/config.yaml asks, before Snakemake makes its logger."""

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
UP_AND_ERASE = "\x1b[A\x1b[2K"  # one line
# What Snakemake (9.27) prints just before it asks: which file it reads by itself.
READS = "Using workflow specific profile profiles/default for setting default command line arguments."
# Snakemake's own ways to tell, and the letters that stand for them; --mode is of a job that another Snakemake started.
OTHERS = ("--dry-run", "--dryrun", "--quiet", "--verbose", "--debug-dag", "--logger", "--printshellcmds", "--mode")
LETTERS = set("nqp")


@exit_on_bad_input()
def choose(words: list[str]) -> str:
    """The view that Snakemake, with these words on its command line, is to show, which is made known to it.

    Empty where its own words are to be shown. They are in its log file, .snakemake/log, in any case.
    """
    os.environ.pop(VIEW, None)
    asked = os.environ.get(ASKED, "")
    if asked not in ("", *VIEWS):
        raise BadInput(f"{ASKED}={asked}: is no view. Set it to live, plain or snakemake, or leave it out.")
    otherwise = any(word.partition("=")[0] in OTHERS or _short(word) & LETTERS for word in words)
    if asked == "snakemake" or otherwise:
        return ""
    drawn = asked != "plain" and os.isatty(2) and os.environ.get("TERM") not in (None, "", "dumb")
    os.environ[VIEW] = "1"
    from lockstep.view import live, plain  # rich, which takes a tenth of a second to import

    if drawn and not {word.partition("=")[0] for word in words} & {"--profile", "--workflow-profile"}:
        _erase(READS)
    module = live if drawn else plain
    LoggerPluginRegistry().register_plugin(f"snakemake_logger_plugin_{NAME}", module)
    return "live" if drawn else "plain"


def _short(word: str) -> set[str]:
    """The letters of several short options in one word, as in -nq; of -call, or of -Ctrain=..., none."""
    return set(word[1:]) if word[:1] == "-" and word[1:2] != "-" and set(word[1:]) <= set("nqpFRkr") else set()


def _erase(line: str) -> None:
    """Take back the last line of the terminal, in which `line` stands; a narrow one has folded it.

    The line stays in a terminal that does not tell its size, as one that a container is given.
    """
    with contextlib.suppress(OSError):
        columns = os.get_terminal_size(2).columns
        lines = math.ceil(len(line) / columns) if columns else 0
        print(UP_AND_ERASE * lines, end="", file=sys.stderr, flush=True)
