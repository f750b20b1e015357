# From a run's own checkpoint to a plain model, its test, and its predictions.
RUN = "results/runs/{row}/n{n}/rep{rep}"


# Conversion and test are one job, because most of what each takes is to start Python and import PyTorch.
rule evaluate:
    input:
        f"{RUN}/record.json",
        f"{RUN}/native",
        ancient(DATA),
        # The first repetition before the others, which take its test over where they end with the same weights.
        lambda wildcards: ancient(first_test(wildcards)) if wildcards.rep != "1" else [],
        code=lambda wildcards: code("evaluate", ROWS[wildcards.row].strategy),
    output:
        directory(f"{RUN}/model"),
        f"{RUN}/test/report.json",
        report(
            f"{RUN}/test/report.txt",
            caption="../report/captions/test.rst",
            category="Classification reports",
            labels={"row": "{row}", "repetition": "{rep}"},
        ),
        f"{RUN}/test/predictions.csv",
    log:
        f"{RUN}/evaluate.log",
    benchmark:
        "results/benchmarks/evaluate_{row}_n{n}_rep{rep}.tsv"
    # After all trainings, beside each other; where seeds vary, quality is what it is about, and a benchmark that is
    # interrupted after hours is to show it.
    priority: 10 + 2 * len(CONFIG.order) if CONFIG.vary_seed else 0
    container:
        lambda wildcards: image(ROWS[wildcards.row])
    params:
        run=run_folder,
    message:
        "{wildcards.row}, repetition {wildcards.rep}: convert the checkpoint, test the model"
    shell:
        "python workflow/scripts/evaluate.py {params.run:q} > {log:q} 2>&1"


rule predict:
    input:
        [f"results/{row.folder(1)}/model" for row in ROWS.values()],
        ancient(DATA),
        code=code("predict"),
    output:
        report(
            "results/predict/predictions.csv",
            caption="../report/captions/predictions.rst",
            category="Report",
            labels={"what": "the same texts through every model"},
        ),
        touch("results/predict/.complete"),
    log:
        "results/logs/predict.log",
    benchmark:
        "results/benchmarks/predict.tsv"
    container:
        IMAGES["torch"]
    params:
        predict=CONFIG.source["predict"],
    message:
        "predict: the same texts through every model"
    shell:
        "python workflow/scripts/predict.py --config results/config.yaml 2> {log:q}"
