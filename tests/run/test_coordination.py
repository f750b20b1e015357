"""Runs on several machines: two hosts with network stacks of their own, joined by a link that can be slowed and cut.

The hosts and their link are made by a script that lies beside this project where it is developed; elsewhere what needs
them is skipped, and what nodes say to each other is tested all the same.
"""

import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import yaml

from lockstep import paths
from lockstep.config import launchers, reading, registry
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.run import addresses, peers
from tests.conftest import PROJECT, copy_project

HOSTS = PROJECT.parent / "shared" / "tools" / "two-hosts.sh"
SMALL = [
    *("data.limit=700", "data.splits={train: .8, dev: .1, test: .1}", "model.hidden_size=32", "model.layers=1"),
    *("model.dropout=0", "train.epochs=2", "train.global_batch=31", "train.eval_every=7", "hardware.device=cpu"),
    *("hardware.oversubscribe=true", "hardware.threads=1", "hardware.processes=1", "hardware.timeout=60"),
    *("profile.steps=0", "retries=0"),
]
ROWS = {
    **{name: {} for name in ("ddp", "ddp_spawn", "deepspeed", "horovod", "accelerate", "trainer", "fabric", "fsdp")},
    "ddp by c10d": {"rendezvous": "c10d"},
    "ddp by launch": {"launcher": "launch"},
    "ddp by ray": {"launcher": "ray"},
    "ddp_spawn by tcp": {"rendezvous": "tcp"},
    "deepspeed by torchrun": {"launcher": "torchrun", "stage": 3},
    "accelerate by torchrun": {"launcher": "torchrun"},
    "zero_redundancy": {},
    "local_sgd by node": {"within": "node"},
}
IN_CI = ("ddp",)
OF_PODS = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, global_batch: 32, eval_every: 5}
hardware: {device: cpu, nodes: 2, processes: 1, threads: 1, timeout: 60}
profile: {steps: 0}
repeats: 1
retries: 0
rows: {all_threads: null, dataparallel: null, ddp_spawn: null, ddp_amp: null, horovod: null, deepspeed: null,
       accelerate: null, trainer: null, fabric: null, fsdp: null}
"""


def command(script: str, results: Path, *arguments: str, sets: list[str] = ()) -> list[str]:
    words = [word for pair in (*SMALL, *sets) for word in ("--set", pair)]
    return [sys.executable, str(paths.SCRIPTS / f"{script}.py"), "--results", str(results), *words, *arguments]


def on_host(number: int, words: list[str], **options) -> subprocess.Popen:
    there = [*("bash", str(HOSTS), "exec", f"h{number + 1}"), *words]
    usual = {"cwd": PROJECT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(there, **usual | options)


@pytest.fixture(scope="module")
def link():
    """Two hosts; a function that slows, cuts or mends their link."""
    if not HOSTS.is_file():
        pytest.skip(f"needs: {HOSTS}, which makes two hosts on one machine")
    if os.geteuid():
        pytest.skip("needs: root, to make two hosts on one machine")

    def do(*words: str) -> None:
        subprocess.run(["bash", str(HOSTS), *words], check=True, capture_output=True)

    try:
        subprocess.run(["bash", str(HOSTS), "up"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs: network namespaces ({error.stderr.strip().splitlines()[-1]})")
    do("ssh")
    yield do
    do("down")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Data and plan; and what one machine's two, and four, processes came to: `losses` by their number."""
    results = tmp_path_factory.mktemp("nodes") / "results"
    for script in ("prepare", "plan"):
        subprocess.run(command(script, results), cwd=PROJECT, check=True, capture_output=True)
    subprocess.run(command("launch", results, "--row", "single"), cwd=PROJECT, check=True, capture_output=True)
    return results


@pytest.fixture
def results(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "results"))


def start(results: Path, row: str, *arguments: str, sets: list[str] = ()) -> list[subprocess.Popen]:
    subprocess.run(command("plan", results, sets=sets), cwd=PROJECT, check=True, capture_output=True)
    shape = ["--row", row, "--nodes", "2", *arguments]
    return [
        on_host(number, command("launch", results, *shape, "--node-rank", str(number), sets=sets)) for number in (0, 1)
    ]


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """How each ended, and what it said; none may take for ever."""
    outcomes = []
    for process in processes:
        said, _ = process.communicate(timeout=200)
        outcomes.append((process.returncode, said))
    return outcomes


def train(results: Path, row: str, *arguments: str, sets: list[str] = ()) -> list[tuple[int, str]]:
    return ended(start(results, row, *arguments, sets=sets))


def wait_for(results: Path, row: str, step: int, number: int) -> np.ndarray:
    """Until each rank of a node has done so many steps: the node's table of them (run/progress.py)."""
    folder = results / paths.RUNS / row / "n2" / "rep1"
    file = paths.node_folder(folder, number) / paths.PROGRESS
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        table = np.fromfile(file, dtype=np.int64).reshape(-1, 5) if file.is_file() else np.zeros((1, 5))
        if len(table) and table[:, 2].min() >= step:
            return table
        time.sleep(0.02)
    raise AssertionError("no rank came so far")


def no_process_is_left(results: Path) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        if not any(str(results) in line for line in lines):
            return True
        time.sleep(0.2)
    return False


def options(given: dict) -> list[str]:
    return [f"rows={{x: {json.dumps(given)}}}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(name, processes, marks=[pytest.mark.ci] if name in IN_CI and processes == 2 else [])
        for name in ROWS
        for processes in (1, 2)
    ],
)
def test_two_hosts_train_the_same_model_as_one(link, results, name, processes):
    strategy = name.split(" by ")[0]
    asked = {"strategy": strategy} | ROWS[name]
    row = reading.parse({"rows": {"x": asked}}).rows["x"]
    if why := row.unavailable:
        pytest.skip(f"needs: {why}")
    sets = [*options(asked), f"hardware.processes={processes}"]
    (first, said), (second, theirs) = train(results, "x", sets=sets)
    assert (first, second) == (0, 0), said + theirs
    folder = results / f"runs/x/n{2 * processes}/rep1"
    record, alone = read_json(folder / paths.RECORD), read_json(results / "runs/single/n1/rep1" / paths.RECORD)
    same = 1 if row.other_model else len(alone["losses"])  # with local steps only the first one is single's
    assert np.allclose(record["losses"][:same], alone["losses"][:same], rtol=0, atol=1e-5)
    assert [node["host"] for node in record["nodes"]] == ["h1", "h2"]
    assert {node["interface"] for node in record["nodes"]} == {"eth0"}
    assert (record["world_size"], record["asked"]["hardware"]["nodes"]) == (2 * processes, 2)
    with np.load(folder / paths.LEDGER) as ledger:
        assert set(ledger["rank"]) == set(range(2 * processes))
    ranks = [read_json(paths.rank_summary(folder, rank)) for rank in range(2 * processes)]
    assert sorted((rank["node"], rank["local_rank"]) for rank in ranks) == [
        (node, local) for node in (0, 1) for local in range(processes)
    ]
    subprocess.run(
        [sys.executable, str(paths.SCRIPTS / "evaluate.py"), str(folder)], cwd=PROJECT, check=True, capture_output=True
    )
    assert read_json(folder / paths.TEST_REPORT)["support"] > 0
    assert no_process_is_left(results)


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_rank_elsewhere_is_named_on_both(link, results):
    processes = start(results, "ddp", sets=["train.epochs=400"])
    table = wait_for(results, "ddp", 3, 1)
    os.kill(int(table[0, 0]), signal.SIGKILL)
    for code, said in ended(processes):
        assert code == 1
        assert "failed: " in said
        assert "node 1 (h2): rank 1 died after step" in said
    assert "node 1 (h2): rank 1 died" in read_json(results / "runs/ddp/n2/rep1" / paths.FAILED)["reason"]
    assert no_process_is_left(results)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_supervisor_that_is_killed_ends_the_run_on_both(link, results, number):
    processes = start(results, "ddp", sets=["train.epochs=4000"])
    wait_for(results, "ddp", 3, number)
    (killed,) = [
        process
        for process in psutil.Process(processes[number].pid).children(recursive=True)
        if "launch.py" in " ".join(process.cmdline()) and process.name().startswith("python")
    ][:1]
    killed.kill()
    outcomes = ended(processes)
    code, said = outcomes[1 - number]
    assert code == 1
    assert f"node {number} (h{number + 1}) closed its connection" in said
    assert no_process_is_left(results)


@pytest.mark.slow
def test_a_link_that_is_cut_ends_the_run_and_it_carries_on_when_it_is_mended(link, results):
    sets = ["hardware.timeout=8", "train.checkpoint_every=5", "train.epochs=40"]
    link("slow", "2mbit")
    try:
        processes = start(results, "ddp", sets=sets)
        wait_for(results, "ddp", 12, 0)
        began = time.monotonic()
        link("cut")
        outcomes = ended(processes)
        assert time.monotonic() - began < 8 + 40
        assert [code for code, _ in outcomes] == [1, 1], outcomes
        assert "failed: " in outcomes[0][1]
        assert no_process_is_left(results)
    finally:
        link("mend")
    (first, said), (second, theirs) = train(results, "ddp", sets=sets[1:])
    assert (first, second) == (0, 0), said + theirs
    record = read_json(results / "runs/ddp/n2/rep1" / paths.RECORD)
    assert record["steps"] == 40 * 17


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_on_either_saves_one_state_and_the_run_carries_on(link, results, number):
    sets = ["train.checkpoint_every=1000", "train.epochs=60"]
    processes = start(results, "ddp", sets=sets)
    wait_for(results, "ddp", 20, number)
    for process in psutil.Process(processes[number].pid).children(recursive=True):
        if "launch.py" in " ".join(process.cmdline()) and process.name().startswith("python"):
            process.send_signal(signal.SIGTERM)
            break
    for code, said in ended(processes):
        assert code == 143, said
        assert "is saved" in said
    (first, said), (second, theirs) = train(results, "ddp", sets=sets)
    assert (first, second) == (0, 0), said + theirs
    assert "carries on from" in said
    assert read_json(results / "runs/ddp/n2/rep1" / paths.RECORD)["resumed"]


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["--set", "hardware.processes=2"], "settings.hardware.devices is 4 on node 1 (h2), but 2 on node 0 (h1)"),
        (["--set", "train.learning_rate=0.5"], "settings.train.learning_rate is 0.5 on node 1 (h2)"),
        (["--row", "fsdp"], "node 1 was started for fsdp, but node 0 for ddp"),
        (
            ["--set", "hardware.interface=eth7"],
            "hardware.interface: eth7 is not an interface of h2. It has: lo (127.0.0.1), eth0",
        ),
    ],
)
def test_a_node_that_is_unlike_the_first_is_named_on_both(link, results, there, message):
    shape = ["--row", "ddp", "--nodes", "2", "--node-rank"]
    processes = [on_host(0, command("launch", results, *shape, "0"))]
    processes.append(on_host(1, command("launch", results, *shape, "1", *there)))
    for code, said in ended(processes):
        assert code == 2
        assert said.splitlines()[-1].startswith("error: ")
        assert message in said
        assert "Traceback" not in said
    assert not (results / "runs/ddp").exists() or not list((results / "runs/ddp").rglob(paths.RECORD))


def test_who_is_missing_is_said_after_the_timeout(link, results):
    sets = ["hardware.timeout=3"]
    shape = ["--row", "ddp", "--nodes", "2", "--node-rank"]
    ((code, said),) = ended([on_host(0, command("launch", results, *shape, "0", sets=sets))])
    assert (code, "error: node 1 did not answer within 3 s" in said) == (2, True)
    ((code, said),) = ended([on_host(1, command("launch", results, *shape, "1", sets=sets))])
    assert (code, "error: node 0 did not call within 3 s" in said) == (2, True)


def test_two_nodes_of_one_number(link, results):
    shape = ["--row", "ddp", "--nodes", "2", "--node-rank", "1"]
    first = on_host(1, command("launch", results, *shape, sets=["hardware.timeout=30"]))
    lock = paths.nodes_folder(results) / "1" / paths.LOCK
    while not (lock.is_file() and lock.read_text()):
        time.sleep(0.1)
    ((code, said),) = ended([on_host(0, command("launch", results, *shape))])
    assert code == 2
    assert "on h2 has worked here since" in said
    for child in psutil.Process(first.pid).children(recursive=True):
        child.send_signal(signal.SIGINT)
    assert ended([first])[0][1].splitlines()[-1] == "interrupted"


# One rank of two, as a script that somebody writes by hand.
BY_HAND = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
total = torch.ones(1)
dist.all_reduce(total)
print("the sum is", total.item())
"""


@pytest.fixture
def firewall(link):
    """Both hosts drop what comes for other TCP ports than 29500 and 50000 to 50099; a function to have those chosen."""
    if not shutil.which("iptables"):
        pytest.skip("needs: iptables")

    def on_both(*words: str) -> None:
        for host in ("h1", "h2"):
            subprocess.run(["bash", str(HOSTS), "exec", host, *words], check=True, capture_output=True)

    def choose_from(ports: str) -> None:
        on_both("sysctl", "-w", f"net.ipv4.ip_local_port_range={ports}")

    rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", "29500,50000:50099"]
    on_both("iptables", "-A", *rule, "-j", "DROP")
    yield choose_from
    on_both("iptables", "-D", *rule, "-j", "DROP")
    choose_from("32768 60999")  # Linux's own


@pytest.mark.slow
def test_a_firewall_is_met_as_the_guide_says(firewall):
    """docs/guide/devices.md: what is said where MASTER_PORT is blocked, or only the others, and what helps."""

    def tried(port: str) -> list[str]:
        about = {"WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = [
            on_host(rank, [sys.executable, "-c", BY_HAND], env=os.environ | about | {"RANK": str(rank)})
            for rank in (0, 1)
        ]
        return [said for _, said in ended(ranks)]

    first, second = tried("29511")
    assert "1/2 clients joined" in first
    assert "The client socket has timed out after" in second
    assert all("Gloo connectFullMesh failed with" in said and "Connect timeout" in said for said in tried("29500"))
    firewall("50000 50099")
    assert all("the sum is 2.0" in said for said in tried("29500"))


@pytest.mark.slow
def test_what_pods_of_kubernetes_run_trains_a_benchmark(link, tmp_path):
    """profiles/kubernetes/benchmark.yaml, whose pods are told their number and the first one's address."""
    place = copy_project(tmp_path)
    place.path("small.yaml").write_text(OF_PODS)
    *_, job = yaml.safe_load_all(place.path("profiles/kubernetes/benchmark.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    words = [*container["command"], script.replace("/config/benchmark.yaml", "small.yaml")]
    pods = []
    for number in (0, 1):
        environment = place.environment() | {"NODE_RANK": str(number), "MASTER_ADDR": "h1"}
        pods.append(on_host(number, words, cwd=place.folder, env=environment, start_new_session=True))
    try:
        said, _ = pods[0].communicate(timeout=300)
    finally:
        for pod in pods:  # as Kubernetes ends the one that serves
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGTERM)
        served, _ = pods[1].communicate(timeout=60)
    assert pods[0].returncode == 0, said + served
    with place.path("results/report/summary.csv").open() as stream:
        rows = {row["row"]: row["status"] for row in csv.DictReader(stream)}
    assert rows == {"single": "ok", "ddp": "ok"}, served


# What needs no hosts.

ABOUT = {
    "results folder": "results",
    "Lockstep's code": "abc",
    "Python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "settings": {"hardware": {"devices": 2}},
    peers.GPUS: "NVIDIA H100 80GB HBM3",
    "files": {"plan": "1", "weights": "2"},
    "host": "h1",
}


@pytest.mark.parametrize(
    ("changes", "ahead", "message"),
    [
        ({"packages": {"torch": "2.12.0"}}, 0, "packages.torch is 2.12.0 on node 1, but 2.13.0 on node 0 (h1)"),
        ({"packages": {}}, 0, "packages.torch is missing on node 1"),
        ({"settings": {"hardware": {"devices": 4}}}, 0, "settings.hardware.devices is 4 on node 1, but 2"),
        ({"files": {"plan": "1", "weights": "3"}}, 0, "files.weights is 3 on node 1, but 2 on node 0"),
        (
            {peers.GPUS: "NVIDIA A100-SXM4-80GB"},
            0,
            "the model of its GPUs is NVIDIA A100-SXM4-80GB on node 1, but NVIDIA H100 80GB HBM3 on node 0 (h1). Take",
        ),
        ({"Lockstep's code": "abd"}, 0, "Lockstep's code is abd on node 1"),
        ({}, -3600, "the clock of node 1 differs from node 0's by -3600 s"),
    ],
)
def test_what_is_not_the_same_is_named(changes, ahead, message):
    assert peers.difference(ABOUT, ABOUT, "node 1", 0) == ""
    assert message in peers.difference(ABOUT, ABOUT | changes, "node 1", ahead)


def test_a_node_whose_driver_does_not_name_its_gpus_is_not_refused():
    untold = ABOUT | {peers.GPUS: ""}
    assert peers.difference(ABOUT, untold, "node 1", 0) == peers.difference(untold, ABOUT, "node 1", 0) == ""


def test_a_node_waits_for_what_snakemake_is_asked_for_and_heeds_what_it_is_asked_next(tmp_path):
    """launch.py --config results/config.yaml, started first, as docs/several-machines.md has it."""
    results, asked = tmp_path / "results", tmp_path / "results" / "config.yaml"
    words = ["--results", str(results), "--config", str(asked), "--node-rank", "1"]
    node = subprocess.Popen(
        [sys.executable, str(paths.SCRIPTS / "launch.py"), *words],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    listener = peers.Listener(results, "127.0.0.1")

    def answer(call: str, other: peers.Peer | None = None) -> peers.Peer:
        """The node, when it has answered a call for the row y; `other` is its connection, unless it is to connect."""
        run = {"row": "y", "kind": "runs", "repeat": 1, "nodes": 2, "folder": str(results / "y")}
        called = {"phase": peers.CALLING, "call": call, "run": run, "endpoint": ["127.0.0.1", 1]}
        if other:
            other.add(**called)
        deadline = time.monotonic() + 60
        while (other is None or other.read().get("call") != call) and time.monotonic() < deadline:
            for other in listener.admit():
                other.say(proof=peers.proof(listener.secret, 0), **called)
            time.sleep(0.2)
        return other

    try:
        assert node.stdout.readline() == f"waiting for {asked}, which Snakemake writes on node 0\n"
        hardware = {"device": "cpu", "processes": 1, "nodes": 2, "oversubscribe": True}
        default = dict.fromkeys(reading.parse({}).source["rows"])
        for row, says in (("x", "node 1 was started for x, but node 0 for y."), ("y", "can't reach node 0")):
            rows = default | {row: {"strategy": "ddp"}}
            asked.parent.mkdir(exist_ok=True)
            asked.write_text(yaml.safe_dump({"hardware": hardware, "rows": rows}), encoding="utf-8")
            other = answer(f"for {row}")
            assert other.last["phase"] == peers.FAILED
            assert says in other.last["reason"]
            other.add(phase=peers.OVER, code=0, reason="")
        asked.write_text("rows: {y: {strategy: none}}", encoding="utf-8")
        other = answer("unread")
        assert "'none' is not one of" in other.last["reason"]
        again = answer("a second attempt at the same run", other)
        assert again is other
        assert again.last["call"] == "a second attempt at the same run"
    finally:
        node.send_signal(signal.SIGINT)
        said, _ = node.communicate(timeout=30)
    assert said.splitlines()[-1] == "interrupted", said


def test_a_scheduler_says_which_node_this_is(monkeypatch):
    for name in ("SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert addresses.node_rank(None, 1) == 0
    with pytest.raises(BadInput, match="which of the 2 nodes is this"):
        addresses.node_rank(None, 2)
    with pytest.raises(BadInput, match="2 nodes are numbered from 0 to 1"):
        addresses.node_rank(2, 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert addresses.node_rank(None, 2) == 1
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert addresses.node_rank(None, 2) == 0
    assert addresses.node_rank(1, 2) == 1
    assert addresses.environment_endpoint() is None
    monkeypatch.setenv("MASTER_ADDR", "h1")
    assert addresses.environment_endpoint() == "h1"
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert addresses.endpoint(addresses.environment_endpoint()) == ("h1", 29400)


def test_hosts_are_a_list_or_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# mine\nh1 slots=2\n\nh2  slots=2 # the second\nh3\n")
    assert addresses.read_hosts(str(file), 2) == addresses.read_hosts(["h1", "h2"], 2) == ["h1", "h2"]
    for wrong in (["h1"], ["h1", "h1"]):
        with pytest.raises(BadInput, match="2 nodes need as many different hosts"):
            addresses.read_hosts(wrong, 2)
    for content, message in ((None, "can't be read"), (b"\xff\xfe\x00", "can't be read"), (b"", "none: 2 nodes need")):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(BadInput, match=message):
            addresses.read_hosts(str(tmp_path / "no" if content is None else file), 2)


def test_node_0_communicates_through_the_interface_that_is_asked_for_wherever_ranks_meet(monkeypatch):
    """As the other nodes do: they go through it to the endpoint, which a scheduler may have chosen."""
    there = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    found = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in there.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)

    def own(**asked) -> tuple[str, str]:
        hardware = {"device": "cpu", "nodes": 2, "oversubscribe": True} | asked
        config = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "ddp"}}})
        return addresses.own_address(config.rows["x"])

    assert own(endpoint="10.0.0.1:29400") == ("10.0.0.1", "eth0")
    assert own(endpoint="10.0.0.1:29400", interface="ib0") == ("10.0.0.1", "ib0")
    assert own(interface="ib0") == ("10.1.0.1", "ib0")
    with pytest.raises(BadInput, match=r"hardware\.interface: ib9 is not an interface of this machine"):
        own(endpoint="10.0.0.1", interface="ib9")


def test_a_wrong_endpoint_is_refused(monkeypatch):
    for wrong in ("h1:0", "h1:99999"):
        with pytest.raises(BadInput, match="from 1 to 65535"):
            addresses.endpoint(wrong)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with pytest.raises(BadInput, match="MASTER_ADDR=::1: give a name, or an IPv4 address"):
        addresses.environment_endpoint()


@pytest.mark.parametrize("name", [name for name in registry.names() if not registry.literals(name)["ONE_DEVICE_ON"]])
def test_the_world_is_nodes_times_processes_and_the_plan_stays(name):
    asked = {"nodes": 3, "processes": 2, "oversubscribe": True, "device": "cpu"}
    row = reading.parse({"rows": {"x": {"strategy": name} | asked}}).rows["x"]
    alone = reading.parse({"rows": {"x": {"strategy": name, "device": "cpu"}}}).rows["x"]
    assert (row.hardware.devices, row.hardware.processes, row.hardware.processes_per_node) == (6, 6, 2)
    assert row.plan_name == alone.plan_name
    assert row.folder(1) == "runs/x/n6/rep1"
    rendezvous = addresses.Rendezvous(29400, "10.0.0.1", 2, "10.0.0.3", "eth0", ("a", "b", "c"), "run")
    folder = Path("somewhere")
    if row.options.get("launcher") not in ("accelerate", "deepspeed"):  # which write a file
        said = row.command(folder, rendezvous)
        assert any("10.0.0.1" in word or "a:2,b:2,c:2" in word or "rendezvous" in word for word in said)


def test_deepspeed_trains_on_the_chosen_gpus_of_each_machine(monkeypatch, tmp_path):
    """It takes the first ones unless it is told, and knows of no more than the slots that its file of hosts has."""
    monkeypatch.setattr(launchers, "training_gpus", lambda hardware: [6, 7])
    row = reading.parse({"rows": {"x": {"strategy": "deepspeed", "device": "cpu", "nodes": 2, "oversubscribe": True}}})
    rendezvous = addresses.Rendezvous(29400, "10.0.0.1", 1, "10.0.0.2", "eth0", ("a", "b"), "run")
    file = paths.node_folder(tmp_path, 1)
    file.mkdir(parents=True, exist_ok=True)
    command = row.rows["x"].command(tmp_path, rendezvous)
    assert command[command.index("--include") + 1] == "a:6,7@b:6,7"
    assert Path(command[command.index("--hostfile") + 1]).read_text() == "a slots=8\nb slots=8\n"


@pytest.mark.parametrize("name", ["single", "dataparallel"])
def test_a_row_of_one_process_stays_on_one_machine(name):
    asked = {"nodes": 2, "processes": 2, "oversubscribe": True, "device": "cpu"}
    config = reading.parse({"hardware": asked, "rows": {"x": {"strategy": name}}})
    assert config.rows["x"].hardware.nodes == 1
