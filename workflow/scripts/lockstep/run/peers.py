"""How the nodes of a run communicate: each has a TCP connection to node 0, over which both tell their status.

Node 0 listens at a port that the system chooses. The others find it by a file in the results folder, which all nodes
share. The file also has a secret, and only its owner can read it. Each end of a connection proves first that it knows
the secret, so neither takes another program for a node, even one that got the port of a killed node 0.

A status is a line of JSON, which is sent whenever it changes; an empty line is a beat. A process that ends closes its
connection, which the other end sees at once. A process that is stopped, or behind a cut link, falls silent.
"""

import contextlib
import hmac
import json
import os
import platform
import secrets
import select
import socket
import time
from pathlib import Path

from lockstep import nvml, paths
from lockstep.config import machine, registry
from lockstep.config.hardware import training_gpus
from lockstep.config.nested import ABSENT, differing
from lockstep.config.row import Row
from lockstep.files import hash_file, hash_text

POLL = 0.2  # seconds between two readings of a connection
BEAT = 1.0  # seconds without a change of status, after which a beat is sent
SILENCE = 30.0  # seconds without a line, after which a node counts as gone
PROOF = 10.0  # seconds in which the other end of a new connection has to prove that it is a node
UNPROVEN = 64  # connections that may be without a proof at the same time
LONGEST = 2**20  # bytes of a line
CLOCK_TOLERANCE = 10.0  # seconds by which two nodes' clocks may differ, as they order the events
# The phases of a run that a node's status reports.
CALLING, READY, TRAINING, DONE, FAILED, OVER = "calling", "ready", "training", "done", "failed", "over"
PACKAGES = ("torch", "numpy", "transformers", "safetensors")  # besides those that the row's strategy needs
GPUS = "the model of its GPUs"


class Peer:
    """A connection to the node `node`: its status (`last`), and the status that this node told it (`content`)."""

    def __init__(self, connection: socket.socket, node: int):
        self.connection, self.node = connection, node
        self.last: dict = {}
        self.content: dict = {}
        self.closed = False
        self.heard = self.told = time.monotonic()
        self._unread = b""
        connection.settimeout(BEAT)  # of sending, which waits only if the other end has not read for long

    def say(self, **status) -> None:
        """Tell this node's status, in place of the one that was told before."""
        self.content = status
        self._send(json.dumps(status))

    def add(self, **changes) -> None:
        """Tell this node's status with `changes`."""
        self.say(**self.content | changes)

    def beat(self) -> None:
        if time.monotonic() - self.told > BEAT:
            self._send("")

    def _send(self, line: str) -> None:
        self.told = time.monotonic()
        with contextlib.suppress(OSError):  # then `lost` tells that it is closed or silent
            self.connection.sendall(f"{line}\n".encode())

    def read(self) -> dict:
        """The other node's present status, without waiting for it; empty if it has not told any yet."""
        if self.closed or not select.select([self.connection], [], [], 0)[0]:
            return self.last
        try:
            data = self.connection.recv(LONGEST)
            *lines, self._unread = (self._unread + data).split(b"\n")
            self.heard, self.closed = time.monotonic(), not data or len(self._unread) > LONGEST
            for line in filter(None, lines):
                self.last = dict(json.loads(line))
        except (OSError, ValueError, TypeError, RecursionError):  # reset, or not what a node tells
            self.closed = True
        return self.last

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    @property
    def lost(self) -> str:
        """Why this node is gone; empty if it is there, or has told how its part ended."""
        if self.last.get("phase") in (DONE, FAILED, OVER):
            return ""
        if self.closed:
            return f"{self.name} closed its connection without giving a reason (was its launch.py killed?)"
        if time.monotonic() - self.heard > SILENCE:
            return f"{self.name} has not been heard from for {SILENCE:g} s"
        return ""

    @property
    def name(self) -> str:
        host = self.last.get("about", {}).get("host")
        return f"node {self.node}" + (f" ({host})" if host else "")


class Listener:
    """Where node 0 listens for the others: a port of `address`, which a file in the results folder names."""

    def __init__(self, results: Path, address: str):
        self.secret = secrets.token_hex(16)
        self.socket = socket.create_server((address, 0))
        self.socket.setblocking(False)
        self.address, self.port = self.socket.getsockname()
        self.unproven: dict[Peer, float] = {}  # connections that have not proven to be a node, and when they began
        self.file = paths.lead_file(results)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.unlink(missing_ok=True)
        with open(self.file, "x", encoding="utf-8", opener=_private) as stream:
            json.dump({"address": self.address, "port": self.port, "secret": self.secret}, stream)

    def admit(self) -> list[Peer]:
        """The nodes that have connected since the last call, and proven that they are nodes of these results."""
        with contextlib.suppress(OSError):  # nobody waits any more
            while len(self.unproven) < UNPROVEN:
                self.unproven[Peer(self.socket.accept()[0], -1)] = time.monotonic()
        admitted = []
        for peer, since in list(self.unproven.items()):
            hello = peer.read()
            if not hello and not peer.closed and time.monotonic() - since < PROOF:
                continue
            del self.unproven[peer]
            if _is_proven(hello, hello.get("node"), self.secret):
                peer.node = hello["node"]
                admitted.append(peer)
            else:
                peer.close()
        return admitted

    def close(self) -> None:
        self.file.unlink(missing_ok=True)
        self.socket.close()
        for peer in self.unproven:
            peer.close()


def join(results: Path, node: int) -> Peer:
    """Connect this node, number `node`, to node 0, which has told its status then.

    Raises FileNotFoundError if no node 0 listens, and OSError, with the reason, if it can't be reached.
    """
    try:
        there = json.loads(paths.lead_file(results).read_text(encoding="utf-8"))
    except ValueError:
        raise FileNotFoundError("node 0 is writing it") from None
    where = f"{platform.node()} can't reach it at {there['address']}:{there['port']}"
    try:
        lead = Peer(socket.create_connection((there["address"], there["port"]), timeout=PROOF), 0)
    except OSError as error:
        raise ConnectionError(f"{where} ({error.strerror or error})") from None
    deadline = time.monotonic() + PROOF
    lead.say(node=node, proof=proof(there["secret"], node))
    while not lead.read() and not lead.closed and time.monotonic() < deadline:
        time.sleep(POLL)
    if not _is_proven(lead.last, 0, there["secret"]):
        lead.close()
        raise ConnectionError(f"{where} (what listens there does not answer as node 0)")
    return lead


def proof(secret: str, node: int) -> str:
    """What node `node` says first to show that it knows the secret, without telling it."""
    return hmac.digest(secret.encode(), f"node {node}".encode(), "sha256").hex()


def _is_proven(status: dict, node, secret: str) -> bool:
    given = status.get("proof")
    if not isinstance(node, int) or not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, proof(secret, node))


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, 0o600)


def describe(row: Row, results: Path, at: str, interface: str) -> dict:
    """What must be the same on all nodes, and the identity of this one."""
    packages = {name: registry.version(name) for name in PACKAGES}
    packages |= {need.package: need.installed for need in registry.needs(row.strategy)}
    files = {
        "plan": paths.plan_file(results, row.plan_name),
        "data": paths.data_file(results),
        "weights": paths.data_folder(results) / paths.WEIGHTS,
    }
    gpus = training_gpus(row.hardware)
    return {
        "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "address": at,
        "interface": interface,
        "pid": os.getpid(),
        "results folder": str(results),
        "Lockstep's code": _hash_of_code(),
        "Python": platform.python_version(),
        "packages": packages,
        "settings": row.settings().of_row(),
        GPUS: "" if row.asked.mixed_gpus else ", ".join(machine.gpu_kinds(gpus)),
        "gpus": [nvml.name(nvml.gpu(number)) or "" for number in gpus],
        "files": {name: _hash(path) for name, path in files.items()},
        "time": time.time(),  # last, as hashing may take long
    }


def _hash_of_code() -> str:
    files = sorted(paths.SCRIPTS.rglob("*.py"))
    return hash_text("".join(f"{file.relative_to(paths.SCRIPTS)} {hash_file(file)}\n" for file in files))[:12]


def _hash(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return hash_text("".join(hash_file(file) for file in files if file.is_file()))[:12] if path.exists() else "missing"


def difference(ours: dict, theirs: dict, name: str, ahead: float) -> str:
    """The first difference between node 0 (`ours`) and the node `name` (`theirs`), as a message; empty if none.

    ahead: by how many seconds the other node's clock is ahead.
    """
    same = ("results folder", "Lockstep's code", "Python", "packages", "settings", GPUS, "files")
    if not (ours[GPUS] and theirs.get(GPUS)):  # a driver that does not tell is no reason to refuse
        same = tuple(key for key in same if key != GPUS)
    for label, here, there in differing({key: ours[key] for key in same}, {key: theirs.get(key) for key in same}):
        here, there = ("missing" if value is ABSENT else value for value in (here, there))
        remedy = "Take equal ones, or set hardware.mixed_gpus: true" if label == GPUS else "Make them the same"
        return f"{label} is {there} on {name}, but {here} on node 0 ({ours['host']}). {remedy}."
    if abs(ahead) > CLOCK_TOLERANCE:
        return f"the clock of {name} differs from node 0's by {ahead:+.0f} s. Set both from one source, such as NTP."
    return ""
