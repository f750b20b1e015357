"""The nodes other than node 0 (coordination.py): they wait for its call, train their share, and end when it says so."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lockstep import nvml, paths
from lockstep.config import launchers
from lockstep.config.configuration import Config
from lockstep.config.hardware import busy_cores, training_gpus
from lockstep.config.kinds import Kind
from lockstep.config.machine import cpu_cores
from lockstep.config.resolving import refuse_less
from lockstep.config.row import Row
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, RunFailed, RunSaved
from lockstep.run import addresses, lifetime, node, peers, record_files, watcher
from lockstep.run.peers import Peer
from lockstep.run.processes import Interrupted, Saved
from lockstep.run.progress import Progress


def follow(configuration: Callable[[], Config], results: Path, rank: int, wanted: Row | None) -> None:
    """Take part in node 0's runs as node `rank`: in one run of the row `wanted`, or without it in all, until ended.

    configuration: reads the configuration, anew for each run, because node 0 may be asked for another one meanwhile.
    Raises the error with which node 0 ends the run: BadInput, RunFailed or RunSaved.
    """
    lead, answered = None, ""
    with lifetime.hold(paths.nodes_folder(results) / str(rank)):  # so that no two nodes have the same number
        while True:
            lead = _await_call(results, rank, lead, answered, wanted.asked.timeout if wanted else None)
            called = lead.last
            answered = called["call"]
            try:
                config = configuration()
                row = _row(config, called["run"])
                why = _refusal(called["run"], row, wanted, rank, config)
            except BadInput as error:  # the configuration was changed, and can't be read
                why = str(error)
            if why:
                lead.say(phase=peers.FAILED, call=answered, reason=why, about={"time": time.time()})
            else:
                _answer(lead, row, results, rank, called)
                _take_part(lead, row, results, rank)
            ended = _await_end(lead, answered)
            if ended is None:  # node 0 calls again: the run was disturbed, and is repeated
                continue
            lead.close()
            if wanted:
                _end(ended)
                return
            print(f"{called['run']['row']}: {ended['reason'] or 'done'}", flush=True)


def _await_call(results: Path, rank: int, lead: Peer | None, answered: str, patience: float | None) -> Peer:
    """Wait for a call other than `answered`, and return the connection to the node 0 that calls.

    lead: the connection to an earlier node 0, which may be closed. Raises BadInput if no call comes in time.
    """
    deadline, why = time.monotonic() + (patience or 0), ""
    while True:
        try:
            lead = peers.join(results, rank) if lead is None or lead.closed else lead
            why = ""
        except FileNotFoundError:  # no node 0 leads a run
            why = ""
        except OSError as error:
            why = f": {error}. Are all ports between the nodes open?"
        else:
            call = lead.read()
            if call["phase"] == peers.CALLING and call["call"] != answered:
                return lead
            lead.beat()
            if lead.lost or call["phase"] == peers.OVER:
                lead.close()
        if patience and time.monotonic() > deadline:
            raise BadInput(
                f"node 0 did not call within {patience:g} s (hardware.timeout){why or '.'} Start launch.py there with"
                " --node-rank 0 and the same --results, in a folder that all nodes share:"
                f" {results.resolve()}"
            )
        time.sleep(peers.POLL)


def _row(config: Config, run: dict) -> Row | None:
    """The row of a call, by this node's configuration; None if it has no row of that name."""
    if run["row"] not in config.rows:
        return None
    row = config.rows[run["row"]]
    return config.profiled(row) if run["kind"] == Kind.PROFILE else config.repetition(row, run["repeat"])


def _refusal(run: dict, row: Row | None, wanted: Row | None, rank: int, config: Config) -> str:
    """Why this node can't take part in a run; empty if it can."""
    if rank >= run["nodes"]:
        return f"node {rank} is beyond the number of nodes: on node 0, hardware.nodes is {run['nodes']}."
    if row is None or (wanted and row.name != wanted.name):
        names = wanted.name if wanted else ", ".join(config.rows)
        return f"node {rank} was started for {names}, but node 0 for {run['row']}. Name the same row on both."
    return ""


def _answer(lead: Peer, row: Row, results: Path, rank: int, called: dict) -> None:
    """Report the state of this node, and whether it reaches the ranks' rendezvous on node 0."""
    reason, at, interface = "", "", ""
    try:
        refuse_less(row.asked, row.hardware)
        at, interface = addresses.reach(*called["endpoint"], row.asked.interface)
    except BadInput as error:
        reason = str(error)
    if row.unavailable:
        reason = reason or f"rows.{row.name} on node {rank}: {row.unavailable}."
    about = peers.describe(row, results, at, interface)
    lead.say(phase=peers.FAILED if reason else peers.READY, call=called["call"], reason=reason, about=about)


def _take_part(lead: Peer, row: Row, results: Path, rank: int) -> None:
    """Wait for the start, train this node's share, and report the outcome to node 0."""
    if lead.content["phase"] == peers.FAILED:
        return
    call = lead.content["call"]
    while (status := lead.read())["phase"] == peers.CALLING and status["call"] == call:
        if lead.lost:
            return
        lead.beat()
        time.sleep(peers.POLL)
    if status["call"] != call or status["phase"] != peers.TRAINING:
        return
    folder = Path(status["run"]["folder"])
    own = lead.content["about"]
    hosts = addresses.host_names(row, status["nodes"])
    rendezvous = addresses.Rendezvous(
        status["endpoint"][1], status["endpoint"][0], rank, own["address"], own["interface"], hosts, call
    )
    lead.add(phase=peers.TRAINING)
    paths.node_folder(folder, rank).mkdir(parents=True, exist_ok=True)
    if row.launcher.from_one_node:
        Progress(folder, rank, row.hardware.processes_per_node)
        lead.add(phase=peers.DONE, watch=None)
        return
    try:
        if launchers.meets_in_a_file(row.options):
            lifetime.refuse_without_locks(folder, row.name)
        watch = _train(lead, row, results, folder, rendezvous)
        lead.add(phase=peers.DONE, watch=watch)
    except Saved:
        lead.add(phase=peers.DONE, watch=None)  # node 0 has stopped after the same step, and reports it
    except (BadInput, Interrupted, RunFailed) as error:
        lead.add(phase=peers.FAILED, reason=str(error))
    except BaseException as error:
        lead.add(phase=peers.FAILED, reason=str(error) or f"ended by {type(error).__name__}")
        raise


def _train(lead: Peer, row: Row, results: Path, folder: Path, rendezvous: addresses.Rendezvous) -> dict:
    """Train this node's ranks; returns what the watcher saw of this machine meanwhile."""
    own_folder = paths.node_folder(folder, rendezvous.node)
    plan = Plan.load(paths.plan_file(results, row.plan_name))
    command = row.command(folder, rendezvous)
    others = [process["pid"] for process in nvml.processes(nvml.gpus(training_gpus(row.hardware)))]

    @contextlib.contextmanager
    def listening(log):
        def listen(request) -> None:
            status = lead.read()
            if status["call"] != rendezvous.name or status["phase"] == peers.OVER:
                raise Interrupted(f"node 0 ended the run: {status.get('reason', '')}")
            if lead.lost:
                raise Interrupted(lead.lost)
            if status.get("stop_after"):
                request.after(status["stop_after"])
            if request.asked and not lead.content.get("asked_to_stop"):
                lead.add(asked_to_stop=True)
            lead.beat()

        yield listen

    with lifetime.hold(own_folder):
        outcome = node.train(row, folder, command, rendezvous, plan.steps, others, listening)
    if outcome.reason:
        raise RunFailed(outcome.reason)
    if errors := record_files.read_errors(folder):
        raise RunFailed(record_files.say_error(errors[0], plan.steps))
    ranks = [summary for summary in record_files.read_written(folder) if summary.node == rendezvous.node]
    if len(ranks) < row.hardware.processes_per_node:
        ended = f"the processes ended with exit code {outcome.exit_code} before they were done"
        raise RunFailed(ended + record_files.first_error(own_folder / paths.LOG))
    window, busy = record_files.window(ranks), busy_cores(asdict(row.hardware))
    return asdict(watcher.judge(watcher.read(own_folder), window, cpu_cores(), busy))


def _await_end(lead: Peer, call: str) -> dict | None:
    """Wait for node 0's report on how the run ended; None if it calls again."""
    while True:
        status = lead.read()
        if status["call"] != call:
            return None
        if status["phase"] == peers.OVER:
            return status
        if lead.lost:
            return {"code": 1, "reason": lead.lost}
        lead.beat()
        time.sleep(peers.POLL)


def _end(ended: dict) -> None:
    kinds = {2: BadInput, 143: RunSaved}
    if ended["code"]:
        raise kinds.get(ended["code"], RunFailed)(ended["reason"])
