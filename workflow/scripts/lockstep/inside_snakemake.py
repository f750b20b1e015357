"""Where Lockstep reaches into Snakemake (9.27) beyond what it documents, and why; nowhere else does it.

Another version may have changed any of this. Then a name is not completed, a module's handlers are not called, or its
scheduler is less idle, and tests say so (tests/test_module.py, tests/test_benchmark.py, tests/test_command.py).
"""

import logging
import re
from collections.abc import Callable

from lockstep.config.configuration import Config
from lockstep.errors import BadInput

# How it says that it knows no target of a name.
NO_TARGET = re.compile(r"No rule to produce (\w+) \(if you use input functions")


def name_rows(checked: Config) -> None:
    """Have Snakemake name the rows where it is asked for something that is none of them, nor another target."""

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
