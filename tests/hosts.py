"""Hosts on this machine with network stacks of their own: network namespaces of Linux, joined by a bridge.

Each has only loopback and its link to the bridge, so whatever crosses between them crosses a network. It takes root,
and the commands ip, unshare and hostname.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ETC = Path("/etc/netns")  # from where `ip netns exec` gives a host an /etc/hosts of its own


class Hosts:
    """`number` hosts named host0, host1 and so on, with addresses 10.78.0.1, 10.78.0.2 and so on at eth0."""

    def __init__(self, number: int):
        self.names = [f"host{host}" for host in range(number)]
        self.switch = f"lockstep{os.getpid()}"
        self.spaces = [f"{self.switch}-{name}" for name in self.names]

    def up(self) -> None:
        """Make them. Raises CalledProcessError where this machine does not let one."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge0", "up")
        known = "".join(f"10.78.0.{number} {name}\n" for number, name in enumerate(self.names, 1))
        for number, space in enumerate(self.spaces, 1):
            ip("netns", "add", space)
            (ETC / space).mkdir(parents=True, exist_ok=True)
            (ETC / space / "hosts").write_text(f"127.0.0.1 localhost\n{known}", encoding="utf-8")
            port = f"port{number}"
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", space, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", space, "link", "set", interface, "up")

    def start(self, number: int, *command: str, **options) -> subprocess.Popen:
        """Start a command on a host, which has that host's name; its output and errors are one stream."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.names[number])
        there = ("ip", "netns", "exec", self.spaces[number], *named, *command)
        usual = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(there, **usual | options)

    def down(self) -> None:
        """Remove them, and end what still runs there."""
        for space in (*self.spaces, self.switch):
            there = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            for pid in there.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)


@contextlib.contextmanager
def hosts(number: int):
    """So many Hosts while the block runs. Skips the test, with the reason, where they can't be made."""
    if os.geteuid():
        pytest.skip("needs: root, to make hosts on one machine")
    if missing := [name for name in ("ip", "unshare", "hostname") if not shutil.which(name)]:
        pytest.skip(f"needs: the commands {', '.join(missing)}, to make hosts on one machine")
    made = Hosts(number)
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs: network namespaces ({error.stderr.strip()})")
        yield made
    finally:
        made.down()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
