"""Lockstep: which PyTorch training strategy is fastest here, and does it still train the same model?

Modules, from the ground up; each imports only from those above it:

    errors, files      what can go wrong, how files are written and hashed
    hardware           devices, cores, threads
    strategies/*       how processes join, wrap the model, go backward, step, gather and save
    config             the validated configuration and its rows
    sources, corpus    rows of text and label, from files, the network, or the embedded generator
    plan               which samples make up each optimizer step
    data               splitting and tokenising
    tokens             tokenised splits, batches
    models             the model, its initial weights, its optimizer and schedule
    clock, memory, energy, environment   what is timed and when; what else a run took; what it ran on
    metrics            how much work a training is, and what share of the devices' peak was reached
    record             progress, the run record, the ledger
    launchers          the commands that start a run's processes
    ties               a run's folder is its own; it ends with its launcher, and that with Snakemake
    processes, watcher starting a run's processes, watching them, ending them all; what else uses the machine
    checkpoint         a strategy's own checkpoint -> a plain Hugging Face folder
    session, replay, development, readback   the plan as one rank trains it; dev split; settings as they are live
    training           one rank of a run; profiling: where a step's time goes
    runs               one run, from its settings to its record
    evaluation         predictions and the classification report
    parity             the proof that a row trains the same model as single
    staleness          whether a result was made with the settings that its row has now
    stats, summary     medians, ratios and ranks of all runs
    words, verdict     the report's words in each language, and its first lines
    charts, pictures, reporting   the report's pictures and files
    fairness, comparison   the rules of a fair run; two results folders side by side
    terminal, cli      tables in a terminal; what all commands share
    trust, workflow    what is refused before Snakemake reads it; what the Snakefile asks
"""

import sys

__version__ = "0.1.0"


def _say_interrupted(kind, error, traceback):
    """Ctrl-C ends a program with a word, also while it imports what it needs, and Snakemake while it plans its jobs."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_interrupted
