"""`lockstep which --model`: foretells a model's training on many GPUs by its shape, and prints it."""

import argparse
import csv
import math
from dataclasses import asdict, replace

from lockstep import paths
from lockstep.config import registry
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.forecast import clusters, memory, model, sharded
from lockstep.forecast.clusters import MEMORY, MOST_GPUS, Cluster
from lockstep.forecast.sharded import Run, Shape
from lockstep.terminal import print_table, short, within

MEASURED = paths.PROJECT / "docs" / "measurements" / "others" / "llm-foundry.csv"  # it is not in images
AT_A_TIME = 16384  # tokens that a GPU computes at a time, at most, where no micro-batch is named
SPARED = ("MFU, %", "keeps, GiB", "tokens/s per GPU")  # columns that a narrow terminal does without
MOST_AT_A_TIME, MOST_IN_A_STEP = 2**20, 2**32  # tokens: beyond these even a guess would mislead


def tell(arguments: argparse.Namespace) -> int:
    """Print what is foretold of a model's training on each number of GPUs. Raises BadInput.

    arguments: those of `lockstep which`.
    """
    if arguments.gpu is None and arguments.cluster is None:
        raise BadInput("--gpu: say which, as in --gpu h100 --gpus 8 64, or --cluster; or leave out --model.")
    if arguments.gpus is None:
        raise BadInput("--gpus: say how many, as in --gpu h100 --gpus 8 64; or leave out --model.")
    for name in ("rows", "seal", "picture", "memory", "set", "config"):
        if getattr(arguments, name, None):
            raise BadInput(f"--{name}: is for your own rows. Leave it out, or leave out --model.")
    arguments.length = 2048 if arguments.length is None else arguments.length
    cluster = _cluster(arguments)
    _refuse(arguments, cluster)
    described = model.read(arguments.model, "language-modelling", arguments.length)
    shape = sharded.shape_of(described)
    window = described.config.get("sliding_window")
    foretold, without = [], []
    for gpus in dict.fromkeys(arguments.gpus):
        runs = [_run(arguments, cluster, gpus, name) for name in _strategies(arguments, gpus)]
        fits = [run for run in runs if _room(shape, run) >= 0]
        without += [run for run in runs if run not in fits]
        foretold += sorted((_foretell(shape, run, window, arguments) for run in fits), key=_step_seconds)
    if not foretold:
        raise BadInput(_does_not_fit(shape, without))
    print(
        f"{described.config['architectures'][0]}, {shape.weights:,} weights{', by LoRA' if arguments.lora else ''},"
        f" texts of {arguments.length:,} tokens, in bf16, activations"
        f" {'computed again' if arguments.checkpointing else 'kept'}"
    )
    if described.remark:
        print(described.remark)
    print(f"{arguments.gpu or arguments.cluster}: {cluster}")
    _tell(shape, foretold, without, arguments)
    if arguments.json:
        everything = {"model": asdict(shape), "price": arguments.price, "foretold": foretold}
        write_json(arguments.json, everything | {"does_not_fit": [asdict(run) for run in without]})
    return 0


def _strategies(arguments: argparse.Namespace, gpus: int) -> list[str]:
    """The strategies that are foretold for this number of GPUs. One GPU sends and shards nothing.

    Raises BadInput if another strategy was asked for on one GPU.
    """
    if gpus == 1 and arguments.strategies:
        raise BadInput("--strategies: are of several GPUs, and --gpus has 1. Leave one of them out.")
    return ["single"] if gpus == 1 else list(dict.fromkeys(arguments.strategies or sharded.MANY))


def _step_seconds(found: dict) -> float:
    return found["step_seconds"]


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """The machines that are asked for. Their price is used if none is given and there is something to pay for."""
    cluster = clusters.cards()[arguments.gpu] if arguments.gpu else clusters.read(arguments.cluster)
    if arguments.network is not None:
        cluster = replace(cluster, network=clusters.NETWORK.read(arguments.network, "--network"))
    if arguments.price is None and arguments.tokens is not None:
        arguments.price = cluster.price
    return cluster


def _refuse(arguments: argparse.Namespace, cluster: Cluster) -> None:
    """Raise BadInput if a number is none that a training can have."""
    for gpus in arguments.gpus:
        if not 1 <= gpus <= MOST_GPUS:
            raise BadInput(f"--gpus {gpus}: expected 1 to {MOST_GPUS:,}.")
        if gpus > cluster.gpus_per_machine and gpus % cluster.gpus_per_machine:
            raise BadInput(
                f"--gpus {gpus}: machines have {cluster.gpus_per_machine} GPUs each; name a multiple of that."
            )
    if not 1 <= arguments.length <= MOST_AT_A_TIME:
        raise BadInput(f"--length {arguments.length}: expected 1 to {MOST_AT_A_TIME:,} tokens.")
    for option in ("batch", "batch_tokens", "micro_batch"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise BadInput(f"--{option.replace('_', '-')} {value}: expected at least 1.")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise BadInput(f"--tokens {arguments.tokens:g}: expected at least 1.")
    if arguments.price is not None and arguments.tokens is None:
        raise BadInput("--price: say of how many tokens, as in --tokens 20e9.")


def _run(arguments: argparse.Namespace, cluster: Cluster, gpus: int, strategy: str) -> Run:
    """How this number of GPUs trains. Raises BadInput if they can't share the batch evenly."""
    length, micro = arguments.length, arguments.micro_batch
    at_a_time = max(1, AT_A_TIME // length)
    batch, named = arguments.batch, f"--batch {arguments.batch}"
    if arguments.batch_tokens is not None:
        batch, rest = divmod(arguments.batch_tokens, length)
        named = f"--batch-tokens {arguments.batch_tokens}"
        if rest:
            raise BadInput(f"{named}: is no whole number of texts of {length} tokens. Name a multiple of {length}.")
    if batch is None:
        named, accumulation, micro = f"--gpus {gpus}", 1, micro or at_a_time
    else:
        each, rest = divmod(batch, gpus)
        if rest:
            raise BadInput(f"{named}: {batch} texts can't be shared evenly by {gpus} GPUs. Name a multiple of {gpus}.")
        micro = micro or max(size for size in range(1, min(each, at_a_time) + 1) if each % size == 0)
        accumulation, rest = divmod(each, micro)
        if rest:
            raise BadInput(
                f"--micro-batch {micro}: each of {gpus} GPUs has {each} texts of a step, which is no multiple of it."
            )
    if micro * length > MOST_AT_A_TIME:
        raise BadInput(f"--micro-batch {micro}: expected at most {MOST_AT_A_TIME:,} tokens for a GPU at a time.")
    if gpus * accumulation * micro * length > MOST_IN_A_STEP:
        raise BadInput(f"{named}: expected at most {MOST_IN_A_STEP:,} tokens in a step.")
    recomputed = 1.0 if arguments.checkpointing else 0.0
    return Run(cluster, gpus, length, micro, accumulation, recomputed, strategy=strategy, lora=arguments.lora)


def _room(shape: Shape, run: Run) -> float:
    """The bytes of a GPU that remain for activations; negative if weights, gradients and optimizer state do not fit."""
    return _free(run) - sharded.kept(shape, run)


def _free(run: Run) -> int:
    """The bytes of a GPU without the reserve for CUDA, NCCL and kernels."""
    return run.cluster.memory - int(MEMORY.read(memory.RESERVE, ""))


def _does_not_fit(shape: Shape, runs: list[Run]) -> str:
    """Why none of these runs fits, and what would."""
    run = max(runs, key=lambda run: _room(shape, run))
    states, machine = sum(sharded.states(run).values()), run.cluster.gpus_per_machine
    needed = math.ceil(states * shape.weights / _free(run))
    if needed > machine:
        needed = math.ceil(needed / machine) * machine
    what = "Weights, in fp32," if run.lora else "Weights, gradients and AdamW's state"
    kept, room = sharded.kept(shape, run) / 2**30, run.cluster.memory / 2**30
    return (
        f"--gpus {run.gpus}: it does not fit. {what} take {states} bytes for each weight,"
        f" {states * shape.weights / 2**30:,.0f} GiB in all; {run.strategy} keeps"
        f" {kept:,.3g} GiB on each GPU, which has {room:,.3g}, of which {memory.RESERVE} stay free."
        f" fsdp needs at least {needed} GPUs, and more for activations."
    )


def _foretell(shape: Shape, run: Run, window: int | None, arguments: argparse.Namespace) -> dict:
    """Everything that is foretold of a run. window: the number of tokens that attention sees, if it does not see all.

    low and high are the ends of the interval of `speed`, in tokens/s of each GPU; None where there is none.
    """
    parts = sharded.parts(shape, run)
    seconds = sum(parts.values())
    speed = run.tokens / run.gpus / seconds
    beyond = sharded.extrapolated(shape, run)
    if window and run.length > window:
        beyond.append(f"attention sees {window:,} tokens, and is counted as if it saw all")
    ends = sharded.INTERVALS[run.cluster.rates]
    low, high = (None, None) if beyond else (speed * end for end in ends)
    found = {"run": asdict(run), "tokens_per_step": run.tokens, "step_seconds": seconds, "parts": parts}
    found |= {"speed": speed, "low": low, "high": high, "mfu": sharded.mfu(shape, run, seconds), "extrapolated": beyond}
    found["kept"] = sharded.kept(shape, run)
    if arguments.tokens:
        found["gpu_hours"] = arguments.tokens / speed / 3600
    return found


def _tell(shape: Shape, foretold: list[dict], without: list[Run], arguments: argparse.Namespace) -> None:
    """Print what is foretold, on what it is based, and what is not foretold."""
    header = ["strategy", "GPUs", "a step", "tokens/s per GPU", "MFU, %", "keeps, GiB"]
    if arguments.tokens:
        header.append(f"hours for {arguments.tokens:,.0f} tokens")
    if arguments.price:
        header.append("cost of them")
    print_table([*header, "how it is known"], [_line(each, arguments) for each in foretold], SPARED)
    for gpus in dict.fromkeys(each["run"]["gpus"] for each in foretold):
        _tell_of(gpus, [each for each in foretold if each["run"]["gpus"] == gpus])
    for run in without:
        kept, room = sharded.kept(shape, run) / 2**30, run.cluster.memory / 2**30
        print(
            f"{run.strategy} does not fit on {run.gpus} GPU{'s' if run.gpus > 1 else ''}: it keeps {kept:,.3g} GiB on"
            f" each, which has {room:,.3g}, of which {memory.RESERVE} stay free."
        )
    if MEASURED.is_file():
        print(_nearest(shape, foretold[0]["run"]))
    alike = [name for name in registry.ours() if registry.literals(name)["SENDS"] == "ddp"]
    others = [name for name in registry.ours() if name not in (*sharded.MANY, *alike, "single", "deepspeed")]
    print(f"{', '.join(alike)} send what ddp does. Not foretold by a shape: {', '.join(others)}, deepspeed at stage 3.")
    frozen = " LoRA's own weights and their time are taken to be nothing." if arguments.lora else ""
    print(
        f"GiB that a GPU keeps are for {'weights' if arguments.lora else 'weights, gradients and AdamW'}, in fp32."
        " Whether activations, buckets and gathered layers fit besides was not looked at: lockstep fits counts it."
        f"{frozen}"
    )
    print(
        "An interval holds nine in ten published runs of llm-foundry, by fsdp, that had no part in the rates, and all"
        " of other programs on such cards. None was Lockstep's own, on several GPUs. fsdp is taken to send weights and"
        " gradients in bf16, after each micro-batch, as those do; Lockstep's sends gradients in fp32 once a step, and"
        " weights in fp32, too, unless the row has mixed_precision: policy. The others are taken to send what"
        " Lockstep's do: ddp and zero_redundancy in fp32, DeepSpeed gradients in bf16 and weights in fp32."
    )


def _tell_of(gpus: int, foretold: list[dict]) -> None:
    """Print how these GPUs train, where a step's time goes (fsdp's, or the fastest's), and what is extrapolated."""
    one = next((each for each in foretold if each["run"]["strategy"] == "fsdp"), foretold[0])
    run = one["run"]
    number = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    print(
        f"{number}: steps of {one['tokens_per_step']:,} tokens; each GPU computes {_texts(run['micro_batch'])} at a"
        f" time, {_times(run['accumulation'])} in a step. {run['strategy']}: {_shares(one)}."
    )
    if one["extrapolated"]:
        print(f"{number}: extrapolated, so there is no interval: {'; '.join(one['extrapolated'])}.")
    others = [each["run"]["strategy"] for each in foretold if each is not one]
    if others and not one["extrapolated"]:
        print(f"{number}: {', '.join(others)}: extrapolated, as there is no published run by them to hold it against.")


def _texts(number: int) -> str:
    return "one text" if number == 1 else f"{number} texts"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _line(found: dict, arguments: argparse.Namespace) -> list[str]:
    """A line of the table: each number with its interval, if there is one."""
    gpus = found["run"]["gpus"]
    speed, known = found["speed"], "foretold, extrapolated" if found["extrapolated"] else "foretold"
    low, high = (found["low"], found["high"]) if found["low"] else (speed, speed)

    def taking(value: float) -> str:
        """A time or a cost with its interval; both fall as the speed rises."""
        return within(value, value * speed / high, value * speed / low)

    line = [found["run"]["strategy"], str(gpus), f"{taking(found['step_seconds'])} s"]
    line += [within(speed, low, high), f"{100 * found['mfu']:.0f}", short(found["kept"] / 2**30)]
    if arguments.tokens:
        line.append(taking(found["gpu_hours"] / gpus))
    if arguments.price:
        line.append(taking(found["gpu_hours"] * arguments.price))
    return [*line, known]


def _shares(found: dict) -> str:
    """The parts of a step's time, the largest first."""
    parts = sorted(found["parts"].items(), key=lambda part: -part[1])
    shares = {name: 100 * seconds / found["step_seconds"] for name, seconds in parts}
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)


def _nearest(shape: Shape, run: dict) -> str:
    """The published run on the same card whose sizes have ratios closest to 1 with this run's."""
    own = {"weights": shape.weights} | {name: run[name] for name in ("gpus", "length", "micro_batch")}
    kinds = {name: card.rates for name, card in clusters.cards().items()}
    with MEASURED.open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if kinds[line["card"]] == run["cluster"]["rates"]]

    def distance(line: dict) -> float:
        there = {name: int(line[name]) for name in ("gpus", "weights", "length", "micro_batch")}
        again = abs(float(line["recomputed"]) - run["recomputed"])
        return again + sum(abs(math.log(own[name] / value)) for name, value in there.items())

    best = min(lines, key=distance)
    again = "computed again" if float(best["recomputed"]) else "kept"
    return (
        "Measured, by llm-foundry with fsdp, and most like the first line:"
        f" {int(best['tokens_per_second_per_gpu']):,} tokens/s per GPU, for"
        f" {int(best['weights']):,} weights, {best['length']} tokens, {best['gpus']} {best['card']},"
        f" {_texts(int(best['micro_batch']))} at a time, activations {again}."
    )
