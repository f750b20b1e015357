"""Several machines: how the supervisors of one run, one on each node, agree before it starts and end it together.

Every node runs launch.py, and the one on node 0 leads: it calls the others, compares what they report about themselves
with its own state, tells them to start, and writes the record. They communicate through the results folder, which all
of them share: each keeps rewriting one small file there, and reads the files of the others. If a file has not changed
for SILENCE seconds by the reader's own clock, its writer is gone. Clocks of different machines are compared only once,
before the start.

The ranks themselves meet at PyTorch's rendezvous, an address and port of node 0 (`hardware.endpoint`), which every
other node must reach before anything starts.
"""

import contextlib
import secrets
import time
from pathlib import Path

from lockstep.config.machine import free_port
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed, RunSaved
from lockstep.run.addresses import Rendezvous, endpoint, host_names, listening, own_address, read_hosts
from lockstep.run.peers import (
    CALLING,
    DONE,
    FAILED,
    OVER,
    SILENCE,
    TRAINING,
    OwnStatus,
    PeerStatus,
    describe,
    difference,
)
from lockstep.run.processes import StopRequest

POLL = 0.2  # seconds
CODES = {BadInput: 2, RunSaved: 143}  # the exit codes of nodes (errors.exit_code); all others are 1


class Lead:
    """Node 0's part in a run, from the call to the end; each attempt at the run has its own call."""

    def __init__(self, results: Path, row: Row, repeat: int):
        self.results, self.row, self.repeat = results, row, repeat
        self.status = OwnStatus(results, 0)
        self.others = [PeerStatus(results, node) for node in range(1, row.hardware.nodes)]

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
                ahead = answer["about"]["time"] - time.time()
                if why := answer.get("reason") or difference(about, answer["about"], other.name, ahead):
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
        """Tell the others to start, when this node starts."""
        self.status.say(phase=TRAINING, nodes=self.nodes, stop_after=0)

    def meanwhile(self, request: StopRequest) -> None:
        """Called repeatedly while the ranks train: makes all nodes stop together, and checks that they are alive.

        Raises RunFailed if another node has failed or is gone.
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
                raise RunFailed(f"{other.name} has not been heard from for {SILENCE:g} s, so the run was ended")

    def gather(self) -> list[dict]:
        """The reports of the other nodes, when all their processes have ended. Raises RunFailed like `meanwhile`."""
        while not all(other.read().get("phase") == DONE for other in self.others):
            self._hear()
            self.status.beat()
            time.sleep(POLL)
        return [other.last for other in self.others]

    def first_reason(self) -> str:
        """Why another node failed, if that made this one fail too; waits some seconds for its report. Else empty."""
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
        """Tell the others how the whole run ended, so that they end with the same exit code and message."""
        with contextlib.suppress(OSError, RunFailed):  # if the disk is full, the others notice its silence
            self.status.say(phase=OVER, code=code, reason=reason)


@contextlib.contextmanager
def leading(results: Path, row: Row, repeat: int):
    """Node 0's part in a run on several nodes, until the block ends; None if there is one node only."""
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
