# The proof: a few steps of every row, compared with references, which are steps of `single` in the same precision and in
# float64. `prove_<row>` makes a verdict, whatever it is; `parity_<row>` and `parity` show verdicts, and fail if a row is
# not proven.

REFERENCES = {
    reference.name: reference
    for row in ROWS.values()
    for reference in CONFIG.references(row).values()
}
TRIALS = {row.name: CONFIG.trial(row) for row in ROWS.values()}

for trial in [*REFERENCES.values(), *TRIALS.values()]:

    rule:
        name:
            f"prove_{trial.name}"
        input:
            training_input(trial, verdict(trial)),
            [verdict(each) for each in CONFIG.references(ROWS[trial.name]).values()]
            if trial.name in ROWS
            else [],
            code=training_code(trial),
        output:
            verdict(trial),
        log:
            paths.log_file(RESULTS, f"prove_{trial.name}"),
        container:
            image(trial)
        # Trials are not timed, so two may share the machine, but never with a timed row, which takes all of it.
        threads: half_a_machine
        params:
            row=trial.name,
            settings=trial.deciding(),
        message:
            f"{trial.name}: does it train the same model?"
            if trial.name in ROWS
            else f"{trial.name}: the reference of the proof"
        shell:
            command("parity") + " --exit-zero --row {params.row:q} > {log:q} 2>&1"


for trial in TRIALS.values():

    rule:
        name:
            f"parity_{trial.name}"
        input:
            verdict(trial),
        log:
            paths.log_file(RESULTS, f"parity_{trial.name}"),
        container:
            IMAGES["torch"]
        params:
            row=trial.name,
        message:
            f"{trial.name}: the verdict"
        shell:
            command("parity") + " --show --row {params.row:q} 2> {log:q}"


rule parity:
    input:
        [verdict(trial) for trial in TRIALS.values()],
        MISSING,
    log:
        paths.log_file(RESULTS, "parity"),
    container:
        IMAGES["torch"]
    message:
        "the verdicts on all rows"
    shell:
        command("parity") + " --show 2> {log:q}"
