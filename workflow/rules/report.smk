# The report over all rows. Made last, so that it holds the predictions too.


rule report:
    input:
        all_runs(paths.RECORD, paths.TEST_REPORT),
        [verdict(CONFIG.trial(row)) for row in ROWS.values()],
        profiles(),
        paths.peak_file(RESULTS),
        paths.predictions_file(RESULTS),
        code=code("report"),
        templates=[
            "workflow/report/report.html.j2",
            "workflow/report/layout.html.j2",
            "workflow/report/parts.html.j2",
            "workflow/report/paper.html.j2",
            "workflow/report/take_home.html.j2",
            "workflow/report/report.md.j2",
        ],
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
