"""How the files of a run's ranks are combined in its record: the slowest rank's time, the total memory and energy."""

from pathlib import Path

from lockstep.config.row import Row
from lockstep.data.plan import Plan, load_lengths
from lockstep.files import read_json
from lockstep.model import metrics
from lockstep.model.schedule import lr_factor, other_rates
from lockstep.paths import data_file, data_folder
from lockstep.run.ledger import departures


def summarise(ranks: list[dict], plan: Plan, results: Path) -> dict:
    clocks = [rank["clock"] for rank in ranks]
    largest = {
        name: max(clock[name] for clock in clocks) for name in clocks[0] if name.endswith(("_seconds", "_median"))
    }
    slowest = max(clocks, key=lambda clock: clock["step_seconds_median"])
    last = max(clocks, key=lambda clock: clock["first_step_seconds"])  # its parts add up, those of several would not
    about = read_json(data_file(results))
    shape, with_lora = metrics.Shape(**about["shape"]), bool(ranks[0]["settings"]["lora"]["lora"])
    work = metrics.work(plan, load_lengths(data_folder(results)), shape, with_lora)
    seconds = largest["train_seconds"]
    return {
        "settings": ranks[0]["settings"],
        "notes": ranks[0]["notes"] + (foreign_gpus(ranks) if len(ranks) > 1 else []),
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
            "setup": last["setup"],
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


def departed(row: Row, ledger: dict, plan: Plan, ranks: list[dict]) -> list[str]:
    """How a run departed from its plan, if it may, and from the schedule of the learning rate; empty if it did not."""
    factor = lr_factor(row.train, plan.steps, plan.epochs)
    asked = [row.train.learning_rate * factor(step) for step in range(plan.steps)]
    said = [departures(ledger, plan) if row.may_depart else "", *(other_rates(asked, rank["rates"]) for rank in ranks)]
    return [reason for reason in dict.fromkeys(said) if reason]


def _evaluation(dev: list[dict], seconds: float) -> dict | None:
    """The seconds of all evaluations on the dev split, and their samples per second; None if there were none."""
    samples = sum(scores["support"] for scores in dev)
    if not samples or not seconds:
        return None
    return {"seconds": seconds, "samples": samples, "samples_per_second": samples / seconds}


def _total(ranks: list[dict]) -> dict:
    """Each kind of memory per rank and in total, in MiB; None if the device has no such kind."""
    totals = {}
    for kind in ranks[0]:
        values = [round(rank[kind], 1) for rank in ranks if rank[kind] is not None]
        totals |= {f"{kind}_per_rank": values or None, kind: round(sum(values), 1) if values else None}
    return totals


def _by_gpu(ranks: list[dict], kind: str) -> list[float]:
    """The memory of all ranks together on each GPU of each node, in MiB."""
    sums = []
    for number in sorted({rank["node"] for rank in ranks}):
        theirs = [rank[kind] for rank in ranks if rank["node"] == number]
        sums += [round(sum(gpu), 1) for gpu in zip(*theirs, strict=True)]
    return sums


def foreign_gpus(ranks: list[dict]) -> list[str]:
    """The ranks that used a GPU other than their own; `memory_by_gpu` is each rank's memory on each GPU, in MiB."""
    return [
        f"rank {rank} had {used:.1f} MiB on GPU {number}, which is not its own: it did not choose its device in time,"
        " or read a checkpoint onto the GPU that it was saved from"
        for rank, about in enumerate(ranks)
        for number, used in enumerate(about["memory_by_gpu"])
        if used and about["settings"]["device"] != f"cuda:{number}"
    ]


def _joules(machines: list[dict]) -> dict:
    """The energy of each kind of device over all machines; None if one of them does not count it."""
    return {
        f"{kind}_joules": None if any(machine[kind] is None for machine in machines) else sum(m[kind] for m in machines)
        for kind in ("gpu", "cpu")
    } | {"counters": [name for machine in machines for name in machine["counters"]]}
