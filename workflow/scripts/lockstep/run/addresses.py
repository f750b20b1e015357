"""Where the ranks of a run meet: addresses, ports and names of nodes, and the number of this node."""

import contextlib
import os
import platform
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.config.machine import free_port
from lockstep.config.row import Row
from lockstep.errors import BadInput, brief

LOOPBACK = "127."
LOOK = 0.2  # seconds between two checks whether a block has ended


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet, and the number of this node; launchers need both (config/launchers.py).

    `address` and `port` are node 0's; `own` is the address at which others reach this node, and `interface` the network
    interface through which its ranks communicate; `hosts` are the names of all nodes in order.
    """

    port: int
    address: str = "127.0.0.1"
    node: int = 0
    own: str = "127.0.0.1"
    interface: str = "lo"
    hosts: tuple[str, ...] = ("localhost",)
    name: str = ""  # a name that only this attempt has


def alone(row: Row) -> Rendezvous:
    """For a run on one machine: ranks communicate over loopback, whatever the host's name resolves to."""
    return Rendezvous(free_port(row.hardware.port))


def _interfaces() -> dict[str, str]:
    """The IPv4 addresses of the network interfaces, by interface name."""
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def own_address(row: Row) -> tuple[str, str]:
    """Node 0's address, where all ranks meet, and the interface through which its own ones communicate.

    They are those of the configuration, or by the host's name. The interface that is asked for need not be the one with
    the address: ranks may meet over one network, and send gradients over a faster one. Raises BadInput if this machine
    has no such address or interface.
    """
    asked, there = row.asked, _interfaces()
    listed = ", ".join(f"{name} ({address})" for name, address in there.items())
    if asked.interface and asked.interface not in there:
        raise BadInput(f"hardware.interface: {asked.interface} is not an interface of this machine. It has: {listed}.")
    if asked.endpoint:
        host = endpoint(asked.endpoint)[0]
        address = _resolve(host, "hardware.endpoint")
        for name, owned in there.items():
            if owned == address:
                return address, asked.interface or name
        raise BadInput(
            f"hardware.endpoint: {host} is {address}, which is not an address of this machine ({listed}). Name"
            " node 0's, or start node 0 on that machine."
        )
    if asked.interface:
        return there[asked.interface], asked.interface
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(platform.node())
        for name, owned in there.items():
            if owned == address and not address.startswith(LOOPBACK):
                return address, name
    for name, address in there.items():
        if not address.startswith(LOOPBACK):
            return address, name
    raise BadInput("hardware.nodes: this machine has no network interface but loopback, so it can't reach other nodes.")


def endpoint(text: str) -> tuple[str, int | None]:
    """The host and the port that `hardware.endpoint` names; the port is optional. Raises BadInput if it is invalid."""
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
    """The address and interface with which this node reaches node 0. Raises BadInput if it can't."""
    there = _interfaces()
    if interface and interface not in there:
        listed = ", ".join(f"{name} ({address})" for name, address in there.items())
        raise BadInput(f"hardware.interface: {interface} is not an interface of {platform.node()}. It has: {listed}.")
    source = (there[interface], 0) if interface else None
    try:
        with socket.create_connection((address, port), timeout=10, source_address=source) as connection:
            own = connection.getsockname()[0]
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(
            f"{platform.node()} can't reach node 0 at {address}:{port} ({why}). Is that its address, and are all ports"
            " between the nodes open?"
        ) from None
    return own, next((name for name, owned in there.items() if owned == own), "lo")


def host_names(row: Row, nodes: list[dict]) -> tuple[str, ...]:
    """The names of the nodes for launchers that use ssh: those of `hardware.hosts`, or the nodes' own host names."""
    if row.asked.hosts:
        return tuple(read_hosts(row.asked.hosts, row.hardware.nodes))
    return tuple(node["host"] for node in nodes)


def read_hosts(asked: list[str] | str, nodes: int) -> list[str]:
    """The names in `hardware.hosts`, which is a list or an MPI hostfile with one host per line. Raises BadInput."""
    hosts = asked
    if isinstance(asked, str):
        try:
            lines = Path(asked).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"hardware.hosts: {asked} can't be read as a hostfile ({brief(error)}). Name a text file with one host"
                " per line, or list the hosts: [h1, h2]."
            ) from None
        hosts = [words[0] for line in lines if (words := line.split("#")[0].split())]
    if len(set(hosts)) != len(hosts) or len(hosts) < nodes:
        named = ", ".join(hosts) or "none"
        raise BadInput(f"hardware.hosts: {named}: {nodes} nodes need as many different hosts.")
    return list(hosts[:nodes])


@contextlib.contextmanager
def listening(address: str, port: int):
    """Accept connections on the port where the ranks will meet, in a thread, so that other nodes can test it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise BadInput(f"hardware.endpoint: {address}:{port} can't be used: {error.strerror}.") from None
        listener.listen()
        listener.settimeout(LOOK)

        def answer(ended: threading.Event) -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(5)
                    connection.recv(1)  # waits until the other end has closed, so that the port is free at once

        with beside(answer):
            yield


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]):
    """Call `work` in a thread while the block runs; it must return soon after the event that it gets is set."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def node_rank(given: int | None, nodes: int) -> int:
    """The number of this node: as given, or from the environment. Raises BadInput if neither tells it.

    Slurm's srun sets SLURM_NODEID, and Kubernetes' training operator PET_NODE_RANK. Others set NODE_RANK, or RANK if
    WORLD_SIZE is the number of nodes, as each node is started once.
    """
    if nodes == 1:
        if given:
            raise BadInput(f"--node-rank {given}: hardware.nodes is 1. Set the number of nodes: --nodes 2.")
        return 0
    names = ["SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK"]
    if os.environ.get("WORLD_SIZE") == str(nodes):
        names.append("RANK")
    numbers = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
    if given is None and not numbers:
        raise BadInput(
            f"--node-rank: which of the {nodes} nodes is this? Number them from 0, and give each node its number."
        )
    rank = numbers[0] if given is None else given
    if not 0 <= rank < nodes:
        raise BadInput(f"--node-rank {rank}: {nodes} nodes are numbered from 0 to {nodes - 1}.")
    return rank


def environment_endpoint() -> str | None:
    """Where a scheduler has the ranks meet, by MASTER_ADDR and MASTER_PORT; None if these are not set.

    Raises BadInput if MASTER_ADDR is neither a name nor an IPv4 address.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and ":" in address:
        raise BadInput(f"MASTER_ADDR={address}: give a name, or an IPv4 address.")
    return address and (f"{address}:{port}" if port.isdecimal() else address)
