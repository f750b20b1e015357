"""Several machines: how the supervisors of one run, one on each node, agree before it starts and end it together.

Every node runs launch.py. The one on node 0 leads: it calls the others, holds what they say of themselves against what
it knows, tells them to start, and writes the record. They meet in the results folder, which all of them share: each
writes one small file there, again and again, and reads those of the others. A file that has not changed for SILENCE
seconds, by the reader's own clock, tells that its writer is gone; no clock is compared with another machine's, but for
one question before the start.

The ranks themselves meet where PyTorch's rendezvous is: at an address and port of node 0 (`hardware.endpoint`), which
every other node must reach before anything starts.
"""

import contextlib
import os
import platform
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep import paths
from lockstep.config import registry
from lockstep.config.hardware import free_port
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed, RunSaved, brief
from lockstep.files import hash_file, hash_text, read_json, write_json
from lockstep.run.processes import StopRequest

POLL = 0.2  # seconds
BEAT = 1.0  # seconds between two writings of a node's file
SILENCE = 30.0  # seconds without one after which a node is gone
APART = 10.0  # seconds by which two nodes' clocks may differ: events are put in order by them
LOOPBACK = "127."
CODES = {BadInput: 2, RunSaved: 143}  # with which nodes end (errors.exit_code), if not with 1
# What a node's file says of where it is in a run.
CALLING, READY, TRAINING, DONE, FAILED, OVER = "calling", "ready", "training", "done", "failed", "over"
PACKAGES = ("torch", "numpy", "transformers", "safetensors")  # and those that the row's strategy needs


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet, and which node this is: what a launcher must know (config/launchers.py).

    `address` and `port` are node 0's; `own` and `interface` are this node's address and the network interface that has
    it; `hosts` are the names of all nodes, in their order.
    """

    port: int
    address: str = "127.0.0.1"
    node: int = 0
    own: str = "127.0.0.1"
    interface: str = "lo"
    hosts: tuple[str, ...] = ("localhost",)
    name: str = ""  # of this attempt, which no other has


def alone(row: Row) -> Rendezvous:
    """On one machine ranks communicate over loopback, whatever the host's name resolves to."""
    return Rendezvous(free_port(row.hardware.port))


# What each node says.


class OwnStatus:
    """What this node says: a file that it alone writes, and again at least every BEAT seconds."""

    def __init__(self, results: Path, node: int):
        self.file, self.node = paths.node_file(results, node), node
        self.content: dict = {}
        self.written = 0.0

    def say(self, **changes) -> None:
        """Say this from now on, besides what was said before."""
        self.content |= changes | {"beat": self.content.get("beat", 0) + 1}
        write_json(self.file, self.content)
        self.written = time.monotonic()

    def beat(self) -> None:
        if time.monotonic() - self.written > BEAT:
            self.say()


class PeerStatus:
    """What another node says, and for how long it has not said anything new."""

    def __init__(self, results: Path, node: int):
        self.file, self.node = paths.node_file(results, node), node
        self.last: dict = {}
        self.heard = time.monotonic()

    def read(self) -> dict:
        """What it says now; empty where it has not said anything yet."""
        content = None
        with contextlib.suppress(BadInput, OSError):  # a network's file system may show a file late, or in parts
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


# What a node knows of itself.


def describe(row: Row, results: Path, at: str, interface: str) -> dict:
    """What must be the same on all nodes, and who this one is."""
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


def difference(ours: dict, theirs: dict, name: str, apart: float) -> str:
    """What is not the same on node 0 and on another, `name`, in one message; empty where nothing is.

    `apart` is by how many seconds the other's clock is ahead.
    """
    for key in ("results folder", "Lockstep's code", "Python", "packages", "settings", "files"):
        for label, here, there in _unequal(key, ours[key], theirs.get(key)):
            return f"{label} is {there} on {name}, and {here} on node 0 ({ours['host']}). Make them the same."
    if abs(apart) > APART:
        return f"the clock of {name} is {apart:+.0f} s from node 0's. Set both by one source, as NTP does."
    return ""


def _unequal(label: str, here, there):
    """Where two values differ, each inner key by itself: what it is, here and there."""
    if isinstance(here, dict) and isinstance(there, dict):
        for key in dict.fromkeys([*here, *there]):
            yield from _unequal(f"{label}: {key}", here.get(key), there.get(key))
    elif here != there:
        yield label, here, there


# Addresses.


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by its name."""
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def own_address(row: Row) -> tuple[str, str]:
    """Node 0's address, where all ranks are to meet, and its interface: as asked for, else by the host's name.

    Raises BadInput where this machine has no such address.
    """
    asked, there = row.asked, _interfaces()
    listed = ", ".join(f"{name} ({address})" for name, address in there.items())
    if asked.endpoint:
        host = endpoint(asked.endpoint)[0]
        address = _resolve(host, "hardware.endpoint")
        for name, owned in there.items():
            if owned == address:
                return address, name
        raise BadInput(
            f"hardware.endpoint: {host} is {address}, which is not an address of this machine ({listed}). Name"
            " node 0's, or start node 0 on that machine."
        )
    if asked.interface:
        if asked.interface not in there:
            raise BadInput(f"hardware.interface: {asked.interface} is none of this machine's: {listed}.")
        return there[asked.interface], asked.interface
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(platform.node())
        for name, owned in there.items():
            if owned == address and not address.startswith(LOOPBACK):
                return address, name
    for name, address in there.items():
        if not address.startswith(LOOPBACK):
            return address, name
    raise BadInput("hardware.nodes: this machine has no network interface but loopback, so no other can be reached.")


def endpoint(text: str) -> tuple[str, int | None]:
    """The host and port that `hardware.endpoint` names; the port may be left out. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not host:
        return text, None
    if not 0 < int(port) < 2**16:
        raise BadInput(f"hardware.endpoint: {text}: a port is a number from 1 to 65535.")
    return host, int(port)


def _resolve(host: str, where: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise BadInput(
            f"{where}: {host} can't be found ({error.strerror}). Give a name or address of node 0."
        ) from None


def reach(address: str, port: int, interface: str | None) -> tuple[str, str]:
    """This node's own address and interface on its way to node 0. Raises BadInput where node 0 can't be reached."""
    there = _interfaces()
    if interface and interface not in there:
        listed = ", ".join(f"{name} ({address})" for name, address in there.items())
        raise BadInput(f"hardware.interface: {interface} is none of {platform.node()}'s: {listed}.")
    source = (there[interface], 0) if interface else None
    try:
        with socket.create_connection((address, port), timeout=10, source_address=source) as connection:
            own = connection.getsockname()[0]
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(
            f"{platform.node()} can't reach node 0 at {address}:{port} ({why}). Is that its address, and may all ports"
            " between the nodes be used?"
        ) from None
    return own, next((name for name, owned in there.items() if owned == own), "lo")


# Node 0.


class Lead:
    """Node 0's part in a run, from the call to the end; each attempt at the run is one call."""

    def __init__(self, results: Path, row: Row, repeat: int):
        self.results, self.row, self.repeat = results, row, repeat
        self.status = OwnStatus(results, 0)
        self.others = [PeerStatus(results, node) for node in range(1, row.hardware.nodes)]

    def meet(self) -> Rendezvous:
        """Call the other nodes, and agree with them. Raises BadInput where one does not come, or is unlike this one."""
        hardware = self.row.hardware
        if self.row.asked.hosts:
            read_hosts(self.row.asked.hosts, hardware.nodes)  # refuses before anybody waits
        address, interface = own_address(self.row)
        port = (endpoint(self.row.asked.endpoint)[1] if self.row.asked.endpoint else None) or free_port(hardware.port)
        name = secrets.token_hex(8)
        about = describe(self.row, self.results, address, interface)
        with _listening(address, port):
            self.status.content = {}
            self.status.say(
                phase=CALLING,
                call=name,
                about=about,
                run={
                    "row": self.row.name,
                    "kind": self.row.kind,
                    "repeat": self.repeat,
                    "nodes": hardware.nodes,
                    "folder": str(self.results / self.row.folder(self.repeat)),
                },
                endpoint=[address, port],
            )
            print(f"{self.row.name}: {hardware.nodes} nodes meet at {address}:{port}", flush=True)
            self._await_answers(name, about)
        abouts = [about, *(other.last["about"] for other in self.others)]
        self.nodes = [{key: node[key] for key in ("host", "address", "interface")} for node in abouts]
        return Rendezvous(port, address, 0, address, interface, host_names(self.row, self.nodes), name)

    def _await_answers(self, call: str, about: dict) -> None:
        deadline = time.monotonic() + self.row.hardware.timeout
        missing = list(self.others)
        while missing:
            time.sleep(POLL)
            self.status.beat()
            for other in list(missing):
                answer = other.read()
                if answer.get("call") != call:
                    continue
                apart = answer["about"]["time"] - time.time()
                if why := answer.get("reason") or difference(about, answer["about"], other.name, apart):
                    raise BadInput(why)
                missing.remove(other)
            if missing and time.monotonic() > deadline:
                names = " and ".join(f"node {other.node}" for other in missing)
                raise BadInput(
                    f"{names} did not answer within {self.row.hardware.timeout:g} s (hardware.timeout). Start launch.py"
                    f" there with --node-rank, and with the same --results, in a folder that all nodes share:"
                    f" {self.results.resolve()}"
                )

    def begin(self) -> None:
        """Tell the others to start, at the moment at which this node does."""
        self.status.say(phase=TRAINING, nodes=self.nodes, stop_after=0)

    def meanwhile(self, request: StopRequest) -> None:
        """Called again and again while the ranks train: has all nodes stop together, and hears that they are there.

        Raises RunFailed where another node has failed or is gone.
        """
        self._hear()
        if not request.step and any(other.last.get("asked_to_stop") for other in self.others):
            request.soon()
        if request.step != self.status.content["stop_after"]:
            self.status.say(stop_after=request.step)
        self.status.beat()

    def _hear(self) -> None:
        for other in self.others:
            if other.read().get("phase") == FAILED:
                raise RunFailed(f"{other.name}: {other.last['reason']}")
            if other.silent:
                raise RunFailed(f"{other.name} has not been heard of for {SILENCE:g} s, so the run was ended")

    def gather(self) -> list[dict]:
        """What the other nodes say at the end, when all their processes have ended. Raises RunFailed as above."""
        while not all(other.read().get("phase") == DONE for other in self.others):
            self._hear()
            self.status.beat()
            time.sleep(POLL)
        return [other.last for other in self.others]

    def first_reason(self) -> str:
        """Why another node failed, where one did and this one failed with it: it has some seconds to say so."""
        deadline = time.monotonic() + SILENCE / 2
        while time.monotonic() < deadline:
            self.status.beat()
            failed = [other for other in self.others if other.read().get("phase") == FAILED]
            if failed:
                return f"{failed[0].name}: {failed[0].last['reason']}"
            if all(other.silent or other.last.get("phase") == DONE for other in self.others):
                break
            time.sleep(POLL)
        return ""

    def over(self, code: int, reason: str) -> None:
        """Tell the others how the whole run ended: they end with the same exit code and words."""
        with contextlib.suppress(OSError, RunFailed):  # a full disk: then its silence tells them
            self.status.say(phase=OVER, code=code, reason=reason)


@contextlib.contextmanager
def leading(results: Path, row: Row, repeat: int):
    """Node 0's part in a run on several nodes, which ends when the block does; None on one."""
    if row.hardware.nodes == 1:
        yield None
        return
    lead = Lead(results, row, repeat)
    try:
        yield lead
    except BaseException as error:
        code = next((code for kind, code in CODES.items() if isinstance(error, kind)), 1)
        lead.over(code, str(error) or "node 0 was interrupted")
        raise
    lead.over(0, "")


def host_names(row: Row, nodes: list[dict]) -> tuple[str, ...]:
    """What launchers that use ssh call the nodes: as `hardware.hosts` does, else as they call themselves."""
    if row.asked.hosts:
        return tuple(read_hosts(row.asked.hosts, row.hardware.nodes))
    return tuple(node["host"] for node in nodes)


def read_hosts(asked: list[str] | str, nodes: int) -> list[str]:
    """The names in `hardware.hosts`: a list, or a hostfile as MPI has it, a host in each line. Raises BadInput."""
    hosts = asked
    if isinstance(asked, str):
        try:
            lines = Path(asked).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"hardware.hosts: {asked} can't be read as a hostfile ({brief(error)}). Name a text file with a host in"
                " each line, or list the hosts: [h1, h2]."
            ) from None
        hosts = [words[0] for line in lines if (words := line.split("#")[0].split())]
    if len(set(hosts)) != len(hosts) or len(hosts) < nodes:
        named = ", ".join(hosts) or "none"
        raise BadInput(f"hardware.hosts: {named}: {nodes} nodes need as many hosts, each named once.")
    return list(hosts[:nodes])


@contextlib.contextmanager
def _listening(address: str, port: int):
    """Answer at the port at which the ranks will meet, for the others to try it; a thread takes what comes."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise BadInput(f"hardware.endpoint: {address}:{port} can't be used: {error.strerror}.") from None
        listener.listen()
        listener.settimeout(POLL)
        ended = threading.Event()

        def answer() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(5)
                    connection.recv(1)  # nothing: the other end closes first, so that the port is free at once

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def node_rank(given: int | None, nodes: int) -> int:
    """Which node this is: as given, else as what started this process says. Raises BadInput where nothing tells.

    Slurm's srun sets SLURM_NODEID; Kubernetes' training operator PET_NODE_RANK; others NODE_RANK, or RANK of as many
    as WORLD_SIZE, where each node is started once.
    """
    if nodes == 1:
        if given:
            raise BadInput(f"--node-rank {given}: hardware.nodes is 1. Say how many there are: --nodes 2.")
        return 0
    names = ["SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK"]
    if os.environ.get("WORLD_SIZE") == str(nodes):
        names.append("RANK")
    numbers = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
    if given is None and not numbers:
        raise BadInput(f"--node-rank: which of the {nodes} nodes is this? Number them from 0, and say it on each.")
    rank = numbers[0] if given is None else given
    if not 0 <= rank < nodes:
        raise BadInput(f"--node-rank {rank}: {nodes} nodes are numbered from 0 to {nodes - 1}.")
    return rank


def environment_endpoint() -> str | None:
    """Where a scheduler wants the ranks to meet, by MASTER_ADDR and MASTER_PORT; None where it does not say.

    Raises BadInput where that is neither a name nor an IPv4 address.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and ":" in address:
        raise BadInput(f"MASTER_ADDR={address}: give a name, or an IPv4 address.")
    return address and (f"{address}:{port}" if port.isdecimal() else address)
