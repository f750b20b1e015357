# Everything that is fixed before a strategy runs.


rule prepare:
    input:
        code=code("prepare"),
        data=remaking.data_files(CONFIG),
    output:
        READY,
        MISSING,
    log:
        paths.log_file(RESULTS, "prepare"),
    benchmark:
        paths.benchmark_file(RESULTS, "prepare")
    container:
        IMAGES["torch"]
    threads: whole_machine
    message:
        "prepare: read, split and tokenise the data; write the initial weights"
    shell:
        command("prepare") + " > {log:q} 2>&1"


rule plan:
    input:
        READY,
        code=code("plan"),
    output:
        paths.plan_file(RESULTS, "{plan}"),
        paths.plan_summary_file(RESULTS, "{plan}"),
    log:
        paths.log_file(RESULTS, "plan_{plan}"),
    benchmark:
        paths.benchmark_file(RESULTS, "plan_{plan}")
    container:
        IMAGES["torch"]
    message:
        "plan {wildcards.plan}: which samples make up each step"
    shell:
        command("plan") + " --plan {wildcards.plan:q} > {log:q} 2>&1"


rule peak:
    input:
        code=code("peak"),
    output:
        paths.peak_file(RESULTS),
    log:
        paths.log_file(RESULTS, "peak"),
    benchmark:
        paths.benchmark_file(RESULTS, "peak")
    container:
        IMAGES["torch"]
    threads: whole_machine
    params:
        precisions=sorted({row.precision for row in ROWS.values()}),
    message:
        "peak: how many operations per second can this CPU do?"
    shell:
        command("peak") + " > {log:q} 2>&1"
