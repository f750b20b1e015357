# From a run's own checkpoint to a plain model, its test, and its predictions.
RUN = "results/runs/{row}/n{n}/rep{rep}"


rule convert:
    input:
        f"{RUN}/record.json",
        f"{RUN}/native",
        code=lambda wildcards: code("convert", ROWS[wildcards.row].strategy),
    output:
        directory(f"{RUN}/model"),
    log:
        f"{RUN}/convert.log",
    benchmark:
        "results/benchmarks/convert_{row}_n{n}_rep{rep}.tsv"
    container:
        IMAGES["torch"]
    params:
        run=run_folder,
    message:
        "{wildcards.row}, repetition {wildcards.rep}: convert the checkpoint"
    shell:
        "python workflow/scripts/convert.py {params.run:q} > {log:q} 2>&1"


rule test:
    input:
        f"{RUN}/model",
        code=code("test"),
    output:
        f"{RUN}/test/report.json",
        f"{RUN}/test/report.txt",
        f"{RUN}/test/predictions.csv",
    log:
        f"{RUN}/test.log",
    benchmark:
        "results/benchmarks/test_{row}_n{n}_rep{rep}.tsv"
    container:
        IMAGES["torch"]
    params:
        run=run_folder,
    message:
        "{wildcards.row}, repetition {wildcards.rep}: test"
    shell:
        "python workflow/scripts/test.py {params.run:q} > {log:q} 2>&1"


rule predict:
    input:
        [f"results/{row.folder(1)}/model" for row in ROWS.values()],
        code=code("predict"),
    output:
        "results/predict/predictions.csv",
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
