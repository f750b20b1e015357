# With `repeats: auto`: after each block it is decided whether another one follows, and of which rows. What that asks for
# is known only then, so this is a checkpoint, and what needs all runs asks for them by all_runs (common.smk).


checkpoint decide:
    input:
        lambda wildcards: block_runs(int(wildcards.block), paths.RECORD),
        # The last of the blocks that hold every row follows all of them.
        [run_files(row, paths.RECORD) for row in ROWS.values()],
        code=code("decide"),
    output:
        paths.decision_file(RESULTS, "{block}"),
    log:
        paths.log_file(RESULTS, "decide_{block}"),
    priority: 10 + len(CONFIG.order)
    container:
        IMAGES["torch"]
    # All cores, so that nothing is begun beside it that the next block would have to wait for.
    threads: workflow.cores
    params:
        budget=CONFIG.budget,
    message:
        "after block {wildcards.block}: does another one follow?"
    shell:
        command("decide") + " --block {wildcards.block:q} 2> {log:q}"
