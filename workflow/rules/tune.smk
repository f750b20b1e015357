# The search for this machine's fastest recipe. Asked for by name: nothing depends on it.
TRIED = CONFIG.tried("base", {"strategy": "recipe"})


rule tune:
    input:
        DATA,
        plan=f"results/data/plan/{TRIED.plan_name}.npz",
        code=code("tune", "recipe"),
    output:
        "results/tune/tuned.yaml",
        "results/tune/tries.csv",
    log:
        "results/logs/tune.log",
    container:
        image(TRIED)
    threads: workflow.cores
    params:
        tune=CONFIG.source["tune"],
        train=CONFIG.source["train"],
        hardware=TRIED.deciding()["hardware"],
    message:
        "tune: which recipe is fastest here?"
    shell:
        "python workflow/scripts/tune.py --config results/config.yaml 2> {log:q}"
