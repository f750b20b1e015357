"""One run, which trains a row once: from its settings to its record."""

import contextlib
import datetime
import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

from lockstep import nvml, paths
from lockstep.config import launchers
from lockstep.config.configuration import Config
from lockstep.config.hardware import busy_cores, training_gpus
from lockstep.config.machine import built_for_amd, cpu_cores, slowing
from lockstep.config.row import Row, times_trained
from lockstep.config.settings import Settings
from lockstep.data import prepared
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, OtherWork, RunFailed, RunSaved, RunStopped
from lockstep.files import hash_text, named_when_full, read_json, remove_unfinished, write_json
from lockstep.paths import data_file, data_folder, plan_file, require
from lockstep.run import (
    addresses,
    coordination,
    forked,
    hand,
    journal,
    lifetime,
    node,
    record_files,
    refusals,
    saved,
    summing,
    training_log,
    watcher,
)
from lockstep.run.ledger import check_ledger, gather_ledger, gather_steps, write_ledger, write_steps
from lockstep.run.processes import Interrupted, Outcome, Saved
from lockstep.run.record import Begun, Disturbed, RankSummary, Record, Watch

# What a run leaves in its folder. It is removed before the next run, so that no file stands beside another's record.
LEFT = (
    *(paths.RECORD, paths.FAILED, paths.LEDGER, paths.STEPS, paths.EVENTS, paths.ENVIRONMENT, paths.WATCH, paths.RANKS),
    *(paths.LIVE, paths.NODES, paths.HAND, paths.RAY, paths.CHECKPOINT, paths.MODEL, paths.TEST, paths.UNTESTED),
    *(paths.VERDICT, paths.FINAL_WEIGHTS, paths.PROFILE, paths.TRACE),
)

LAST_WORDS = 30  # lines of each rank's log that the log of a failed run repeats


def run(config: Config, row: Row, repeat: int, results: Path, resume: Path | None = None) -> Record:
    """Train `row` once, in processes of its own, and return its record, which is written as record.json.

    A timed run that was disturbed is repeated at once, at most `config.retries` times, because the runs that it is
    compared with are made at this time. The last attempt counts, and its record describes the earlier ones.
    A run continues from the latest state that is saved in its folder, or in the folder `resume` of another run.

    Raises BadInput if it can't be started, for example because another process runs in its folder. Raises RunFailed if
    it failed, RunSaved if it was ended with its state saved, and RunStopped if it was ended otherwise; failed.json is
    written before.
    """
    if repeat < 1:
        raise BadInput(f"--repeat {repeat}: repetitions are numbered from 1.")
    folder, about = results / row.folder(repeat), prepared.require(results)
    planned = require(plan_file(results, row.plan_name), "plan.py")
    plan = Plan.load(planned)
    refusals.refuse_to_start(row)
    refusals.refuse_unused_parameters(row, about.get("unused_parameters", []))
    refusals.refuse_lora_targets(row, about.get("lora_layers", {}))
    if layers := about.get("shape", {}).get("layers"):  # not known of every model of a user's own
        refusals.refuse_layers(row, layers)
    if "heads" in about:  # data that an earlier version prepared lacks them
        refusals.refuse_heads(row, about["heads"])
    disturbed: list[Disturbed] = []
    with lifetime.hold(folder), coordination.leading(results, row, repeat) as lead:
        assignment = Assignment(config, row, repeat, results, plan, resume, lead)
        while True:
            finished = _attempt(assignment, disturbed)
            reasons = finished.watch.disturbed
            # A resumed run is no measurement, however often it is repeated.
            if not row.kind.measured or not reasons or finished.resumed or len(disturbed) == config.retries:
                return finished
            disturbed.append(
                Disturbed(
                    started=finished.started,
                    wall_seconds=finished.wall_seconds,
                    train_seconds=finished.clock.train_seconds,
                    disturbed=reasons,
                )
            )
            print(f"{row.name}: {'; '.join(reasons)}; it is repeated", flush=True)


@dataclass(frozen=True)
class Assignment:
    """What a run has to train, and where. It is the same for each attempt at the run."""

    config: Config
    row: Row
    repeat: int
    results: Path
    plan: Plan
    resume: Path | None  # the folder of another run, from whose saved states it may continue
    lead: coordination.Lead | None  # leads the other nodes, if there are any

    @property
    def folder(self) -> Path:
        return self.results / self.row.folder(self.repeat)


@dataclass(frozen=True)
class Attempt(Assignment):
    """One attempt at a run, with what is determined before anything starts."""

    settings: Settings
    state: Path | None  # the saved state from which it continues
    rendezvous: addresses.Rendezvous
    notes: list[str]  # what readers of the table must know


def _attempt(assignment: Assignment, disturbed_before: list[Disturbed]) -> Record:
    """Make one attempt at a run. Raises as `run` does."""
    attempt = _settle(assignment)
    row, folder, notes = attempt.row, attempt.folder, attempt.notes
    # This comes first, so that nothing is removed if it can't be written.
    write_json(folder / paths.SETTINGS, asdict(attempt.settings))
    _clear(attempt)
    for note in notes:
        print(f"warning: {row.name}: {note}", file=sys.stderr, flush=True)
    if attempt.state:
        print(f"{row.name}: carries on from {attempt.state}", flush=True)
    others = nvml.processes(nvml.gpus(training_gpus(row.hardware)))
    notes += _before(row, others)
    about = _about(attempt, disturbed_before)
    try:
        with _on_unchanged_data(attempt):
            finished = _train(attempt, [process["pid"] for process in others])
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        raise _failed(attempt, about, error) from None
    made = Record(**about | {"status": "ok", "reason": ""} | finished | {"notes": notes + finished["notes"]})
    record_files.write_run(folder / paths.RECORD, made)
    saved.remove(folder, but=paths.saved_state(folder, attempt.plan.steps))
    if row.kind.measured:
        journal.note(attempt.results, "run", folder, journal.OF_A_RUN)
    return made


def _settle(assignment: Assignment) -> Attempt:
    """The attempt. Raises BadInput if its ranks could not meet, or if `resume` has no state to continue from."""
    config, row, folder, plan = assignment.config, assignment.row, assignment.folder, assignment.plan
    results, data = assignment.results, data_folder(assignment.results)
    rendezvous = assignment.lead.meet() if assignment.lead else addresses.alone(row)
    if launchers.meets_in_a_file(row.options):
        lifetime.refuse_without_locks(folder, row.name)
    settings = replace(
        row.settings(),
        data=str(data),
        plan_file=str(plan_file(results, row.plan_name)),
        dropout=config.model.dropout if row.kind.dropout else 0,
        profile=config.profile,
        config_hash=hash_text(json.dumps(config.source, sort_keys=True)),
    )
    notes: list[str] = []
    if not paths.ready_file(results, config.data_key).is_file():
        notes.append(
            f"{data} was prepared with another task, data, model or train.seed than this configuration's; to train with"
            " this configuration, run prepare.py and plan.py with it"
        )
    with assignment.lead.beating() if assignment.lead else contextlib.nullcontext():  # states are hashed
        state = saved.find(folder, settings, plan, notes.append)
        if assignment.resume and assignment.resume.resolve() != folder.resolve():
            other = saved.find_elsewhere(assignment.resume, settings, plan)
            state = max(filter(None, [state, other]), key=lambda state: state.name)
    settings = replace(settings, saved=str(state) if state else "")
    return Attempt(**vars(assignment), settings=settings, state=state, rendezvous=rendezvous, notes=notes)


def _clear(attempt: Attempt) -> None:
    """Remove what an earlier run or attempt left in the folder, except what a resumed run adds to."""
    folder = attempt.folder
    for name in LEFT:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    saved.remove(folder, but=attempt.state)
    if not attempt.state:
        for name in (paths.TENSORBOARD, paths.SNAPSHOTS, paths.PICTURES):
            shutil.rmtree(folder / name, ignore_errors=True)
    remove_unfinished(folder)
    for left in folder.glob(".*.tmp"):  # left if a supervisor was killed while it wrote a file
        left.unlink(missing_ok=True)
    (folder / paths.RANKS).mkdir()


def _about(attempt: Attempt, disturbed_before: list[Disturbed]) -> dict:
    """The fields of a run's record that do not depend on how the run ends."""
    row, settings = attempt.row, attempt.settings
    return {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "world_size": row.hardware.devices,
        "replicas": row.replicas,
        "repeat": attempt.repeat,
        "session": lifetime.session_name(),
        "disturbed_before": disturbed_before,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "asked": settings.of_row() | {"dropout": settings.dropout},
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "log": str(attempt.folder / paths.LOG),
        "notes": attempt.notes,
    }


@contextlib.contextmanager
def _on_unchanged_data(attempt: Attempt):
    """Raises RunFailed if prepared data was changed during the block, whatever else happened in it."""
    before = prepared.stamps(attempt.results)
    try:
        yield
    finally:
        if file := prepared.changed(before):
            saved.remove(attempt.folder, but=attempt.state)
            raise RunFailed(f"{file}: was changed or removed while the run trained on it; its states are removed")


def _failed(attempt: Attempt, about: dict, error: BaseException) -> Exception:
    """Write failed.json, and return the exception to raise for a run that `error` ended."""
    folder, log = attempt.folder, attempt.folder / paths.LOG
    reason = str(error) or "interrupted"
    remove_unfinished(folder)  # which may free space for the reason on a full disk
    try:
        record_files.write_run(folder / paths.FAILED, Begun(**about | {"status": "failed", "reason": reason}))
        _add_last_words(folder, log)
    except RunFailed as full:
        reason = f"{reason}; {full}"
    if isinstance(error, RunFailed):
        kind = type(error)
    elif isinstance(error, Saved):
        kind = RunSaved
    else:
        kind = RunStopped
    return kind(f"{attempt.row.name}: {reason} (log: {log})")


def _before(row: Row, others: list[dict]) -> list[str]:
    """Notes on a run that are known before it starts: on its GPUs, which are also printed, and on its batch.

    others: other processes on its GPUs. A run beside them is not refused, just as on busy cores, because they may end
    before it is timed. If they do not, the watcher reports that the run was disturbed.
    """
    notes = []
    if others:
        notes.append(f"other processes were on its GPUs before it started: {', '.join(map(nvml.say, others))}")
    if row.hardware.device == "cuda" and (folder := nvml.mps_folder()):
        notes.append(
            f"NVIDIA's Multi-Process Service is on ({folder}): kernels of several processes share a GPU at one time"
        )
    if row.hardware.device == "cuda" and built_for_amd():
        notes.append("its GPUs are AMD's: other processes on them, clocks, utilisation and energy are not recorded")
    if variables := slowing(row.hardware.device):
        notes.append(f"its times are longer than without {', '.join(variables)}, which is for finding errors")
    for note in notes:
        print(f"warning: {row.name}: {note}", file=sys.stderr, flush=True)
    hardware = row.hardware
    if hardware.workers and busy_cores(asdict(hardware)) > (cores := cpu_cores()):
        many = hardware.workers * hardware.processes_per_node
        notes.append(f"its {many} worker processes and its ranks share {cores} CPU cores")
    if row.train.device_batch:
        sharing = f"{row.replicas} {'devices' if row.ranks_per_replica == 1 else 'replicas'}"
        size = f"{row.train.device_batch} x {sharing} x {row.train.accumulation} micro-batches"
        theirs = row.shared.train.global_batch
        beside = "" if row.train.global_batch == theirs else f", but the table's is {theirs}"
        notes.append(f"its global batch is {row.train.global_batch}: {size}{beside}")
    return notes


def profile(config: Config, row: Row, results: Path) -> str:
    """Profile a few of the row's steps in a run of their own, which writes profile.json, and return what was found."""
    profiled = config.profiled(row)
    folder = results / profiled.folder(1)
    with lifetime.hold(folder):
        try:
            run(config, profiled, 1, results)
        finally:
            shutil.rmtree(folder / paths.CHECKPOINT, ignore_errors=True)
        measured = read_json(folder / paths.PROFILE)
    whole = sum(measured["seconds"].values())
    # As shares, because only the timed runs tell how long a step takes.
    parts = ", ".join(f"{name} {100 * seconds / whole:.0f}" for name, seconds in measured["seconds"].items())
    return f"{row.name}: a step's time by phase, in %: {parts}"


def _train(attempt: Attempt, others: list[int]) -> dict:
    """Start the ranks, wait for them, and return the fields of the record that tell of them.

    others: the ids of processes that were on the GPUs before. Raises RunFailed if the ranks failed, and its subclass
    OtherWork if they trained anything but the plan.
    """
    row, folder, plan, lead = attempt.row, attempt.folder, attempt.plan, attempt.lead
    command = row.command(folder, attempt.rendezvous)
    start = command
    if forked.wanted(row):
        start = forked.ranks(row, folder, attempt.rendezvous)

    @contextlib.contextmanager
    def meanwhile(log):
        with _training_log(folder, attempt.settings, plan, log) as tell:

            def call(request) -> None:
                tell()
                if lead:
                    lead.meanwhile(request)

            yield call

    if lead:
        lead.begin()
    outcome = node.train(row, folder, start, attempt.rendezvous, plan.steps, others, meanwhile)
    statuses = _require_success(attempt, outcome)
    ledger = _checked_ledger(attempt)
    ranks = record_files.read_ranks(folder, row.hardware.processes)
    weights = read_json(data_file(attempt.results))["weights"]
    if any(rank.hashes["weights"] != weights for rank in ranks):
        file = data_folder(attempt.results) / paths.WEIGHTS
        raise RunFailed(f"a rank started from weights that differ from those in {file}")
    record_files.write_events(folder / paths.EVENTS, ranks)
    summary = summing.summarise(ranks, plan, attempt.results)
    summary["departed"] = summing.departed(row, ledger, plan, ranks)
    if summary["departed"] and not row.may_depart:
        raise OtherWork(summary["departed"][0])
    summary["notes"] += summary["departed"] + summing.same_seeds(row, ranks)
    if any(status["watch"] is None for status in statuses):
        summary["notes"].append(
            "the other machines were not watched, because its launcher starts their ranks from the first one"
        )
    watch = _judged(attempt, ranks, statuses)
    if summary["resumed"]:
        steps = " and ".join(str(step) for step in summary["resumed"])
        watch.disturbed.insert(0, f"it was interrupted, and carried on after step {steps}")
    about = {"nodes": lead.nodes} if lead else {}
    return {"command": _as_anywhere(command), "wall_seconds": outcome.seconds, "watch": watch} | summary | about


def _require_success(attempt: Attempt, outcome: Outcome) -> list[dict]:
    """The reports of the other nodes. Raises RunFailed, or OtherWork, with the first reason if the run failed.

    Some launchers fail or abort after all work is done, so what the ranks have written decides.
    """
    row, folder, lead = attempt.row, attempt.folder, attempt.lead

    def missing(ranks: int) -> bool:
        return any(not paths.rank_summary(folder, rank).is_file() for rank in range(ranks))

    errors = record_files.read_errors(folder)
    failed = outcome.reason or errors or missing(row.hardware.processes_per_node)
    if lead and failed and (reason := lead.first_reason()):
        raise RunFailed(reason)
    if row.launcher.by_hand and (reason := hand.ended(folder)):
        raise RunFailed(reason)
    if outcome.reason:
        raise RunFailed(outcome.reason)
    if errors:
        kind = OtherWork if errors[0]["type"] == OtherWork.__name__ else RunFailed
        raise kind(record_files.say_error(errors[0], attempt.plan.steps))
    statuses = lead.gather() if lead else []
    if missing(row.hardware.processes):
        ended = f"the processes ended with exit code {outcome.exit_code} before they were done"
        raise RunFailed(ended + record_files.first_error(folder / paths.LOG))
    return statuses


def _checked_ledger(attempt: Attempt) -> dict:
    """Gather the ledger of all ranks, and write it. Raises OtherWork if it must be the plan and is not."""
    row, folder, processes = attempt.row, attempt.folder, attempt.row.hardware.processes
    ledger = gather_ledger(folder, processes)
    times = times_trained(row.strategy, row.options, processes) if row.kind.forgives else 1
    if not row.may_depart:
        check_ledger(ledger, attempt.plan, times)
    write_ledger(folder / paths.LEDGER, ledger)
    write_steps(folder / paths.STEPS, gather_steps(folder, processes))
    return ledger


def _judged(attempt: Attempt, ranks: list[RankSummary], statuses: list[dict]) -> Watch:
    """What the watchers of all nodes saw, and why the run was disturbed, if it was."""
    window = record_files.window([rank for rank in ranks if rank.node == 0])
    busy = busy_cores(asdict(attempt.row.hardware))
    watch = watcher.judge(watcher.read(attempt.folder), window, cpu_cores(), busy)
    for number, status in enumerate(statuses, 1):
        reasons = status["watch"]["disturbed"] if status["watch"] else []
        watch.disturbed.extend(f"node {number} ({status['about']['host']}): {reason}" for reason in reasons)
    return watch


@contextlib.contextmanager
def _training_log(folder: Path, settings: Settings, plan: Plan, log):
    """Log the run every `train.log_every` steps, whenever the block calls the function that it gets."""
    if not settings.train.log_every:
        yield lambda: None
        return

    def say(line: str) -> None:
        log.write(f"{line}\n")
        log.flush()
        with contextlib.suppress(BrokenPipeError):  # the reader is gone
            tqdm.write(f"{settings.row}: {line}")

    watched = training_log.Log(folder, settings, plan, say)
    try:
        yield watched.update
    finally:
        summary = paths.rank_summary(folder, 0)
        watched.finish(read_json(summary)["dev"] if summary.is_file() else [])


def _add_last_words(folder: Path, log: Path) -> None:
    """Append to the run's log the last lines of the other ranks' logs; those of the rank that failed first come last.

    The report shows the end of the run's log.
    """
    failed = [error["rank"] for error in record_files.read_errors(folder)]
    files = {int(file.stem): file for file in (folder / paths.RANKS).glob(paths.rank_log(folder, "*").name)}
    order = sorted(files.keys() - set(failed)) + [rank for rank in reversed(failed) if rank in files]
    with named_when_full(log), log.open("a", encoding="utf-8") as stream:
        for rank in order:
            lines = files[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
            if lines:
                stream.write("\n".join([f"the last lines of {files[rank]}:", *lines, ""]))


def _as_anywhere(command: list[str]) -> list[str]:
    """A command without the folders of this project and of its Python environment, as it is in any other clone."""
    project, environment = f"{paths.PROJECT}/", f"{Path(sys.executable).parent}/"
    return [word.replace(project, "").replace(environment, "") for word in command]
