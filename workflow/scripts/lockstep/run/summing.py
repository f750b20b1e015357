"""How the summaries of a run's ranks become its record: the slowest rank's time, the total memory and energy."""

from dataclasses import asdict, fields
from pathlib import Path

from lockstep.config.row import Row
from lockstep.data.plan import Plan, load_lengths
from lockstep.files import read_json
from lockstep.model import metrics
from lockstep.model.schedule import lr_factor, other_rates
from lockstep.paths import data_file, data_folder
from lockstep.run.ledger import departures
from lockstep.run.record import Clock, Energy, Evaluation, Memory, RankSummary, Throughput, Trained, Work


def summarise(ranks: list[RankSummary], plan: Plan, results: Path) -> dict:
    """The fields of a Record that follow from its ranks' summaries."""
    first, clock = ranks[0], _clock(ranks)
    about = read_json(data_file(results))
    shape, with_lora = metrics.Shape(**about["shape"]), bool(first.settings["lora"]["lora"])
    work = metrics.work(plan, load_lengths(data_folder(results)), shape, with_lora)
    return {each.name: getattr(first, each.name) for each in fields(Trained)} | {
        "notes": first.notes + (foreign_gpus(ranks) if len(ranks) > 1 else []),
        "seeds": [rank.seed for rank in ranks],
        "steps": plan.steps,
        "clock": clock,
        "work": Work(**work),
        "throughput": Throughput(**{f"{name}_per_second": each / clock.train_seconds for name, each in work.items()}),
        "evaluation": _evaluation(first.dev, clock.evaluation_seconds),
        "memory": _memory(ranks),
        "memory_by_gpu": _by_gpu(ranks, "memory_by_gpu"),
        "reserved_by_gpu": _by_gpu(ranks, "reserved_by_gpu"),
        "bytes_read_per_rank": [rank.bytes_read for rank in ranks],
        "energy": _energy(ranks),
        "hashes": first.hashes | {"data": about["hash"]},
    }


def departed(row: Row, ledger: dict, plan: Plan, ranks: list[RankSummary]) -> list[str]:
    """How a run departed from its plan, if it may, and from the schedule of the learning rate; empty if it did not."""
    factor = lr_factor(row.train, plan.steps, plan.epochs)
    asked = [row.train.learning_rate * factor(step) for step in range(plan.steps)]
    said = [departures(ledger, plan) if row.may_depart else "", *(other_rates(asked, rank.rates) for rank in ranks)]
    return [reason for reason in dict.fromkeys(said) if reason]


def same_seeds(row: Row, ranks: list[RankSummary]) -> list[str]:
    """A note if replicas drop the same units, because something has given their ranks one seed.

    A trial has no dropout, so no proof can see it. Ranks that hold a replica together are neighbours, and share a seed.
    """
    seeds = [rank.seed for rank in ranks[:: row.ranks_per_replica]]
    if len(set(seeds)) == len(seeds) or not any(ranks[0].settings["dropout"]):
        return []
    return [
        f"of its {len(seeds)} replicas some have the same seed for dropout, and drop the same units: something sets a"
        " seed after the model is made"
    ]


def _clock(ranks: list[RankSummary]) -> Clock:
    clocks = [rank.clock for rank in ranks]
    names = [each.name for each in fields(Clock) if each.name.endswith(("_seconds", "_median"))]
    slowest = max(clocks, key=lambda clock: clock.step_seconds_median)
    last = max(clocks, key=lambda clock: clock.first_step_seconds)  # its parts add up, those of several would not
    return Clock(
        **{name: max(getattr(clock, name) for clock in clocks) for name in names},
        setup=last.setup,
        step_seconds_quartiles=slowest.step_seconds_quartiles,
    )


def _evaluation(dev: list[dict], seconds: float) -> Evaluation | None:
    """The seconds of all evaluations on the dev split, and their samples per second; None if there were none."""
    samples = sum(scores["support"] for scores in dev)
    if not samples or not seconds:
        return None
    return Evaluation(seconds=seconds, samples=samples, samples_per_second=samples / seconds)


def _memory(ranks: list[RankSummary]) -> Memory:
    """Each kind of memory per rank and in total, in MiB; None if the device has no such kind."""
    totals, memories = {}, [asdict(rank.memory) for rank in ranks]
    for kind in memories[0]:
        values = [round(memory[kind], 1) for memory in memories if memory[kind] is not None]
        totals |= {f"{kind}_per_rank": values or None, kind: round(sum(values), 1) if values else None}
    return Memory(**totals)


def _by_gpu(ranks: list[RankSummary], kind: str) -> list[float]:
    """The memory of all ranks together on each GPU of each node, in MiB."""
    sums = []
    for number in sorted({rank.node for rank in ranks}):
        theirs = [getattr(rank, kind) for rank in ranks if rank.node == number]
        sums += [round(sum(gpu), 1) for gpu in zip(*theirs, strict=True)]
    return sums


def foreign_gpus(ranks: list[RankSummary]) -> list[str]:
    """The ranks that used a GPU other than their own; `memory_by_gpu` is each rank's memory on each GPU, in MiB."""
    return [
        f"rank {rank} had {used:.1f} MiB on GPU {number}, which is not its own: it did not choose its device in time,"
        " or read a checkpoint onto the GPU that it was saved from"
        for rank, about in enumerate(ranks)
        for number, used in enumerate(about.memory_by_gpu)
        if used and about.settings["device"] != f"cuda:{number}"
    ]


def _energy(ranks: list[RankSummary]) -> Energy:
    """The energy of each kind of device over all machines; None if one of them does not count it."""
    machines = [rank.energy for rank in ranks if rank.energy]
    return Energy(
        gpu_joules=_total(machine.gpu for machine in machines),
        cpu_joules=_total(machine.cpu for machine in machines),
        counters=[name for machine in machines for name in machine.counters],
    )


def _total(joules) -> float | None:
    joules = list(joules)
    return None if None in joules else sum(joules)
