# With `repeats: auto`: after each block it is decided whether another one follows, and of which rows. What that asks for
# is known only then, so this is a checkpoint, and what needs all runs asks for them by a function.


def block_runs(block, file):
    """A file of each run in a block."""
    names = ROWS
    if block not in CONFIG.first_repetitions:
        names = lockstep.next_block(checkpoints.decide.get(block=block - 1).output[0])
    return [RESULTS / ROWS[name].folder(block) / file for name in names if name in ROWS]


def all_runs(*files):
    """These files of every run, as an input function: it waits for what is decided on the way."""

    def inputs(wildcards):
        wanted = []
        for block in CONFIG.repetitions:
            several = [path for file in files for path in block_runs(block, file)]
            if not several:
                break
            wanted += several
        return wanted

    return inputs


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


# The first answer early: after the first block of several the report is written over what there is by then (rule
# first_table). It costs some seconds; the tests of that block's models are only done earlier than the others.
AFTER_FIRST_BLOCK = 10 + len(CONFIG.order) - len(CONFIG.rows) + 0.5
SEVERAL_BLOCKS = len(CONFIG.repetitions) > 1
