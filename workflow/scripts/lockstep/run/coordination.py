"""Several machines: how the supervisors of one run, one on each node, agree before it starts and end it together.

Every node runs launch.py, and the one on node 0 leads: it calls the others, compares what they report about themselves
with its own state, tells them to start, and writes the record. They communicate over TCP connections to node 0
(peers.py). If one closes without a reason, or is silent for SILENCE seconds by the reader's own clock, that node is
gone, and the run ends. Clocks of different machines are compared only once, before the start.

The ranks themselves meet at PyTorch's rendezvous, an address and port of node 0 (`hardware.endpoint`), which every
other node must reach before anything starts.
"""

import contextlib
import secrets
import threading
import time
from pathlib import Path

from lockstep import paths
from lockstep.config.machine import free_port
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed, RunSaved
from lockstep.run import lifetime
from lockstep.run.addresses import Rendezvous, beside, endpoint, host_names, listening, own_address, read_hosts
from lockstep.run.peers import (
    BEAT,
    CALLING,
    DONE,
    FAILED,
    OVER,
    POLL,
    SILENCE,
    TRAINING,
    Listener,
    Peer,
    describe,
    difference,
    proof,
)
from lockstep.run.processes import StopRequest

GOODBYE = 2.0  # seconds that the other nodes have to read how the run ended
CODES = {BadInput: 2, RunSaved: 143}  # the exit codes of nodes (errors.exit_code); all others are 1


class Lead:
    """Node 0's part in a run, from the call to the end; each attempt at the run has its own call."""

    def __init__(self, results: Path, row: Row, repeat: int):
        self.results, self.row, self.repeat = results, row, repeat
        self.listener: Listener | None = None  # from the first call on
        self.status: dict = {}  # what this node tells the others
        self.joined: dict[int, Peer] = {}  # the other nodes that are connected, or were, by their number

    def meet(self) -> Rendezvous:
        """Call the other nodes, and wait for them. Raises BadInput if one does not answer, or differs from this one."""
        hardware = self.row.hardware
        if self.row.asked.hosts:
            read_hosts(self.row.asked.hosts, hardware.nodes)  # refuses an invalid list before any node waits
        address, interface = own_address(self.row)
        port = (endpoint(self.row.asked.endpoint)[1] if self.row.asked.endpoint else None) or free_port(hardware.port)
        name = secrets.token_hex(8)
        about = describe(self.row, self.results, address, interface)
        with listening(address, port):
            self.listener = self.listener or Listener(self.results, address)
            self.status = {"proof": proof(self.listener.secret, 0)}
            self._tell(
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
        abouts = [about, *(other.last["about"] for other in self._hear())]
        self.nodes = [{key: node[key] for key in ("host", "address", "interface", "gpus")} for node in abouts]
        return Rendezvous(port, address, 0, address, interface, host_names(self.row, self.nodes), name)

    def _await_answers(self, call: str, about: dict) -> None:
        deadline, compared = time.monotonic() + self.row.hardware.timeout, set()
        while True:
            for other in self._hear():
                answer = other.last
                if answer.get("call") != call or other in compared:
                    continue
                ahead = answer["about"]["time"] - time.time()
                if why := answer.get("reason") or difference(about, answer["about"], other.name, ahead):
                    raise BadInput(why)
                compared.add(other)
            missing = [node for node in range(1, self.row.hardware.nodes) if self.joined.get(node) not in compared]
            if not missing:
                return
            if time.monotonic() > deadline:
                names = " and ".join(f"node {node}" for node in missing)
                raise BadInput(
                    f"{names} did not answer within {self.row.hardware.timeout:g} s (hardware.timeout). Start launch.py"
                    f" there with --node-rank, and with the same --results, in a folder that all nodes share:"
                    f" {self.results.resolve()}. Node 0 listens at {self.listener.address}:{self.listener.port}, which"
                    " must be open for them."
                )
            time.sleep(POLL)

    @contextlib.contextmanager
    def beating(self):
        """Beat while the block runs, which may read large files for longer than the other nodes wait for a sign."""

        def beat(ended: threading.Event) -> None:
            while not ended.wait(BEAT):
                for node in self.joined.values():
                    node.beat()

        with beside(beat):
            yield

    def begin(self) -> None:
        """Tell the others to start, when this node starts."""
        self._tell(phase=TRAINING, nodes=self.nodes, stop_after=0)

    def meanwhile(self, request: StopRequest) -> None:
        """Called repeatedly while the ranks train: makes all nodes stop together, and checks that they are alive.

        Raises RunFailed if another node has failed or is gone.
        """
        others = self._require_others()
        if not request.step and any(other.last.get("asked_to_stop") for other in others):
            request.soon()
        if request.step != self.status["stop_after"]:
            self._tell(stop_after=request.step)

    def _tell(self, **changes) -> None:
        """Tell all other nodes this one's status with `changes`."""
        self.status |= changes
        for node in self.joined.values():
            node.say(**self.status)

    def _hear(self) -> list[Peer]:
        """The other nodes of the run that are connected, or were, with their present status.

        Nodes that the row does not need may be connected, too: they see by the call that they are not meant.
        """
        for node in self.listener.admit():
            present = self.joined.get(node.node)
            if present and (not present.closed or self.status["phase"] != CALLING):
                node.close()  # a second one of this number, where files can't be locked (follower.py), or too late
                continue
            self.joined[node.node] = node
            node.say(**self.status)
        for node in self.joined.values():
            node.beat()
            node.read()
        return [self.joined[number] for number in range(1, self.row.hardware.nodes) if number in self.joined]

    def _require_others(self) -> list[Peer]:
        """The other nodes, with their present status. Raises RunFailed if one has failed or is gone."""
        others = self._hear()
        if reason := _why_ended(others):
            raise RunFailed(reason)
        return others

    def gather(self) -> list[dict]:
        """The reports of the other nodes, when all their processes have ended. Raises RunFailed like `meanwhile`."""
        while True:
            others = self._require_others()
            if all(other.last.get("phase") == DONE for other in others):
                return [other.last for other in others]
            time.sleep(POLL)

    def first_reason(self) -> str:
        """Why another node failed, if that made this one fail too; waits some seconds for its report. Else empty."""
        deadline = time.monotonic() + SILENCE / 2
        while time.monotonic() < deadline:
            others = self._hear()
            if (reason := _why_ended(others)) or all(other.last.get("phase") == DONE for other in others):
                return reason
            time.sleep(POLL)
        return ""

    def over(self, code: int, reason: str) -> None:
        """Tell the others how the whole run ended, so that they end with the same exit code and message."""
        if not self.listener:
            return
        self.listener.close()
        self._tell(phase=OVER, code=code, reason=reason)
        # To close a connection before the other end has read it, or with something unread here, may lose what was told.
        deadline = time.monotonic() + GOODBYE
        while time.monotonic() < deadline and not all(node.closed for node in self.joined.values()):
            for node in self.joined.values():
                node.read()
            time.sleep(POLL / 4)
        for node in self.joined.values():
            node.close()


def _why_ended(nodes: list[Peer]) -> str:
    """Why the first of these nodes is gone or, if all are there, why the first has failed; else empty."""
    gone = [f"{node.lost}, so the run was ended" for node in nodes if node.lost]
    failed = [f"{node.name}: {node.last['reason']}" for node in nodes if node.last.get("phase") == FAILED]
    return next(iter(gone + failed), "")


@contextlib.contextmanager
def leading(results: Path, row: Row, repeat: int):
    """Node 0's part in a run on several nodes, until the block ends; None if there is one node only."""
    if row.hardware.nodes == 1:
        yield None
        return
    lead = Lead(results, row, repeat)
    with lifetime.hold(paths.nodes_folder(results) / "0"):  # as each number is one node's (follower.py)
        try:
            yield lead
        except BaseException as error:
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), 1)
            lead.over(code, str(error) or "node 0 was interrupted")
            raise
        lead.over(0, "")
