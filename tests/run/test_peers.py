"""How nodes learn of each other, on this machine alone; test_coordination.py has two hosts, whose link is cut."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import BadInput, RunFailed
from lockstep.run import coordination, follower, peers, runs
from tests.run.test_coordination import no_process_is_left, wait_for

NODES = {"device": "cpu", "nodes": 3, "processes": 1, "oversubscribe": True, "endpoint": "127.0.0.1", "timeout": 5}
# What the supervisor of another node does: it answers, and beats until the run is over, or node 0 is gone.
FOLLOWER = """
import sys, time
from pathlib import Path
from lockstep.run import peers

lead = peers.join(Path(sys.argv[1]), int(sys.argv[2]))
lead.say(phase=peers.READY)
while not lead.lost and lead.read()["phase"] != peers.OVER:
    lead.beat()
    time.sleep(0.05)
print(lead.lost or lead.last["reason"], flush=True)
"""
LEADING = """
import sys, time
from pathlib import Path
from lockstep.run import peers

listener = peers.Listener(Path(sys.argv[1]), "127.0.0.1")
print("listens", flush=True)
while True:
    for node in listener.admit():
        node.say(proof=peers.proof(listener.secret, 0), phase=peers.TRAINING)
    time.sleep(0.05)
"""
# launch.py on node 0, where the first attempt at a run is disturbed.
DISTURBED = f"""
import runpy, sys
from dataclasses import replace
sys.path.insert(0, {str(paths.SCRIPTS)!r})
from lockstep.run import watcher

verdicts, judge = iter([["noise"], []]), watcher.judge
watcher.judge = lambda *watched: replace(judge(*watched), disturbed=next(verdicts))
runpy.run_path({str(paths.SCRIPTS / "launch.py")!r}, run_name="__main__")
"""
STRANGE = {
    "http": b"GET / HTTP/1.1\r\nHost: lead\r\n\r\n",
    "another secret": json.dumps({"node": 1, "proof": peers.proof("another", 1)}).encode() + b"\n",
    "no proof": b'{"node": 1}\n',
    "no object": b"[1, 2]\n5\n",
    "no number": b'{"node": "\\ud800", "proof": "\\ud800"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "binary": bytes(range(256)) + b"\n",
    "one long line": b"x" * (peers.LONGEST + 2),
    "beats": b"\n" * 1000,
    "nothing": b"",
}


def started(program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(paths.SCRIPTS)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def lead(tmp_path):
    """Node 0 of three, which calls."""
    row = reading.parse({"hardware": NODES, "rows": {"x": {"strategy": "ddp"}}}).rows["x"]
    lead = coordination.Lead(tmp_path, row, 1)
    lead.listener = peers.Listener(tmp_path, "127.0.0.1")
    lead.status = {"proof": peers.proof(lead.listener.secret, 0), "phase": peers.CALLING, "stop_after": 0}
    yield lead
    lead.over(0, "")


@pytest.fixture
def others(lead, tmp_path):
    """The processes of nodes 1 and 2, which are connected."""
    processes = [started(FOLLOWER, str(tmp_path), str(number)) for number in (1, 2)]
    lead_until(lead, lambda: len(lead.joined) == 2)
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def lead_until(lead: coordination.Lead, happened, seconds: float = 30) -> None:
    """Do what node 0 does while its ranks train, until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        lead.meanwhile(SimpleNamespace(step=0))
        time.sleep(0.05)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, over which it sends nothing."""
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_node_that_is_killed_is_known_at_once_and_the_others_learn_it(lead, others):
    others[0].kill()
    with pytest.raises(RunFailed, match=r"^node 1 closed its connection without giving a reason") as raised:
        lead_until(lead, lambda: False, seconds=peers.SILENCE / 3)
    assert lead.first_reason() == str(raised.value)
    lead.over(1, str(raised.value))
    said, _ = others[1].communicate(timeout=10)
    assert said == f"{raised.value}\n"


def test_a_node_that_is_stopped_is_named_after_the_silence(lead, others, monkeypatch):
    monkeypatch.setattr(peers, "SILENCE", 5.0)
    others[1].send_signal(signal.SIGSTOP)
    with pytest.raises(RunFailed, match=r"^node 2 has not been heard from for 5 s, so the run was ended"):
        lead_until(lead, lambda: False)
    lead.over(1, "the run was ended")
    others[1].send_signal(signal.SIGCONT)
    assert [process.communicate(timeout=10)[0] for process in others] == ["the run was ended\n"] * 2


def test_nodes_wait_while_node_0_looks_through_large_states(lead, tmp_path, monkeypatch):
    """To hash those of a model of 7B takes longer than the silence after which a node counts as gone."""
    impatient = FOLLOWER.replace("lead = ", "peers.SILENCE = 3.0\nlead = ", 1)
    with started(impatient, str(tmp_path), "1") as other:
        lead_until(lead, lambda: 1 in lead.joined)
        for module in (peers, coordination):  # or a busy machine's stall would be a node's silence
            monkeypatch.setattr(module, "BEAT", 0.1)
        monkeypatch.setattr(lead, "meet", lambda: None)
        monkeypatch.setattr(runs.saved, "find", lambda *_: time.sleep(5))
        config = reading.parse({"hardware": NODES, "rows": {"x": {"strategy": "ddp"}}})
        runs._settle(runs.Assignment(config, config.rows["x"], 1, tmp_path, None, None, lead))
        lead.over(0, "done")
        assert other.communicate(timeout=10)[0] == "done\n"


def test_what_a_node_told_before_it_ended_is_the_reason(lead, tmp_path):
    failing = FOLLOWER.partition("while")[0] + "lead.say(phase=peers.FAILED, reason='no memory')"
    with started(failing, str(tmp_path), "1"), pytest.raises(RunFailed, match=r"^node 1: no memory$"):
        lead_until(lead, lambda: False)
    lead.joined[1].read()
    assert lead.joined[1].closed
    assert not lead.joined[1].lost


def test_the_end_of_node_0_is_known_at_once(tmp_path):
    leading = started(LEADING, str(tmp_path))
    try:
        assert leading.stdout.readline() == "listens\n"
        lead = peers.join(tmp_path, 1)
        assert (lead.read()["phase"], lead.lost) == (peers.TRAINING, "")
    finally:
        leading.kill()
        leading.wait()
    lead.read()
    assert lead.lost == "node 0 closed its connection without giving a reason (was its launch.py killed?)"
    lead.close()
    with pytest.raises(ConnectionError, match=r"can't reach it at 127.0.0.1:\d+ \(Connection refused\)"):
        peers.join(tmp_path, 1)


@pytest.mark.parametrize("sent", STRANGE)
def test_another_program_is_not_taken_for_a_node(lead, tmp_path, monkeypatch, sent):
    monkeypatch.setattr(peers, "PROOF", 0.5)
    with socket.create_connection((lead.listener.address, lead.listener.port)) as other:
        other.sendall(STRANGE[sent])
        lead_until(lead, lambda: is_closed(other), seconds=10)
    assert not lead.joined


def test_what_got_the_port_of_a_killed_node_0_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PROOF", 0.5)
    listener = peers.Listener(tmp_path, "127.0.0.1")
    there = json.loads(listener.file.read_text())
    assert stat.S_IMODE(listener.file.stat().st_mode) == 0o600
    listener.socket.close()
    answers = pytest.raises(ConnectionError, match="what listens there does not answer as node 0")
    with socket.create_server(("127.0.0.1", there["port"])), answers:
        peers.join(tmp_path, 1)
    listener.close()
    with pytest.raises(FileNotFoundError):
        peers.join(tmp_path, 1)


def test_a_number_is_one_nodes(lead, others, tmp_path):
    """Where files can't be locked; elsewhere the second is refused before it connects (test_coordination.py)."""
    first = lead.joined[1]
    second = started(FOLLOWER, str(tmp_path), "1")
    lead_until(lead, lambda: second.poll() is not None)
    assert second.wait() == 1
    assert lead.joined[1] is first


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        row = reading.parse({"hardware": NODES | {"endpoint": endpoint}, "rows": {"x": {"strategy": "ddp"}}}).rows["x"]
        refused = pytest.raises(
            BadInput, match=f"^hardware.endpoint: {endpoint} can't be used: Address already in use.$"
        )
        with refused, coordination.leading(tmp_path, row, 1) as lead:
            lead.meet()
    assert not paths.lead_file(tmp_path).exists()


def test_who_is_missing_is_told_with_the_port_that_must_be_open(tmp_path):
    row = reading.parse({"hardware": NODES | {"timeout": 1}, "rows": {"x": {"strategy": "ddp"}}}).rows["x"]
    refused = pytest.raises(BadInput, match=r"^node 1 and node 2 did not answer within 1 s .*listens at 127.0.0.1:\d+")
    with refused, coordination.leading(tmp_path, row, 1) as lead:
        lead.meet()
    assert not paths.lead_file(tmp_path).exists()


def test_a_node_that_cannot_reach_node_0_says_where_it_listens(tmp_path):
    listener = peers.Listener(tmp_path, "127.0.0.1")
    listener.socket.close()
    config = reading.parse({"hardware": NODES | {"timeout": 1}, "rows": {"x": {"strategy": "ddp"}}})
    with pytest.raises(BadInput) as raised:
        follower.follow(lambda: config, tmp_path, 1, config.rows["x"])
    said = str(raised.value)
    assert said.startswith("node 0 did not call within 1 s (hardware.timeout): ")
    assert f"can't reach it at 127.0.0.1:{listener.port} (Connection refused). Are all ports between" in said


# Whole runs of two nodes, both on this machine.

SMALL = [
    *("data.limit=300", "data.splits={train: .8, dev: .1, test: .1}", "model.hidden_size=32", "model.layers=1"),
    *("train.epochs=4000", "train.global_batch=32", "hardware.device=cpu", "hardware.oversubscribe=true"),
    *("hardware.threads=1", "hardware.processes=1", "hardware.endpoint=127.0.0.1", "profile.steps=0", "retries=0"),
]


def command(script: str, results: Path, *arguments: str) -> list[str]:
    words = [word for pair in SMALL for word in ("--set", pair)]
    return [sys.executable, str(paths.SCRIPTS / f"{script}.py"), "--results", str(results), *words, *arguments]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    results = tmp_path_factory.mktemp("nodes") / "results"
    for script in ("prepare", "plan"):
        subprocess.run(command(script, results), check=True, capture_output=True)
    return results


@pytest.fixture
def results(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "results"))


@pytest.fixture
def both(results):
    """launch.py of nodes 0 and 1, whose ranks train."""
    words = ["--row", "ddp", "--nodes", "2", "--node-rank"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command("launch", results, *words, number), **options) for number in "01"]
    wait_for(results, "ddp", 3, 1)
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.ci), 0])
def test_a_run_outlives_other_programs_and_ends_at_once_when_a_supervisor_is_killed(results, both, number):
    listener = json.loads(paths.lead_file(results).read_text())
    with contextlib.ExitStack() as stack:
        for sent in STRANGE.values():
            other = socket.create_connection((listener["address"], listener["port"]))
            stack.enter_context(other).sendall(sent)
        wait_for(results, "ddp", 60, 1)
        assert [process.poll() for process in both] == [None, None]
    both[number].kill()
    began = time.monotonic()
    said, _ = both[1 - number].communicate(timeout=60)
    assert time.monotonic() - began < peers.SILENCE / 2
    assert both[1 - number].returncode == 1, said
    assert re.search(rf"^failed: .*node {number} \(.*\) closed its connection", said, re.MULTILINE), said
    assert no_process_is_left(results)
    assert paths.lead_file(results).exists() == (number == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_supervisor_that_is_stopped_is_named_and_ends_when_it_goes_on(results, both, number):
    both[number].send_signal(signal.SIGSTOP)
    said, _ = both[1 - number].communicate(timeout=peers.SILENCE + 60)
    assert both[1 - number].returncode == 1, said
    reason = rf"^failed: .*node {number} \(.*\) has not been heard from for 30 s"
    assert re.search(reason, said, re.MULTILINE), said
    both[number].send_signal(signal.SIGCONT)
    said, _ = both[number].communicate(timeout=60)
    assert both[number].returncode == 1, said
    assert re.search(reason, said, re.MULTILINE), said
    assert no_process_is_left(results)


@pytest.mark.slow
def test_a_disturbed_run_is_repeated_by_all_nodes(results):
    sets = ("--set", "train.max_steps=6", "--set", "retries=1")
    subprocess.run(command("plan", results, *sets), check=True, capture_output=True)
    words = command("launch", results, *sets, "--row", "ddp", "--nodes", "2", "--node-rank")
    other = subprocess.Popen([*words, "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = subprocess.run(
        [sys.executable, "-c", DISTURBED, *words[2:], "0"], capture_output=True, text=True, timeout=200
    )
    theirs, _ = other.communicate(timeout=60)
    assert (said.returncode, other.returncode) == (0, 0), said.stdout + said.stderr + theirs
    assert "ddp: noise; " in said.stdout
    record = json.loads((results / "runs" / "ddp" / "n2" / "rep1" / paths.RECORD).read_text())
    assert [attempt["disturbed"][0] for attempt in record["disturbed_before"]] == ["noise"]
