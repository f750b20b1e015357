# From a run's own checkpoint to a plain model, its test, and its predictions.
RUN = run_folder("{row}", "{n}", "{rep}")


# Conversion and test are one job, because starting Python and importing PyTorch takes most of the time of each.
rule evaluate:
    input:
        RUN / paths.RECORD,
        RUN / paths.CHECKPOINT,
        ancient(READY),
        # The first repetition comes before the others, which reuse its test if they end with the same weights.
        lambda wildcards: ancient(first_test(wildcards)) if wildcards.rep != "1" else [],
        code=lambda wildcards: code("evaluate", ROWS[wildcards.row].strategy),
    output:
        directory(RUN / paths.MODEL),
        RUN / paths.TEST_REPORT,
        # Not marked for Snakemake's report, which refuses to be made if a failed row lacks it; the page has its figures.
        RUN / paths.TEST_TEXT,
        RUN / paths.TEST_PREDICTIONS,
    log:
        RUN / paths.EVALUATION_LOG,
    benchmark:
        paths.benchmark_file(RESULTS, "evaluate_{row}_n{n}_rep{rep}")
    # Tests follow all trainings, side by side, except those of the first block, which has an early table. If seeds vary,
    # quality is the question, and a benchmark that is interrupted after hours must show it, so tests come first.
    priority:
        lambda wildcards: (
            10 + 2 * len(CONFIG.order)
            if CONFIG.vary_seed
            else AFTER_FIRST_BLOCK if SEVERAL_BLOCKS and wildcards.rep == "1" else 0
        )
    container:
        lambda wildcards: image(ROWS[wildcards.row])
    params:
        run=lambda wildcards: str(run_folder(**wildcards)),
    message:
        "{wildcards.row}, repetition {wildcards.rep}: convert the checkpoint, test the model"
    shell:
        python("evaluate") + " {params.run:q} > {log:q} 2>&1"


rule predict:
    input:
        [RESULTS / row.folder(1) / paths.MODEL for row in ROWS.values()],
        ancient(READY),
        code=code("predict"),
    output:
        report(
            paths.predictions_file(RESULTS),
            caption="../report/captions/predictions.rst",
            category="Report",
            labels={"what": "the same texts through every model"},
        ),
        touch(paths.predictions_file(RESULTS).with_name(paths.COMPLETE)),
    log:
        paths.log_file(RESULTS, "predict"),
    benchmark:
        paths.benchmark_file(RESULTS, "predict")
    container:
        IMAGES["torch"]
    params:
        predict=CONFIG.source["predict"],
    message:
        "predict: the same texts through every model"
    shell:
        command("predict") + " 2> {log:q}"
