# One training rule for each row of the table, `train_<row>`, and `<row>` for that row and what follows from it.
# A training job takes all cores, so nothing of the workflow runs beside it.

for row in ROWS.values():
    folder = f"results/{row.folder('{rep}')}"

    rule:
        name:
            f"train_{row.name}"
        input:
            "results/data/data.json",
            plan=f"results/data/plan/{row.train.plan_name}.npz",
            code=code("launch", row.strategy),
        output:
            f"{folder}/record.json",
            f"{folder}/ledger.npz",
            f"{folder}/env.json",
            directory(f"{folder}/native"),
        log:
            f"{folder}/run.log",
        benchmark:
            f"results/benchmarks/train_{row.name}_rep{{rep}}.tsv"
        priority: 10
        container:
            IMAGES["torch"]
        threads: workflow.cores
        params:
            row=row.name,
            settings=row.settings(),
            dropout=CONFIG.model.dropout,
        message:
            f"{row.name}, repetition {{wildcards.rep}}: train on {row.hardware.processes} x {row.hardware.device}"
        shell:
            "python workflow/scripts/launch.py --config results/config.yaml"
            " --row {params.row:q} --repeat {wildcards.rep:q}"

    rule:
        name:
            row.name
        input:
            run_files(row, "test/report.json"),
