"""One run: a row trained once, from its settings to its record."""

import datetime
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from lockstep.config.configuration import Config
from lockstep.config.hardware import busy_cores, cpu_cores, selection
from lockstep.config.row import Row
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.errors import BadInput, RunFailed, RunStopped
from lockstep.files import hash_text, lacking, read_json, write_json
from lockstep.model import metrics
from lockstep.paths import SCRIPTS, data_file, plan_file, require
from lockstep.run import journal, launchers, lifetime, record, watcher
from lockstep.run.ledger import check_ledger, gather_ledger, gather_steps, write_ledger, write_steps
from lockstep.run.processes import Interrupted, supervise

MAKE_DATA = "Remove it: Snakemake makes it again, or by hand prepare.py and plan.py with the same configuration."
# What a run leaves in its folder. Taken away before it is run again: nothing of one may stand beside another's record.
LEFT = ("record.json", "failed.json", "verdict.json", "ledger.npz", "events.jsonl", "env.json", "watch.jsonl")
LEFT += (
    record.STEPS,
    record.UNTESTED,
    "native",
    "model",
    "test",
    "ranks",
    "profile.json",
    "trace.json.gz",
    "weights.safetensors",
)


def run(config: Config, row: Row, repeat: int, results: Path) -> dict:
    """Train `row` once, in processes of its own, and return its record, which is written as record.json.

    A run that is timed and was disturbed is repeated at once, `config.retries` times at most; the last attempt counts,
    and its record tells of those before it. Later would be too late: the runs that it is compared with are made now.

    Raises BadInput where it can't be started, as where another process runs in its folder; RunFailed, after
    failed.json was written, where it did not succeed.
    """
    if repeat < 1:
        raise BadInput(f"--repeat {repeat}: repetitions are numbered from 1.")
    folder, data = results / row.folder(repeat), results / "data"
    about = read_json(require(data_file(results), "prepare.py"))
    planned = require(plan_file(results, row.plan_name), "plan.py")
    if gone := lacking(data, about.get("files", {})):
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise BadInput(f"{gone[0]}{more} is gone or changed. {MAKE_DATA}")
    plan = Plan.load(planned)
    refuse_to_start(row)
    disturbed: list[dict] = []
    with lifetime.hold(folder):
        while True:
            finished = _run(config, row, repeat, results, plan, disturbed)
            reasons = finished["watch"]["disturbed"]
            if row.kind != "runs" or not reasons or len(disturbed) == config.retries:
                return finished
            told = {name: finished[name] for name in ("started", "wall_seconds")}
            told |= {"train_seconds": finished["clock"]["train_seconds"]}
            disturbed.append(told | {"disturbed": reasons})
            print(f"{row.name}: {'; '.join(reasons)}; it is repeated", flush=True)


def _run(config: Config, row: Row, repeat: int, results: Path, plan: Plan, disturbed_before: list[dict]) -> dict:
    folder, data = results / row.folder(repeat), results / "data"
    settings = replace(
        row.settings(),
        data=str(data),
        plan_file=str(plan_file(results, row.plan_name)),
        dropout=0 if row.kind == "parity" else config.model.dropout,
        profile=config.profile,
        config_hash=hash_text(json.dumps(config.source, sort_keys=True)),
    )
    write_json(folder / "settings.json", asdict(settings))  # first, so that what can't be written removes nothing
    for name in LEFT:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "ranks").mkdir()
    log = folder / "run.log"
    about = {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "world_size": row.hardware.devices,
        "repeat": repeat,
        "session": lifetime.session(),
        "disturbed_before": disturbed_before,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "asked": settings.of_row() | {"dropout": settings.dropout},
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "log": str(log),
    }
    try:
        finished = _train(row, folder, log, plan, results)
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        record.write_run(folder / "failed.json", about | {"status": "failed", "reason": reason})
        kind = type(error) if isinstance(error, RunFailed) else RunStopped
        raise kind(f"{row.name}: {reason} (log: {log})") from None
    finished = about | {"status": "ok", "reason": ""} | finished
    record.write_run(folder / "record.json", finished)
    if row.kind == "runs":
        journal.note(results, "run", folder, journal.OF_A_RUN)
    return finished


def profile(config: Config, row: Row, results: Path) -> str:
    """Take a few of the row's steps apart in a run of their own, which leaves profile.json, and say what was found."""
    profiled = config.profiled(row)
    folder = results / profiled.folder(1)
    with lifetime.hold(folder):
        try:
            run(config, profiled, 1, results)
        finally:
            shutil.rmtree(folder / "native", ignore_errors=True)
        measured = read_json(folder / "profile.json")
    parts = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in measured["seconds"].items())
    return f"{row.name}: a step takes {1000 * measured['step_seconds']:.1f} ms; recorded, in ms: {parts}"


def refuse_to_start(row: Row) -> None:
    """Raises BadInput where the row can't be trained, here or anywhere. Called once, before a run and its repeats.

    What depends on this moment belongs here; on the settings alone, in `Row.refuse`; on packages, in `Row.unavailable`;
    on what the machine has, in `hardware.resolve`, which the Snakefile and the report ask too.
    """
    row.refuse()
    if row.unavailable:
        raise BadInput(f"rows.{row.name}: {row.unavailable}.")


def _train(row: Row, folder: Path, log: Path, plan: Plan, results: Path) -> dict:
    command, processes = launchers.command(row.settings(), SCRIPTS / "train.py", folder), row.hardware.processes
    # Launchers leave files in the temporary folder, so they get one that goes when they do.
    with log.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        environment = _environment(row) | {"TMPDIR": scratch}
        with watcher.beside(folder):
            outcome = supervise(command, environment, folder, stream, processes, plan.steps, row.hardware.timeout)
    if outcome.reason:
        raise RunFailed(outcome.reason)
    # Some launchers fail, or abort, after all is done: what the ranks have written says how the run went.
    errors = record.read_errors(folder)
    if errors:
        first = errors[0]
        raise RunFailed(
            f"rank {first['rank']}, after step {first['step']} of {plan.steps}: {first['type']}: {first['message']}"
        )
    if any(not (folder / "ranks" / f"{rank}.json").is_file() for rank in range(processes)):
        raise RunFailed(f"the processes ended with exit code {outcome.exit_code} before they were done")
    ledger = gather_ledger(folder, processes)
    check_ledger(ledger, plan)
    write_ledger(folder / "ledger.npz", ledger)
    write_steps(folder / record.STEPS, gather_steps(folder, processes))
    ranks = record.read_ranks(folder, processes)
    weights = read_json(data_file(results))["weights"]
    if any(rank["hashes"]["weights"] != weights for rank in ranks):
        raise RunFailed(f"a rank started from other weights than those in {results / 'data' / 'weights'}")
    record.write_events(folder / "events.jsonl", ranks)
    window = [min(rank["clock"]["window"][0] for rank in ranks), max(rank["clock"]["window"][1] for rank in ranks)]
    return {
        "command": command,
        "wall_seconds": outcome.seconds,
        "watch": watcher.judge(watcher.read(folder), window, cpu_cores(), busy_cores(asdict(row.hardware))),
    } | _summary(ranks, plan, results)


def _environment(row: Row) -> dict[str, str]:
    """The variables that every process of a run gets. Launchers would set threads each in their own way."""
    threads = str(row.hardware.threads)
    environment = os.environ | {
        # Programs that frameworks call, as DeepSpeed does ninja: another one would compile anew what set-up compiled.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(SCRIPTS),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # What frameworks compile, in a folder of this environment: two that share one compile it anew for each other.
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    environment |= selection(row.hardware.gpus)
    if row.hardware.nodes == 1:  # talk over loopback, whatever the host's name resolves to
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def _summary(ranks: list[dict], plan: Plan, results: Path) -> dict:
    clocks = [rank["clock"] for rank in ranks]
    largest = {
        name: max(clock[name] for clock in clocks) for name in clocks[0] if name.endswith(("_seconds", "_median"))
    }
    slowest = max(clocks, key=lambda clock: clock["step_seconds_median"])
    about = read_json(data_file(results))
    work = metrics.work(
        plan, Tokens.load(results / "data" / "dataset" / "train").lengths, metrics.Shape(**about["shape"])
    )
    seconds = largest["train_seconds"]
    by_gpu = [rank["memory_by_gpu"] for rank in ranks]
    return {
        "settings": ranks[0]["settings"],
        "notes": ranks[0]["notes"] + (_strays(by_gpu, [rank["local_rank"] for rank in ranks]) if by_gpu[1:] else []),
        "seeds": [rank["seed"] for rank in ranks],
        "steps": plan.steps,
        "losses": ranks[0]["losses"],
        "gradient_norm": ranks[0]["gradient_norm"],
        "dev": ranks[0]["dev"],
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
        "memory": _total([rank["memory"] for rank in ranks]),
        "memory_by_gpu": [round(sum(gpu), 1) for gpu in zip(*by_gpu, strict=True)],
        "energy": _joules([rank["energy"] for rank in ranks if rank["energy"]]),
        "hashes": ranks[0]["hashes"] | {"data": about["hash"]},
    }


def _total(ranks: list[dict]) -> dict:
    """Each kind of memory of each rank, and of all together, in MiB; None where the device has no such kind."""
    totals = {}
    for kind in ranks[0]:
        known = [round(rank[kind], 1) for rank in ranks if rank[kind] is not None]
        totals |= {f"{kind}_per_rank": known or None, kind: round(sum(known), 1) if known else None}
    return totals


def _strays(by_gpu: list[list[float]], local_ranks: list[int]) -> list[str]:
    """Which ranks, of several that have a GPU each, used another's; `by_gpu` is what each had on each GPU, in MiB."""
    return [
        f"rank {rank} had {used:.1f} MiB on GPU {number}, which is not its own: it did not choose its device in time,"
        " or read a checkpoint onto the GPU that it was saved from"
        for rank, (own, local_rank) in enumerate(zip(by_gpu, local_ranks, strict=True))
        for number, used in enumerate(own)
        if used and number != local_rank
    ]


def _joules(machines: list[dict]) -> dict:
    """The energy of each kind of device, over all machines; None where one of them does not tell."""
    return {
        f"{kind}_joules": None if any(machine[kind] is None for machine in machines) else sum(m[kind] for m in machines)
        for kind in ("gpu", "cpu")
    } | {"counters": [name for machine in machines for name in machine["counters"]]}
