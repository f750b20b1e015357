# The report on all rows. It is made last, so that it includes the predictions.


rule report:
    input:
        all_runs(paths.RECORD, paths.TEST_REPORT),
        [verdict(CONFIG.trial(row)) for row in ROWS.values()],
        profiles(),
        paths.peak_file(RESULTS),
        paths.predictions_file(RESULTS),
        code=code("report"),
        templates=remaking.templates(),
    output:
        report(
            REPORT / paths.PAGE,
            caption="../report/captions/page.rst",
            category="Report",
            labels={"what": "the page"},
        ),
        REPORT / paths.MARKDOWN,
        touch(REPORT / paths.COMPLETE),
        report(
            REPORT / paths.TABLE,
            caption="../report/captions/table.rst",
            category="Report",
            labels={"what": "all rows as a table"},
        ),
        REPORT / paths.SUMMARY,
        [REPORT / name for name in paths.FOR_A_PAPER],
        report(
            directory(REPORT / paths.PLOTS),
            patterns=["{name}.svg"],
            caption="../report/captions/picture.rst",
            category="Pictures",
            labels={"picture": "{name}"},
        ),
    log:
        paths.log_file(RESULTS, "report"),
    benchmark:
        paths.benchmark_file(RESULTS, "report")
    container:
        IMAGES["torch"]
    params:
        rows=list(CONFIG.rows),
        repeats=CONFIG.repeats,
    message:
        "report: gather all rows"
    shell:
        command("report") + " 2> {log:q}"


rule first_table:
    input:
        block_runs(1, paths.RECORD),
        block_runs(1, paths.TEST_REPORT),
    output:
        touch(paths.first_table_file(RESULTS)),
    log:
        paths.log_file(RESULTS, "first_table"),
    priority: AFTER_FIRST_BLOCK
    container:
        IMAGES["torch"]
    # All cores, so that no timed run is beside it.
    threads: workflow.cores
    message:
        "the table after the first block"
    shell:
        command("report") + " --first 2> {log:q}"
