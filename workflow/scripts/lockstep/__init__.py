"""Lockstep: which PyTorch training strategy is fastest here, and does it still train the same model?

The packages and modules, from the ground up; each imports only from those above it (tests/test_rooms.py). Tasks and
strategies are loaded by name (config/registry.py), so adding one means adding a file:

    errors, paths, files, caches, stats, terminal    exceptions and exit codes, the layout of folders, atomic files
    provenance, nvml    the project's commit and other programs' answers; NVIDIA's library about GPUs
    config/      the configuration, its rows, and this machine's hardware
    data/        examples, from files or the network to arrays; the plan: which samples make up each step
    model/       models and their tokenizers, optimizer and schedule, and the operations of training
    tasks/       what is trained, one file each: how examples become batches, the model, loss, scores and test
    strategies/  how it is trained, one file each, with the differences from single.py
    run/         around a run's processes, without PyTorch: start, watch and end them; the files of a run
    rank/        inside a process that trains: replaying the plan, the clock, readback, checkpoints, the dev split
    session      what a training loop of one's own imports, to train by Lockstep's plan and clock
    columns      the columns of the table: where each value comes from, and how it is shown
    analysis/    whether results are up to date, and how many more runs `repeats: auto` needs
    proof/       proofs that a row trains the same model as single, and checks that its runs were fair
    evaluation   the test of a trained model
    report/      the summary of all runs, and the page
    frames, records/    a results folder as pandas frames, for notebooks; results to pass on, and a board of them
    script/      proofs and gates of users' own scripts
    forecast/    how much memory and time a row takes, before it runs
    cli, trust, tuning, network    the base of commands; checks before Snakemake; two searches
    inside_snakemake, remaking, workflow    where Snakemake is used beyond what it documents; what makes a rule run
                 again; the Snakefile's other helpers
    view/        the terminal view while Snakemake works
    outside      the command where there is no clone
"""

import sys
import warnings

__version__ = "0.1.0"


def _say_interrupted(kind, error, traceback):
    """Make Ctrl-C end a program with one word, even during imports, and while Snakemake plans its jobs."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        # Suppress follow-up warnings about coroutines that were never awaited and half-made event loops.
        warnings.simplefilter("ignore", RuntimeWarning)
        sys.unraisablehook = lambda unraisable: None
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_interrupted


def load(folder="results"):
    """A results folder as pandas frames and pictures, for notebooks (lockstep/frames.py)."""
    import lockstep.frames  # not `from`: remaking.py follows that, and every rank would depend on the report

    return lockstep.frames.load(folder)
