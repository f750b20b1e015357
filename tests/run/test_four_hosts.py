"""config/large.yaml to its end, at a small size, on eight processes over four hosts (tests/hosts.py)."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

from lockstep import paths
from lockstep.files import read_json
from tests.conftest import copy_project
from tests.hosts import hosts

ROWS = ("fsdp", "hsdp", "deepspeed", "tp_fsdp", "pp", "cp")
# In fp32, so that rows may be held against each other tightly; otherwise as the file has it.
SMALL = (
    "model={hidden_size: 64, layers: 4, heads: 4}",
    "data={max_length: 32, limit: 700}",
    "train={max_steps: 8, precision: fp32}",
    "hardware={device: cpu, nodes: 4, processes: 2, threads: 1, oversubscribe: true, timeout: 300}",
    "repeats=1",
    "retries=0",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rows_of_large_yaml_train_one_model_on_four_hosts(tmp_path):
    """All rows are timed by eight processes, proven, converted, tested and reported."""
    place = copy_project(tmp_path)
    serve = ("python", "workflow/scripts/launch.py", "--config", "results/config.yaml", "--node-rank")
    lead = ("snakemake", "--cores", "all", "--configfile", "config/large.yaml", "--config", *SMALL)
    options = {"cwd": place.folder, "env": place.environment(), "start_new_session": True}
    with hosts(4) as four:
        serving = [four.start(number, *serve, str(number), **options) for number in (1, 2, 3)]
        try:
            leading = four.start(0, *lead, **options)
            said, _ = leading.communicate(timeout=840)
        finally:
            for process in serving:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            served = [process.communicate(timeout=60)[0] for process in serving]
        assert leading.returncode == 0, said + "".join(served)
    assert all(f"{row}: done" in each for row in ROWS for each in served), served
    runs = {row: place.path(f"results/runs/{row}/n8/rep1") for row in ROWS}
    records = {row: read_json(folder / paths.RECORD) for row, folder in runs.items()}
    for row, record in records.items():
        assert [node["host"] for node in record["nodes"]] == four.names, row
        assert {node["interface"] for node in record["nodes"]} == {"eth0"}
        with np.load(runs[row] / paths.LEDGER) as ledger:
            # Each sample of the plan once, by the ranks that count of all four hosts.
            assert len(ledger["rank"]) == 8 * 64, row
            assert set(ledger["rank"] // 2) == {0, 1, 2, 3}, row
        verdict = read_json(place.path(f"results/parity/{row}/n4/rep1") / paths.VERDICT)
        assert verdict["proof"] == "equal", verdict
    assert records["pp"]["settings"]["options"]["layers"] == 2
    assert records["hsdp"]["settings"]["options"].items() >= {"replicate": 2, "shard": 4}.items()
    for row in ROWS[1:]:
        assert np.allclose(records[row]["losses"], records["fsdp"]["losses"], rtol=0, atol=2e-5), row
    models = {row: load_file(folder / paths.MODEL / "model.safetensors") for row, folder in runs.items()}
    for row in ROWS[1:]:
        assert models[row].keys() == models["fsdp"].keys()
        distance = max((models[row][name] - weight).abs().max() for name, weight in models["fsdp"].items())
        assert distance < 1e-3, row
    checked = subprocess.run(
        [sys.executable, str(paths.SCRIPTS / "check.py"), "results"], cwd=place.folder, capture_output=True, text=True
    )
    # The four hosts are one machine, so that each takes the ranks of the others for other programs.
    breaches = checked.stdout.partition(f"{len(ROWS)} runs of {len(ROWS)} rows")[0].splitlines()
    assert breaches, checked.stdout + checked.stderr
    assert not [line for line in breaches if "it was disturbed: " not in line and "repetition" not in line], breaches
    print(json.dumps({row: record["losses"][-1] for row, record in records.items()}))
