"""Lockstep: which PyTorch training strategy is fastest here, and does it still train the same model?

Modules, from the ground up; each imports only from those above it:

    errors, files      what can go wrong, how files are written and hashed
    hardware           devices, cores, threads
    strategies/*       how processes start, wrap the model, go backward, step, gather and save
    config             the validated configuration and its rows
    sources, corpus    rows of text and label, from files, the network, or the embedded generator
    plan               which samples make up each optimizer step
    data               splitting and tokenising
    tokens             tokenised splits, batches
    models             the model, its initial weights, its optimizer and schedule
    clock, environment what is timed and when; what it ran on
    record             progress, the run record, the ledger
    processes          starting a run's processes, watching them, ending them all
    checkpoint         a strategy's own checkpoint -> a plain Hugging Face folder
    training           the one training loop
    runs               one run, from its settings to its record
    evaluation         predictions and the classification report
    parity             the proof that a row trains the same model as single
    charts, reporting  the report
    terminal, cli      tables in a terminal; what all commands share
    workflow           what the Snakefile asks
"""

__version__ = "0.1.0"
