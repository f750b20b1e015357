# Everything that is fixed before any strategy runs.


rule prepare:
    input:
        code=code("prepare"),
        data=lockstep.data_files(CONFIG),
    output:
        DATA,
        MISSING,
    log:
        "results/logs/prepare.log",
    benchmark:
        "results/benchmarks/prepare.tsv"
    container:
        IMAGES["torch"]
    threads: workflow.cores
    message:
        "prepare: read, split and tokenise the data; write the initial weights"
    shell:
        "python workflow/scripts/prepare.py --config results/config.yaml > {log:q} 2>&1"


rule plan:
    input:
        DATA,
        code=code("plan"),
    output:
        "results/data/plan/{plan}.npz",
        "results/data/plan/{plan}.json",
    log:
        "results/logs/plan_{plan}.log",
    benchmark:
        "results/benchmarks/plan_{plan}.tsv"
    container:
        IMAGES["torch"]
    message:
        "plan {wildcards.plan}: which samples make up each step"
    shell:
        "python workflow/scripts/plan.py --config results/config.yaml --plan {wildcards.plan:q} > {log:q} 2>&1"


rule peak:
    input:
        code=code("peak"),
    output:
        "results/data/peak.json",
    log:
        "results/logs/peak.log",
    benchmark:
        "results/benchmarks/peak.tsv"
    container:
        IMAGES["torch"]
    threads: workflow.cores
    params:
        precisions=sorted({row.precision for row in ROWS.values()}),
    message:
        "peak: how many operations a second can this CPU do?"
    shell:
        "python workflow/scripts/peak.py --config results/config.yaml > {log:q} 2>&1"
