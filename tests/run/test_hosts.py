"""What the guide says of ports and firewalls, between two containers: docker/two-hosts.compose.yaml.

Blocked ports, between two hosts, are tried in test_coordination.py, where those are.
"""

import os
import shutil
import subprocess

import pytest

from tests.conftest import PROJECT

IMAGE = "lockstep/torch:cpu"
COMPOSE = ["docker", "compose", "-f", "docker/two-hosts.compose.yaml", "-p", f"lockstep-two-hosts-{os.getpid()}"]


@pytest.fixture
def compose():
    """Calls Compose in the project's folder, under a name of its own; what it made is removed."""
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs: Docker")
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"needs: {IMAGE} (make images)")

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*COMPOSE, *words],
            cwd=PROJECT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    yield call
    call("down", "--timeout", "1")


@pytest.mark.slow
def test_two_containers_are_two_hosts_whose_ranks_listen_where_a_firewall_may_let_them(compose):
    done = compose("up", "--no-color", SNIPPET="ports.py")
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("| ")[2] for line in done.stdout.splitlines() if "| rank" in line)
    assert said == [f"rank {rank} listens at 1 more port, one of the system's: True" for rank in (0, 1)]
    file = "/proc/sys/net/ipv4/ip_local_port_range"
    pinned = compose("run", "--rm", "--no-deps", "--entrypoint", "cat", "host0", file)
    assert pinned.stdout.split() == ["50000", "50999"]
