# The report over all rows. Made last, so that it holds the predictions too.


rule report:
    input:
        [
            run_files(row, file)
            for row in ROWS.values()
            for file in ("record.json", "test/report.json")
        ],
        [verdict(row) for row in ROWS.values()],
        "results/predict/predictions.csv",
        code=code("report"),
        templates=["workflow/report/report.html.j2", "workflow/report/report.md.j2"],
    output:
        "results/report/report.html",
        "results/report/report.md",
        "results/report/summary.csv",
        "results/report/summary.json",
        directory("results/report/plots"),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    container:
        IMAGES["torch"]
    params:
        rows=list(CONFIG.rows),
        repeats=CONFIG.repeats,
    message:
        "report: gather all rows"
    shell:
        "python workflow/scripts/report.py --config results/config.yaml 2> {log:q}"
