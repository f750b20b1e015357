# The report over all rows. Made last, so that it holds the predictions too.


rule report:
    input:
        all_runs("record.json", "test/report.json"),
        [verdict(CONFIG.trial(row)) for row in ROWS.values()],
        profiles(),
        "results/data/peak.json",
        "results/predict/predictions.csv",
        code=code("report"),
        templates=["workflow/report/report.html.j2", "workflow/report/report.md.j2"],
    output:
        report(
            "results/report/report.html",
            caption="../report/captions/page.rst",
            category="Report",
            labels={"what": "the page"},
        ),
        "results/report/report.md",
        touch("results/report/.complete"),
        report(
            "results/report/summary.csv",
            caption="../report/captions/table.rst",
            category="Report",
            labels={"what": "all rows as a table"},
        ),
        "results/report/summary.json",
        report(
            directory("results/report/plots"),
            patterns=["{name}.svg"],
            caption="../report/captions/picture.rst",
            category="Pictures",
            labels={"picture": "{name}"},
        ),
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
