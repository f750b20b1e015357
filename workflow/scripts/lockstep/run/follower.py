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
from lockstep.run import addresses, coordination, lifetime, node, peers, record_files, watcher
from lockstep.run.processes import Interrupted, Saved
from lockstep.run.progress import Progress


def follow(configuration: Callable[[], Config], results: Path, rank: int, wanted: Row | None) -> None:
    """Take part in node 0's runs as node `rank`: in one run of the row `wanted`, or without it in all, until ended.

    configuration: reads the configuration, anew for each run, because node 0 may be asked for another one meanwhile.
    Raises the error with which node 0 ends the run: BadInput, RunFailed or RunSaved.
    """
    own = paths.nodes_folder(results) / str(rank)
    with lifetime.hold(own):  # so that no two nodes have the same number
        own_status, lead = peers.OwnStatus(results, rank), peers.PeerStatus(results, 0)
        answered: list[str] = []
        while True:
            called = _await_call(lead, own_status, answered, wanted.asked.timeout if wanted else None)
            answered.append(called["call"])
            try:
                config = configuration()
                row = _row(config, called["run"])
                why = _refusal(called["run"], row, wanted, rank, config)
            except BadInput as error:  # the configuration was changed, and can't be read
                why = str(error)
            if why:
                own_status.content = {}
                about = {"time": time.time()}
                own_status.say(phase=peers.FAILED, call=called["call"], reason=why, about=about)
            else:
                _answer(own_status, row, results, called)
                _take_part(own_status, lead, row, results, rank)
            ended = _await_end(own_status, lead, called["call"])
            if ended is None:  # node 0 calls again: the run was disturbed, and is repeated
                continue
            if wanted:
                _end(ended)
                return
            print(f"{called['run']['row']}: {ended['reason'] or 'done'}", flush=True)


def _await_call(
    lead: peers.PeerStatus, own_status: peers.OwnStatus, answered: list[str], patience: float | None
) -> dict:
    """Wait for a call that is not answered yet, from a node 0 whose file is changing. Raises BadInput without one."""
    first, deadline = lead.read().get("beat"), time.monotonic() + (patience or 0)
    while True:
        call = lead.read()
        if call.get("phase") == peers.CALLING and call["call"] not in answered and call["beat"] != first:
            return call
        if patience and time.monotonic() > deadline:
            raise BadInput(
                f"node 0 did not call within {patience:g} s (hardware.timeout). Start launch.py there with --node-rank"
                " 0 and the same --results, in a folder that all nodes share:"
                f" {own_status.file.parent.parent.resolve()}"
            )
        time.sleep(coordination.POLL)


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


def _answer(own_status: peers.OwnStatus, row: Row, results: Path, called: dict) -> None:
    """Report the state of this node, and whether it reaches node 0."""
    reason, at, interface = "", "", ""
    try:
        refuse_less(row.asked, row.hardware)
        at, interface = addresses.reach(*called["endpoint"], row.asked.interface)
    except BadInput as error:
        reason = str(error)
    if row.unavailable:
        reason = reason or f"rows.{row.name} on node {own_status.node}: {row.unavailable}."
    own_status.content = {}
    about = peers.describe(row, results, at, interface)
    own_status.say(phase=peers.FAILED if reason else peers.READY, call=called["call"], reason=reason, about=about)


def _take_part(own_status: peers.OwnStatus, lead: peers.PeerStatus, row: Row, results: Path, rank: int) -> None:
    """Wait for the start, train this node's share, and report the outcome to node 0."""
    if own_status.content["phase"] == peers.FAILED:
        return
    call = own_status.content["call"]
    while (status := lead.read()).get("phase") == peers.CALLING and status["call"] == call:
        own_status.beat()
        if lead.silent:
            return
        time.sleep(coordination.POLL)
    if status["call"] != call or status["phase"] != peers.TRAINING:
        return
    folder = Path(status["run"]["folder"])
    own = own_status.content["about"]
    hosts = addresses.host_names(row, status["nodes"])
    rendezvous = addresses.Rendezvous(
        status["endpoint"][1], status["endpoint"][0], rank, own["address"], own["interface"], hosts, call
    )
    own_status.say(phase=peers.TRAINING)
    paths.node_folder(folder, rank).mkdir(parents=True, exist_ok=True)
    if row.launcher.from_one_node:
        Progress(folder, rank, row.hardware.processes_per_node)
        own_status.say(phase=peers.DONE, watch=None)
        return
    try:
        if launchers.meets_in_a_file(row.options):
            lifetime.refuse_without_locks(folder, row.name)
        watch = _train(own_status, lead, row, results, folder, rendezvous)
        own_status.say(phase=peers.DONE, watch=watch)
    except Saved:
        own_status.say(phase=peers.DONE, watch=None)  # node 0 has stopped after the same step, and reports it
    except (BadInput, Interrupted, RunFailed) as error:
        own_status.say(phase=peers.FAILED, reason=str(error))
    except BaseException as error:
        own_status.say(phase=peers.FAILED, reason=str(error) or f"ended by {type(error).__name__}")
        raise


def _train(own_status, lead, row: Row, results: Path, folder: Path, rendezvous: addresses.Rendezvous) -> dict:
    """Train this node's ranks; returns what the watcher saw of this machine meanwhile."""
    own_folder = paths.node_folder(folder, rendezvous.node)
    plan = Plan.load(paths.plan_file(results, row.plan_name))
    command = launchers.command(row.settings(), paths.TRAIN, folder, rendezvous)
    others = [process["pid"] for process in nvml.processes(nvml.gpus(training_gpus(row.hardware)))]

    @contextlib.contextmanager
    def listening(log):
        def listen(request) -> None:
            own_status.beat()
            status = lead.read()
            if lead.silent:
                raise Interrupted(f"node 0 has not been heard from for {peers.SILENCE:g} s")
            if status["call"] != rendezvous.name or status["phase"] == peers.OVER:
                raise Interrupted(f"node 0 ended the run: {status.get('reason', '')}")
            if status.get("stop_after"):
                request.after(status["stop_after"])
            if request.asked and not own_status.content.get("asked_to_stop"):
                own_status.say(asked_to_stop=True)

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


def _await_end(own_status: peers.OwnStatus, lead: peers.PeerStatus, call: str) -> dict | None:
    """Wait for node 0's report on how the run ended; None if it calls again."""
    while True:
        status = lead.read()
        if status["call"] != call:
            return None
        if status["phase"] == peers.OVER:
            return status
        if lead.silent:
            return {"code": 1, "reason": f"node 0 has not been heard from for {peers.SILENCE:g} s"}
        own_status.beat()
        time.sleep(coordination.POLL)


def _end(ended: dict) -> None:
    kinds = {2: BadInput, 143: RunSaved}
    if ended["code"]:
        raise kinds.get(ended["code"], RunFailed)(ended["reason"])
