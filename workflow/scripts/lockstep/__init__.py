"""Lockstep: which PyTorch training strategy is fastest here, and does it still train the same model?

From the ground up; each imports only from those above it (tests/test_rooms.py). Tasks and strategies are loaded by
their names, in config/registry.py, so that a file put beside them is one more:

    errors, paths, files, stats, terminal    what can go wrong, where things are, how files are written, statistics
    provenance, nvml    what git and other programs say of this project, and NVIDIA's library of its GPUs
    config/      what is asked for, and what this machine has for it
    data/        examples, from files or the network to arrays; the plan: which samples make up each step
    model/       models and their tokenizers, the optimizer and schedule, and how much work training it is
    tasks/       what is trained: one file each; how examples become batches, the model, loss, scores and test
    strategies/  how it is trained: one file each, in which stands what differs from single.py
    run/         around a run's processes, without PyTorch: starting, watching, ending them; what they leave behind
    rank/        inside a process that trains: replaying the plan, the clock, readback, checkpoints, the dev split
    proof/       whether a row trains the same model as single, and whether its runs were fair
    report/      evaluation, the summary of all runs, and the page
    cli, trust, tuning, workflow    what commands share; what is refused unread; the search; what the Snakefile asks
    view/        what people see while Snakemake works
"""

import sys
import warnings

__version__ = "0.1.0"


def _say_interrupted(kind, error, traceback):
    """Ctrl-C ends a program with a word, also while it imports what it needs, and Snakemake while it plans its jobs."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        # What was cut off has no more to say: a coroutine that was never awaited, an event loop that was half made.
        warnings.simplefilter("ignore", RuntimeWarning)
        sys.unraisablehook = lambda unraisable: None
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_interrupted
