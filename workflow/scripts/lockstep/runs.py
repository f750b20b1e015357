"""One run: a row trained once, from its settings to its record."""

import datetime
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from lockstep import record, strategies
from lockstep.config import Config, Row
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, write_json
from lockstep.plan import Plan
from lockstep.processes import Interrupted, supervise
from lockstep.tokens import Tokens

SCRIPTS = Path(__file__).parents[1]
SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "record.schema.yaml"
# What a run leaves in its folder. Taken away before it is run again: nothing of one may stand beside another's record.
LEFT = ("record.json", "failed.json", "ledger.npz", "events.jsonl", "env.json", "native", "model", "test", "ranks")


def run(config: Config, row: Row, repeat: int, results: Path) -> dict:
    """Train `row` once, in processes of its own, and return its record, which is written as record.json.

    Raises BadInput where it can't be started; RunFailed, after failed.json was written, where it did not succeed.
    """
    folder, data = results / row.folder(repeat), results / "data"
    plan_file = data / "plan" / f"{row.train.plan_name}.npz"
    for file, script in ((data / "data.json", "prepare.py"), (plan_file, "plan.py")):
        if not file.exists():
            raise BadInput(f"{file} does not exist. Run workflow/scripts/{script} first.")
    plan = Plan.load(plan_file)
    check(row)
    strategy = strategies.load(row.strategy)(row.settings())

    folder.mkdir(parents=True, exist_ok=True)
    for name in LEFT:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "ranks").mkdir()
    settings = row.settings() | {
        "data": str(data),
        "plan_file": str(plan_file),
        "dropout": 0 if row.trial else config.model.dropout,
        "trial": row.trial,
    }
    write_json(folder / "settings.json", settings)
    log = folder / "run.log"
    about = {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "world_size": row.hardware.processes,
        "repeat": repeat,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "asked": row.settings(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "log": str(log),
    }
    try:
        finished = _train(strategy, row, folder, log, plan, data)
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        write_record(folder / "failed.json", about | {"status": "failed", "reason": reason})
        raise RunFailed(f"{row.name}: {reason} (log: {log})") from None
    finished = about | {"status": "ok", "reason": ""} | finished
    write_record(folder / "record.json", finished)
    return finished


def check(row: Row) -> None:
    """What can't be trained, here or anywhere. Raises BadInput."""
    import torch

    row.refuse()
    if row.unavailable:
        raise BadInput(f"rows.{row.name}: {row.unavailable}.")
    if row.hardware.device == "cuda" and torch.cuda.device_count() < row.hardware.processes:
        raise BadInput(
            f"rows.{row.name}.processes: {row.hardware.processes}, but PyTorch sees {torch.cuda.device_count()} GPUs."
        )
    if not torch.distributed.is_backend_available(row.hardware.backend):
        raise BadInput(
            f"rows.{row.name}.backend: this PyTorch was built without {row.hardware.backend}. Set it to auto."
        )
    if row.train.global_batch < row.hardware.processes * row.train.accumulation:
        raise BadInput(
            f"rows.{row.name}.global_batch: {row.train.global_batch} samples can't be shared by"
            f" {row.hardware.processes} processes in {row.train.accumulation} micro-batches each. Raise it."
        )


def _train(strategy, row: Row, folder: Path, log: Path, plan: Plan, data: Path) -> dict:
    command = strategy.launch(SCRIPTS / "train.py", folder)
    # Launchers leave files in the temporary folder, so they get one that goes when they do.
    with log.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        environment = _environment(row) | {"TMPDIR": scratch}
        outcome = supervise(command, environment, folder, stream, strategy.processes, plan.steps, row.hardware.timeout)
    if outcome.reason:
        raise RunFailed(outcome.reason)
    # Some launchers fail, or abort, after all is done: what the ranks have written says how the run went.
    errors = record.read_errors(folder)
    if errors:
        first = errors[0]
        raise RunFailed(
            f"rank {first['rank']}, after step {first['step']} of {plan.steps}: {first['type']}: {first['message']}"
        )
    if any(not (folder / "ranks" / f"{rank}.json").is_file() for rank in range(strategy.processes)):
        raise RunFailed(f"the processes ended with exit code {outcome.exit_code} before they were done")
    ledger = record.gather_ledger(folder, strategy.processes)
    record.check_ledger(ledger, plan)
    record.write_ledger(folder / "ledger.npz", ledger)
    ranks = record.read_ranks(folder, strategy.processes)
    weights = read_json(data / "data.json")["weights"]
    if any(rank["hashes"]["weights"] != weights for rank in ranks):
        raise RunFailed(f"a rank started from other weights than those in {data / 'weights'}")
    record.write_events(folder / "events.jsonl", ranks)
    return {"command": command, "wall_seconds": outcome.seconds} | _summary(ranks, plan, data)


@cache
def record_schema() -> dict:
    return yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))


def write_record(path: Path, finished: dict) -> None:
    Draft202012Validator(record_schema()).validate(finished)
    write_json(path, finished)


def _environment(row: Row) -> dict[str, str]:
    """The variables that every process of a run gets. Launchers would set threads each in their own way."""
    threads = str(row.hardware.threads)
    environment = os.environ | {
        "PYTHONPATH": str(SCRIPTS),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if row.hardware.nodes == 1:  # talk over loopback, whatever the host's name resolves to
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def _summary(ranks: list[dict], plan: Plan, data: Path) -> dict:
    clocks = [rank["clock"] for rank in ranks]
    largest = {
        name: max(clock[name] for clock in clocks) for name in clocks[0] if name.endswith(("_seconds", "_median"))
    }
    slowest = max(clocks, key=lambda clock: clock["step_seconds_median"])
    tokens = int(Tokens.load(data / "dataset" / "train").lengths[plan.ids].sum())
    peaks = [round(rank["peak_memory_mb"], 1) for rank in ranks]
    return {
        "settings": ranks[0]["settings"],
        "notes": ranks[0]["notes"],
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
        "throughput": {
            "samples_per_second": len(plan.ids) / largest["train_seconds"],
            "tokens_per_second": tokens / largest["train_seconds"],
        },
        "memory": {"peak_mb_per_rank": peaks, "peak_mb": sum(peaks)},
        "hashes": ranks[0]["hashes"] | {"data": read_json(data / "data.json")["hash"]},
    }
