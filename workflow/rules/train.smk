# One training rule for each repetition of each row, `train_<row>_<repetition>`, and a rule `<row>` for the row's tests.
# A training takes all cores, so no other job of the workflow runs beside it; priorities order them into blocks.
# Rules that start training processes have no `benchmark:`, with which Snakemake reads all of their memory maps twice a
# second: on two cores that took a tenth of a core.

for place, (row, repeat) in enumerate(CONFIG.order):
    if row.name not in ROWS:
        continue
    folder = RESULTS / row.folder(repeat)

    rule:
        name:
            f"train_{row.name}_{repeat}"
        input:
            training_input(row, folder / paths.RECORD),
            code=training_code(row),
        output:
            folder / paths.RECORD,
            folder / paths.LEDGER,
            folder / paths.ENVIRONMENT,
            directory(folder / paths.CHECKPOINT),
        log:
            folder / paths.LOG,
        priority: 10 + len(CONFIG.order) - place
        container:
            image(row)
        threads: whole_machine
        resources:
            **lockstep.resources(row),
        params:
            row=row.name,
            repeat=repeat,
            settings=row.deciding(),
            dropout=CONFIG.model.dropout,
        message:
            f"{row.name}, repetition {repeat}: train on {row.hardware.devices} x {row.hardware.device}"
        shell:
            lockstep.on_nodes(
                row,
                command("launch") + " --row {params.row:q} --repeat {params.repeat:q}",
            )


for row in ROWS.values():

    rule:
        name:
            row.name
        input:
            run_files(row, paths.TEST_REPORT),
            MISSING,
