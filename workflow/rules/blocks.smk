# With `repeats: auto`, this decides after each block whether another one follows, and with which rows. As the further
# runs are known only then, it is a checkpoint, and rules that need all runs use all_runs (common.smk).


checkpoint decide:
    input:
        lambda wildcards: block_runs(int(wildcards.block), paths.RECORD),
        # The decision after the first blocks, which contain every row, follows all of them.
        [run_files(row, paths.RECORD) for row in ROWS.values()],
        code=code("decide"),
    output:
        paths.decision_file(RESULTS, "{block}"),
    log:
        paths.log_file(RESULTS, "decide_{block}"),
    priority: 10 + len(CONFIG.order)
    container:
        IMAGES["torch"]
    # All cores, so that nothing is started beside it for which the next block would have to wait.
    threads: workflow.cores
    params:
        budget=CONFIG.budget,
    message:
        "after block {wildcards.block}: does another one follow?"
    shell:
        command("decide") + " --block {wildcards.block:q} 2> {log:q}"
