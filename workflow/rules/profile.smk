# Where a step's time goes: a few steps of every row, recorded in a separate run. It is not timed, but runs alone too.

for row in ROWS.values() if CONFIG.profile.steps else ():
    profiled = CONFIG.profiled(row)

    rule:
        name:
            f"profile_{row.name}"
        input:
            training_input(profiled, RESULTS / profiled.folder(1) / paths.PROFILE),
            code=training_code(profiled),
        output:
            RESULTS / profiled.folder(1) / paths.PROFILE,
        log:
            RESULTS / profiled.folder(1) / paths.LOG,
        container:
            image(row)
        threads: whole_machine
        resources:
            **lockstep.resources(profiled),
        params:
            row=row.name,
            settings=profiled.deciding(),
            profile=CONFIG.source["profile"],
        message:
            f"{row.name}: where does a step's time go?"
        shell:
            lockstep.on_nodes(
                profiled, command("launch") + " --row {params.row:q} --profile"
            )


rule profile:
    input:
        profiles(),
        MISSING,
