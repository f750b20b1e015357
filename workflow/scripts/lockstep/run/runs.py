"""One run: a row trained once, from its settings to its record."""

import contextlib
import datetime
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from lockstep import nvml, paths
from lockstep.config import launchers
from lockstep.config.configuration import Config
from lockstep.config.hardware import built_for_amd, busy_cores, cpu_cores, refuse_less, training_gpus
from lockstep.config.row import Row, times_trained
from lockstep.config.settings import Settings
from lockstep.data import prepared
from lockstep.data.plan import Plan, load_lengths
from lockstep.errors import BadInput, OtherWork, RunFailed, RunSaved, RunStopped
from lockstep.files import hash_text, named_when_full, read_json, remove_unfinished, write_json
from lockstep.model import metrics
from lockstep.model.schedule import lr_factor, other_rates
from lockstep.paths import data_file, data_folder, plan_file, require
from lockstep.run import coordination, forked, hand, journal, lifetime, node, record, saved, training_log, watcher
from lockstep.run.ledger import check_ledger, departures, gather_ledger, gather_steps, write_ledger, write_steps
from lockstep.run.processes import Interrupted, Saved

# What a run leaves in its folder. Taken away before it is run again: nothing of one may stand beside another's record.
LEFT = (
    *(paths.RECORD, paths.FAILED, paths.LEDGER, paths.STEPS, paths.EVENTS, paths.ENVIRONMENT, paths.WATCH, paths.RANKS),
    *(paths.LIVE, paths.NODES, paths.HAND, paths.CHECKPOINT, paths.MODEL, paths.TEST, paths.UNTESTED),
    *(paths.VERDICT, paths.FINAL_WEIGHTS, paths.PROFILE, paths.TRACE),
)

LAST_WORDS = 30  # lines of each rank's log that stand in that of a run that failed


def run(config: Config, row: Row, repeat: int, results: Path, resume: Path | None = None) -> dict:
    """Train `row` once, in processes of its own, and return its record, which is written as record.json.

    A run that is timed and was disturbed is repeated at once, `config.retries` times at most; the last attempt counts,
    and its record tells of those before it. Later would be too late: the runs that it is compared with are made now.
    It goes on from the latest state that is saved in its folder, or in that of another run, `resume`.

    Raises BadInput where it can't be started, as where another process runs in its folder; RunFailed, after
    failed.json was written, where it did not succeed.
    """
    if repeat < 1:
        raise BadInput(f"--repeat {repeat}: repetitions are numbered from 1.")
    folder, about = results / row.folder(repeat), prepared.require(results)
    planned = require(plan_file(results, row.plan_name), "plan.py")
    plan = Plan.load(planned)
    refuse_to_start(row)
    refuse_unused_parameters(row, about.get("unused_parameters", []))
    refuse_lora_targets(row, about.get("lora_layers", {}))
    disturbed: list[dict] = []
    with lifetime.hold(folder), coordination.leading(results, row, repeat) as lead:
        while True:
            finished = _run(config, row, repeat, results, plan, disturbed, resume, lead)
            reasons = finished["watch"]["disturbed"]
            # One that was carried on is no measurement, however often it is repeated.
            if not row.kind.measured or not reasons or finished["resumed"] or len(disturbed) == config.retries:
                return finished
            attempt = {name: finished[name] for name in ("started", "wall_seconds")}
            attempt |= {"train_seconds": finished["clock"]["train_seconds"]}
            disturbed.append(attempt | {"disturbed": reasons})
            print(f"{row.name}: {'; '.join(reasons)}; it is repeated", flush=True)


def _run(
    config: Config,
    row: Row,
    repeat: int,
    results: Path,
    plan: Plan,
    disturbed_before: list[dict],
    resume: Path | None,
    lead: coordination.Lead | None,
) -> dict:
    folder, data = results / row.folder(repeat), data_folder(results)
    rendezvous = lead.meet() if lead else coordination.alone(row)
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
            f"{data} was prepared with another task, data, model or train.seed than this configuration's; to train by"
            " this one, run prepare.py and plan.py with it"
        )
    state = saved.find(folder, settings, plan, notes.append)
    if resume and resume.resolve() != folder.resolve():
        state = max(filter(None, [state, saved.find_elsewhere(resume, settings, plan)]), key=lambda state: state.name)
    settings = replace(settings, saved=str(state) if state else "")
    write_json(folder / paths.SETTINGS, asdict(settings))  # first, so that what can't be written removes nothing
    for name in LEFT:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    saved.remove(folder, but=state)
    if not state:
        # A run that is carried on adds to these.
        for name in (paths.TENSORBOARD, paths.SNAPSHOTS, paths.PICTURES):
            shutil.rmtree(folder / name, ignore_errors=True)
    remove_unfinished(folder)
    for left in folder.glob(".*.tmp"):  # of files, where a supervisor was killed while it wrote
        left.unlink(missing_ok=True)
    (folder / paths.RANKS).mkdir()
    for note in notes:
        print(f"warning: {row.name}: {note}", file=sys.stderr, flush=True)
    if state:
        print(f"{row.name}: carries on from {state}", flush=True)
    log = folder / paths.LOG
    others = nvml.processes(nvml.gpus(training_gpus(row.hardware)))
    notes += _before(row, others)
    about = {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "world_size": row.hardware.devices,
        "replicas": row.replicas,
        "repeat": repeat,
        "session": lifetime.session(),
        "disturbed_before": disturbed_before,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "asked": settings.of_row() | {"dropout": settings.dropout},
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "log": str(log),
        "notes": notes,
    }
    data_before = prepared.stamps(results)
    try:
        try:
            strangers = [process["pid"] for process in others]
            finished = _train(row, settings, folder, plan, results, rendezvous, lead, strangers)
        finally:
            if file := prepared.changed(data_before):
                saved.remove(folder, but=state)
                raise RunFailed(f"{file}: was changed or removed while the run trained on it; its states are removed")
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        remove_unfinished(folder)  # of which a full disk may have room for the reason
        try:
            record.write_run(folder / paths.FAILED, about | {"status": "failed", "reason": reason})
            _add_last_words(folder, log)
        except RunFailed as full:
            reason = f"{reason}; {full}"
        if isinstance(error, RunFailed):
            kind = type(error)
        elif isinstance(error, Saved):
            kind = RunSaved
        else:
            kind = RunStopped
        raise kind(f"{row.name}: {reason} (log: {log})") from None
    finished = about | {"status": "ok", "reason": ""} | finished | {"notes": notes + finished["notes"]}
    record.write_run(folder / paths.RECORD, finished)
    saved.remove(folder, but=paths.saved_state(folder, plan.steps))
    if row.kind.measured:
        journal.note(results, "run", folder, journal.OF_A_RUN)
    return finished


def _before(row: Row, others: list[dict]) -> list[str]:
    """What a reader must know of a run before it starts: its GPUs, which is also said at once, and its batch.

    `others` are processes on its GPUs.

    A run beside others is not refused, no more than one on busy cores: they may end before it is timed. Where they do
    not, the watcher says that it was disturbed.
    """
    notes = []
    if others:
        notes.append(f"others were on its GPUs before it started: {', '.join(map(nvml.say, others))}")
    if row.hardware.device == "cuda" and (folder := nvml.mps_folder()):
        notes.append(
            f"NVIDIA's Multi-Process Service is on ({folder}): kernels of several processes share a GPU at one time"
        )
    if row.hardware.device == "cuda" and built_for_amd():
        notes.append("its GPUs are AMD's: processes of others, clocks, utilisation and energy are not told of")
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
        beside = "" if row.train.global_batch == theirs else f", where the table's is {theirs}"
        notes.append(f"its global batch is {row.train.global_batch}: {size}{beside}")
    return notes


def profile(config: Config, row: Row, results: Path) -> str:
    """Take a few of the row's steps apart in a run of their own, which leaves profile.json, and say what was found."""
    profiled = config.profiled(row)
    folder = results / profiled.folder(1)
    with lifetime.hold(folder):
        try:
            run(config, profiled, 1, results)
        finally:
            shutil.rmtree(folder / paths.CHECKPOINT, ignore_errors=True)
        measured = read_json(folder / paths.PROFILE)
    whole = sum(measured["seconds"].values())
    # As shares: how long a step takes is for the timed runs to say.
    parts = ", ".join(f"{name} {100 * seconds / whole:.0f}" for name, seconds in measured["seconds"].items())
    return f"{row.name}: a step's time by what it goes to, in %: {parts}"


def refuse_to_start(row: Row) -> None:
    """Raises BadInput where the row can't be trained, here or anywhere. Called once, before a run and its repeats.

    What depends on this moment belongs here; on the settings alone, in `Row.refuse`; on packages, in `Row.unavailable`;
    on what the machine has, in `hardware.resolve`, which the Snakefile and the report ask too.
    """
    row.refuse()
    refuse_less(row.asked, row.hardware)
    if row.unavailable:
        raise BadInput(f"rows.{row.name}: {row.unavailable}.")


def refuse_unused_parameters(row: Row, unused: list[str]) -> None:
    """Raises BadInput where DistributedDataParallel would wait for gradients that never come.

    Not with LoRA, by which most parameters are none that it waits for.
    """
    waits = row.options.get("find_unused_parameters") is False and row.hardware.processes > 1
    if unused and waits and not row.train.lora:
        others = f" (and {len(unused) - 1} more)" if unused[1:] else ""
        raise BadInput(
            f"rows.{row.name}: the model's {unused[0]}{others} gets no gradient, which {row.strategy} must be told of."
            " Set find_unused_parameters: true in the row, or leave the parameter out of the model."
        )


def refuse_lora_targets(row: Row, layers: dict[str, int]) -> None:
    """Raises BadInput where one of the row's lora_targets names none of the model's layers.

    layers: of the model, by path, the smaller side of each one's matrix; empty where it is not known.
    """
    named = set(row.train.lora_targets or [])
    if not (row.train.lora and layers and named) or "all-linear" in named:
        return
    for name in sorted(named):
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            there = ", ".join(sorted({path.split(".")[-1] for path in layers}))
            raise BadInput(
                f"rows.{row.name}.lora_targets: {name} names no layer of the model that LoRA can update. There are:"
                f" {there}."
            )


def _train(
    row: Row,
    settings: Settings,
    folder: Path,
    plan: Plan,
    results: Path,
    rendezvous: coordination.Rendezvous,
    lead: coordination.Lead | None,
    strangers: list[int],
) -> dict:
    command = launchers.command(row.settings(), paths.TRAIN, folder, rendezvous)
    start = command
    if row.in_forks and forked.possible(row):
        start = forked.ranks(row, folder, rendezvous)

    @contextlib.contextmanager
    def meanwhile(log):
        with _training_log(folder, settings, plan, log) as tell:

            def call(request) -> None:
                tell()
                if lead:
                    lead.meanwhile(request)

            yield call

    if lead:
        lead.begin()
    outcome = node.train(row, folder, start, rendezvous, plan.steps, strangers, meanwhile)
    processes = row.hardware.processes
    # Some launchers fail, or abort, after all is done: what the ranks have written says how the run went.
    errors = record.read_errors(folder)
    missing = any(not paths.rank_summary(folder, rank).is_file() for rank in range(row.hardware.processes_per_node))
    if lead and (outcome.reason or errors or missing) and (reason := lead.first_reason()):
        raise RunFailed(reason)
    if row.launcher.by_hand and (reason := hand.ended(folder)):
        raise RunFailed(reason)
    if outcome.reason:
        raise RunFailed(outcome.reason)
    if errors:
        kind = OtherWork if errors[0]["type"] == OtherWork.__name__ else RunFailed
        raise kind(record.say_error(errors[0], plan.steps))
    statuses = lead.gather() if lead else []
    if any(not paths.rank_summary(folder, rank).is_file() for rank in range(processes)):
        ended = f"the processes ended with exit code {outcome.exit_code} before they were done"
        raise RunFailed(ended + record.first_error(folder / paths.LOG))
    ledger = gather_ledger(folder, processes)
    times = times_trained(row.strategy, row.options, processes) if row.kind.forgives else 1
    if not row.may_depart:
        check_ledger(ledger, plan, times)
    write_ledger(folder / paths.LEDGER, ledger)
    write_steps(folder / paths.STEPS, gather_steps(folder, processes))
    ranks = record.read_ranks(folder, processes)
    weights = read_json(data_file(results))["weights"]
    if any(rank["hashes"]["weights"] != weights for rank in ranks):
        raise RunFailed(f"a rank started from other weights than those in {data_folder(results) / paths.WEIGHTS}")
    record.write_events(folder / paths.EVENTS, ranks)
    window = record.window([rank for rank in ranks if rank["node"] == 0])
    watch = watcher.judge(watcher.read(folder), window, cpu_cores(), busy_cores(asdict(row.hardware)))
    for number, status in enumerate(statuses, 1):
        reasons = status["watch"]["disturbed"] if status["watch"] else []
        watch["disturbed"] += [f"node {number} ({status['about']['host']}): {reason}" for reason in reasons]
    summary = _summary(ranks, plan, results)
    summary["departed"] = _departed(row, ledger, plan, ranks)
    if summary["departed"] and not row.may_depart:
        raise OtherWork(summary["departed"][0])
    summary["notes"] += summary["departed"]
    if summary["resumed"]:
        steps = " and ".join(str(step) for step in summary["resumed"])
        watch["disturbed"].insert(0, f"it was interrupted, and carried on after step {steps}")
    if any(status["watch"] is None for status in statuses):
        summary["notes"].append("nothing watched the other machines: its launcher starts their ranks from the first")
    about = {"nodes": lead.nodes} if lead else {}
    return {"command": command, "wall_seconds": outcome.seconds, "watch": watch} | summary | about


@contextlib.contextmanager
def _training_log(folder: Path, settings: Settings, plan: Plan, log):
    """Tell of the run every `train.log_every` steps while the block runs, by the function that is given to it."""
    if not settings.train.log_every:
        yield lambda: None
        return

    def say(line: str) -> None:
        log.write(f"{line}\n")
        log.flush()
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more
            tqdm.write(f"{settings.row}: {line}")

    watched = training_log.Log(folder, settings, plan, say)
    try:
        yield watched.update
    finally:
        summary = paths.rank_summary(folder, 0)
        watched.finish(read_json(summary)["dev"] if summary.is_file() else [])


def _add_last_words(folder: Path, log: Path) -> None:
    """Add to the run's log what ranks other than the main one said last, the one that failed first at its end.

    It is the end of that log which the report shows.
    """
    failed = [error["rank"] for error in record.read_errors(folder)]
    files = {int(file.stem): file for file in (folder / paths.RANKS).glob(paths.rank_log(folder, "*").name)}
    order = sorted(files.keys() - set(failed)) + [rank for rank in reversed(failed) if rank in files]
    with named_when_full(log), log.open("a", encoding="utf-8") as stream:
        for rank in order:
            lines = files[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
            if lines:
                stream.write("\n".join([f"the last of {files[rank]}:", *lines, ""]))


def _summary(ranks: list[dict], plan: Plan, results: Path) -> dict:
    clocks = [rank["clock"] for rank in ranks]
    largest = {
        name: max(clock[name] for clock in clocks) for name in clocks[0] if name.endswith(("_seconds", "_median"))
    }
    slowest = max(clocks, key=lambda clock: clock["step_seconds_median"])
    about = read_json(data_file(results))
    shape, with_lora = metrics.Shape(**about["shape"]), bool(ranks[0]["settings"]["lora"]["lora"])
    work = metrics.work(plan, load_lengths(data_folder(results)), shape, with_lora)
    seconds = largest["train_seconds"]
    return {
        "settings": ranks[0]["settings"],
        "notes": ranks[0]["notes"] + (_strays(ranks) if len(ranks) > 1 else []),
        "seeds": [rank["seed"] for rank in ranks],
        "steps": plan.steps,
        "losses": ranks[0]["losses"],
        "rates": ranks[0]["rates"],
        "terms": ranks[0]["terms"],
        "gradient_norm": ranks[0]["gradient_norm"],
        "dev": ranks[0]["dev"],
        "resumed": ranks[0]["resumed"],
        "saved": ranks[0]["saved"],
        "snapshots": ranks[0]["snapshots"],
        "clock": largest
        | {
            "setup": {part: max(clock["setup"][part] for clock in clocks) for part in clocks[0]["setup"]},
            "step_seconds_quartiles": slowest["step_seconds_quartiles"],
        },
        "work": work,
        "throughput": {
            "samples_per_second": work["samples"] / seconds,
            "tokens_per_second": work["tokens"] / seconds,
            "padded_tokens_per_second": work["padded_tokens"] / seconds,
            "flops_per_second": work["flops"] / seconds,
            "padded_flops_per_second": work["padded_flops"] / seconds,
        },
        "evaluation": _evaluation(ranks[0]["dev"], largest.get("evaluation_seconds", 0.0)),
        "memory": _total([rank["memory"] for rank in ranks]),
        "memory_by_gpu": _by_gpu(ranks, "memory_by_gpu"),
        "reserved_by_gpu": _by_gpu(ranks, "reserved_by_gpu"),
        "bytes_read_per_rank": [rank["bytes_read"] for rank in ranks],
        "energy": _joules([rank["energy"] for rank in ranks if rank["energy"]]),
        "hashes": ranks[0]["hashes"] | {"data": about["hash"]},
    }


def _departed(row: Row, ledger: dict, plan: Plan, ranks: list[dict]) -> list[str]:
    """In what a run departed from its plan and its schedule, where it may depart from either, or steps the latter."""
    factor = lr_factor(row.train, plan.steps, plan.epochs)
    asked = [row.train.learning_rate * factor(step) for step in range(plan.steps)]
    said = [departures(ledger, plan) if row.may_depart else "", *(other_rates(asked, rank["rates"]) for rank in ranks)]
    return [reason for reason in dict.fromkeys(said) if reason]


def _evaluation(dev: list[dict], seconds: float) -> dict | None:
    """How long all evaluations on the dev split took, and how many samples a second they had; None without any."""
    samples = sum(scores["support"] for scores in dev)
    if not samples or not seconds:
        return None
    return {"seconds": seconds, "samples": samples, "samples_per_second": samples / seconds}


def _total(ranks: list[dict]) -> dict:
    """Each kind of memory of each rank, and of all together, in MiB; None where the device has no such kind."""
    totals = {}
    for kind in ranks[0]:
        values = [round(rank[kind], 1) for rank in ranks if rank[kind] is not None]
        totals |= {f"{kind}_per_rank": values or None, kind: round(sum(values), 1) if values else None}
    return totals


def _by_gpu(ranks: list[dict], kind: str) -> list[float]:
    """What all ranks together had on each GPU of each node, of what each had on each of its own."""
    sums = []
    for number in sorted({rank["node"] for rank in ranks}):
        theirs = [rank[kind] for rank in ranks if rank["node"] == number]
        sums += [round(sum(gpu), 1) for gpu in zip(*theirs, strict=True)]
    return sums


def _strays(ranks: list[dict]) -> list[str]:
    """Which ranks used another GPU than their own; `memory_by_gpu` is what each had on each GPU, in MiB."""
    return [
        f"rank {rank} had {used:.1f} MiB on GPU {number}, which is not its own: it did not choose its device in time,"
        " or read a checkpoint onto the GPU that it was saved from"
        for rank, about in enumerate(ranks)
        for number, used in enumerate(about["memory_by_gpu"])
        if used and about["settings"]["device"] != f"cuda:{number}"
    ]


def _joules(machines: list[dict]) -> dict:
    """The energy of each kind of device, over all machines; None where one of them does not tell."""
    return {
        f"{kind}_joules": None if any(machine[kind] is None for machine in machines) else sum(m[kind] for m in machines)
        for kind in ("gpu", "cpu")
    } | {"counters": [name for machine in machines for name in machine["counters"]]}
