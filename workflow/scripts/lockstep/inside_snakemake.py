"""Where Lockstep reaches into Snakemake (9.27) beyond what it documents, and why; nowhere else does it.

Another version may have changed any of this. Then an unknown row is not explained, a module's handlers are not
called, the scheduler is less idle, or Ctrl-C ends with a traceback, and tests say so (tests/test_module.py,
tests/test_benchmark.py, tests/test_command.py, tests/test_trust.py).
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable

from lockstep.config.configuration import Config
from lockstep.errors import BadInput

# Snakemake's message about an unknown target.
NO_TARGET = re.compile(r"No rule to produce (\w+) \(if you use input functions")

_interruptions: list[float] = []  # when somebody pressed Ctrl-C


def name_rows(checked: Config) -> None:
    """Make Snakemake list the rows if it is asked for a target that it does not know."""

    def shorten(entry: logging.LogRecord) -> bool:
        if unknown := NO_TARGET.search(str(entry.msg)):
            try:
                checked.require_row(unknown[1], unknown[1])
            except BadInput as error:
                entry.msg = f"error: {error}"
        return True

    logging.getLogger("snakemake.logging").addFilter(shorten)


def take_part(workflow, begin: Callable[[], None], fail: Callable[[], None]) -> None:
    """Make a workflow that uses Lockstep as a module call Lockstep's handlers at its start and its failure.

    Snakemake (9.27) ignores `onstart` and `onerror` of a module. The workflow's own handlers are called first.
    """
    if workflow.modifier.is_main_snakefile():
        return

    def also(theirs: Callable, ours: Callable[[], None]) -> Callable:
        def both(log):
            theirs(log)
            ours()

        return both

    workflow._onstart = also(workflow._onstart, begin)
    workflow._onerror = also(workflow._onerror, fail)


def let_sleep(workflow) -> None:
    """Keep Snakemake's scheduler idle while jobs run on this machine.

    Its limit of jobs per second (Snakemake 9.27) wakes it a second after each check of the jobs, and once more for each
    job that has ended since the start. After forty jobs it took a tenth of a core from the timed run
    (github.com/snakemake/snakemake/pull/3744).
    """
    if workflow.local_exec:
        workflow.scheduler.job_rate_limiter = None


def say_interrupted() -> None:
    """Make Snakemake print one word instead of a traceback if a second Ctrl-C interrupts its cleaning up.

    The first Ctrl-C is noticed for `end_interrupted`.
    """

    def shorten(entry: logging.LogRecord) -> bool:
        if str(entry.msg).startswith("Terminating processes on user request"):
            _interruptions.append(entry.created)
        if "Cannot close a running event loop" in str(entry.msg):
            entry.msg = "interrupted"
            warnings.simplefilter("ignore", RuntimeWarning)  # about interrupted coroutines that were never awaited
        return True

    logging.getLogger("snakemake.logging").addFilter(shorten)


def end_interrupted() -> None:
    """If Ctrl-C was pressed, end the program with exit code 130, as shells do; Snakemake would end it with 1."""
    if _interruptions:
        sys.exit(130)
