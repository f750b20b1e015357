# The search for this machine's fastest recipe. No rule depends on it, so it runs only if it is named.
TRIED = CONFIG.tried("base", {"strategy": "recipe"})


rule tune:
    input:
        READY,
        plan=paths.plan_file(RESULTS, TRIED.plan_name),
        code=code("tune", "recipe"),
    output:
        paths.tune_folder(RESULTS) / paths.TUNED,
        paths.tune_folder(RESULTS) / paths.TRIES,
    log:
        paths.log_file(RESULTS, "tune"),
    container:
        image(TRIED)
    threads: whole_machine
    params:
        tune=CONFIG.source["tune"],
        train=CONFIG.source["train"],
        hardware=TRIED.deciding()["hardware"],
    message:
        "tune: which recipe is fastest here?"
    shell:
        command("tune") + " 2> {log:q}"
