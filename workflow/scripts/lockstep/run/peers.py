"""How the nodes of a run communicate: each writes one small file in the results folder, and reads the others' files."""

import contextlib
import os
import platform
import time
from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.nested import ABSENT, differing
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import hash_file, hash_text, read_json, write_json

BEAT = 1.0  # seconds between two writes of a node's file
SILENCE = 30.0  # seconds without a write, after which a node counts as gone
CLOCK_TOLERANCE = 10.0  # seconds by which two nodes' clocks may differ, as they order the events
# The phases of a run that a node's file reports.
CALLING, READY, TRAINING, DONE, FAILED, OVER = "calling", "ready", "training", "done", "failed", "over"
PACKAGES = ("torch", "numpy", "transformers", "safetensors")  # besides those that the row's strategy needs


class OwnStatus:
    """This node's status: a file that only this node writes, at least every BEAT seconds."""

    def __init__(self, results: Path, node: int):
        self.file, self.node = paths.node_file(results, node), node
        self.content: dict = {}
        self.written = 0.0

    def say(self, **changes) -> None:
        """Add `changes` to the status, and write it."""
        self.content |= changes | {"beat": self.content.get("beat", 0) + 1}
        write_json(self.file, self.content)
        self.written = time.monotonic()

    def beat(self) -> None:
        if time.monotonic() - self.written > BEAT:
            self.say()


class PeerStatus:
    """Another node's status, and the time since it last changed."""

    def __init__(self, results: Path, node: int):
        self.file, self.node = paths.node_file(results, node), node
        self.last: dict = {}
        self.heard = time.monotonic()

    def read(self) -> dict:
        """The present status; empty if the node has not written any yet."""
        content = None
        with contextlib.suppress(BadInput, OSError):  # a network file system may show a file late or in part
            content = read_json(self.file) if self.file.is_file() else None
        if content and content != self.last:
            self.last, self.heard = content, time.monotonic()
        return self.last

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.heard > SILENCE

    @property
    def name(self) -> str:
        host = self.last.get("about", {}).get("host")
        return f"node {self.node}" + (f" ({host})" if host else "")


def describe(row: Row, results: Path, at: str, interface: str) -> dict:
    """What must be the same on all nodes, and the identity of this one."""
    packages = {name: registry.version(name) for name in PACKAGES}
    packages |= {need.package: need.installed for need in registry.needs(row.strategy)}
    files = {
        "plan": paths.plan_file(results, row.plan_name),
        "data": paths.data_file(results),
        "weights": paths.data_folder(results) / paths.WEIGHTS,
    }
    return {
        "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "address": at,
        "interface": interface,
        "pid": os.getpid(),
        "time": time.time(),
        "results folder": str(results),
        "Lockstep's code": _hash_of_code(),
        "Python": platform.python_version(),
        "packages": packages,
        "settings": row.settings().of_row(),
        "files": {name: _hash(path) for name, path in files.items()},
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
    same = ("results folder", "Lockstep's code", "Python", "packages", "settings", "files")
    for label, here, there in differing({key: ours[key] for key in same}, {key: theirs.get(key) for key in same}):
        here, there = ("missing" if value is ABSENT else value for value in (here, there))
        return f"{label} is {there} on {name}, but {here} on node 0 ({ours['host']}). Make them the same."
    if abs(ahead) > CLOCK_TOLERANCE:
        return f"the clock of {name} differs from node 0's by {ahead:+.0f} s. Set both from one source, such as NTP."
    return ""
