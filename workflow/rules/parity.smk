# The proof: a few steps of every row, held against those of the reference, which is `single` in float32.

for row in [None, *ROWS.values()]:
    trial = CONFIG.trial(row)

    rule:
        name:
            f"parity_{trial.name}"
        input:
            "results/data/data.json",
            [verdict()] if row else [],
            plan=f"results/data/plan/{trial.train.plan_name}.npz",
            code=code("parity", trial.strategy),
        output:
            verdict(row),
        log:
            f"results/logs/parity_{trial.name}.log",
        container:
            image(trial)
        # Nothing is timed, so two trials may share the machine; never with a row that is timed, which takes all of it.
        threads: max(1, workflow.cores // 2)
        params:
            row=trial.name,
            settings=trial.settings(),
        message:
            f"{trial.name}: does it train the same model?"
        shell:
            "python workflow/scripts/parity.py --config results/config.yaml --row {params.row:q} > {log:q} 2>&1"


rule parity:
    input:
        [verdict(row) for row in ROWS.values()],
