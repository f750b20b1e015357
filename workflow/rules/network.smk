# What communication between the ranks of this machine costs. No rule depends on it, so it runs only if it is named.
rule network:
    input:
        code=code("network"),
    output:
        paths.network_file(RESULTS),
    log:
        paths.log_file(RESULTS, "network"),
    container:
        IMAGES["torch"]
    threads: whole_machine
    resources:
        timed=1,
    params:
        hardware=CONFIG.source["hardware"],
    message:
        "network: what does communication between ranks cost here?"
    shell:
        command("network") + " 2> {log:q}"
