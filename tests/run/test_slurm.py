"""Through a real Slurm of two nodes, where there is one: profiles/slurm submits the benchmark, and jobs carry on."""

import csv
import json
import shutil
import subprocess
import time

import psutil
import pytest

from lockstep import paths
from tests.conftest import copy_project

pytestmark = pytest.mark.slow
# Of a machine whose nodes may be one and the same, so its cores are said to be few, and are shared.
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, global_batch: 32, eval_every: 5}
hardware: {device: cpu, processes: 1, threads: 1, node_cores: 1, node_gpus: 0}
profile: {steps: 0}
repeats: 1
retries: 0
rows: {all_threads: null, dataparallel: null, ddp_spawn: null, ddp_amp: null, horovod: null, deepspeed: null,
       accelerate: null, trainer: null, fabric: null, fsdp: null, ddp: {strategy: ddp, nodes: 2}}
"""


def nodes(state: str) -> list[str]:
    asked = ["sinfo", "-h", "-N", "-t", state, "-o", "%N"]
    return subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30).stdout.split()


def queue(state: str, what: str) -> list[str]:
    """What squeue says of the first job in a state."""
    asked = ["squeue", "-h", "-t", state, "-o", what]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    return lines[0].split() if lines else []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    if not shutil.which("sinfo") or len(nodes("idle")) < 2:
        pytest.skip("needs: a Slurm with two idle nodes")
    place = copy_project(tmp_path_factory.mktemp("slurm"))
    place.path("small.yaml").write_text(CONFIG)
    return place


def submit(*arguments: str) -> list[str]:
    return ["snakemake", *arguments, "--profile", "profiles/slurm", "--configfile", "small.yaml"]


@pytest.mark.ci
def test_the_benchmark_is_submitted_and_a_row_trains_on_two_nodes(place):
    done = place.run(*submit(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with place.path("results/report/summary.csv").open() as stream:
        rows = {row["row"]: row for row in csv.DictReader(stream)}
    assert {name: (row["status"], row["proof"]) for name, row in rows.items()} == {
        "single": ("ok", "equal"),
        "ddp": ("ok", "equal"),
    }
    single, ddp = (
        json.loads(place.path(f"results/runs/{run}/rep1/record.json").read_text()) for run in ("single/n1", "ddp/n2")
    )
    assert single["session"] == ddp["session"]  # one call of Snakemake's, though each was a job
    assert sorted(node["host"] for node in ddp["nodes"]) == sorted(nodes("idle"))[:2]
    assert "Nothing to be done" in place.run(*submit()).stderr


def test_a_job_whose_node_goes_down_carries_on_on_another(place):
    train = "train={epochs: 400, eval_every: 5000, global_batch: 32, checkpoint_every: 200, keep: 2}"
    started = subprocess.Popen(
        [*submit("train_single_1"), "--config", train],
        cwd=place.folder,
        env=place.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = place.path("results/runs/single/n1/rep1")
    deadline = time.monotonic() + 200
    while not paths.saved_states(run):
        assert started.poll() is None, started.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job, node = queue("running", "%A %N")
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
    try:
        while not queue("pending", "%A"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        # Its daemon still answers, so it would be back at once; and a requeued job waits for two minutes.
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"], check=True)
        subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)
        said = started.communicate(timeout=300)[0]
    finally:
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=True)
        started.kill()
        # The node is not down in truth, so nothing ends the Snakemake there, which waits for a file that never comes.
        for process in psutil.process_iter(["cmdline"]):
            if str(place.folder) in " ".join(process.info["cmdline"] or ()):
                process.kill()
    assert started.returncode == 0, said
    record = json.loads((run / paths.RECORD).read_text())
    assert record["resumed"]
    assert record["steps"] == len(record["losses"])
