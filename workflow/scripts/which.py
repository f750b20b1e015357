"""Which strategy, before it runs: how long a step of each row takes on your machines, or of fsdp on many GPUs.

Your own rows, on this machine or several like it, from the configuration and the prepared data:

    lockstep bench --until plan; lockstep network    # the data and the plan, and what messages between ranks cost
    lockstep which --gpus 4 --network 25Gb           # several machines, whose network has this speed
    lockstep which --seal                            # before the benchmark; its report then shows foretold and measured
    lockstep which --memory 24GB --picture which.svg # and what each row needs of such a GPU, as a picture

Each row's own code runs alone for some seconds, with one rank's share of each batch, and its strategy says what it
sends. So it takes about ten seconds a row. --network stands for a network that was not measured, in place of one that
was. --memory and --picture also count each row's memory on GPUs, as `lockstep fits` does, which takes as long again.

Or full sharding (fsdp) on 8 to 512 GPUs, by a model's shape, without a GPU or data:

    lockstep which --model llama.yaml --gpus 8 64 512 --gpu h100 --length 2048 --batch 1024 --tokens 20e9 --price 3

--model is a config.json of transformers, its folder, or a YAML file with the same keys; nothing is downloaded. The time
is foretold for training in bf16, with rates that were found from published runs, and an interval from the errors on
runs that had no part in them. What is beyond what was checked is "extrapolated", and has no interval.

--cluster mine.yaml describes other machines than those of --gpu, with the keys that workflow/cards.yaml explains.
"""

import argparse
import csv
import math
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

from lockstep import cli, paths
from lockstep.analysis import staleness
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.forecast import clusters, foretelling, memory, model, sharded
from lockstep.forecast.clusters import Cluster
from lockstep.forecast.sharded import Run, Shape
from lockstep.run import record_files, seals
from lockstep.terminal import print_table

MEASURED = paths.PROJECT / "docs" / "measurements" / "others" / "llm-foundry.csv"  # it is not in images
AT_A_TIME = 16384  # tokens that a GPU computes at a time, at most, where no micro-batch is named
# Of a training, of a GPU at a time, and of a step: beyond these even a guess would mislead, or a digit is too many.
MOST_GPUS, MOST_AT_A_TIME, MOST_IN_A_STEP = 16384, 2**20, 2**32
MOST = {"tokens": 1e18, "price": 1e6}
OF_MEMORY = (
    "Memory is counted for a row's widest micro-batch on GPUs, as lockstep fits does; with --memory, "
    f"{memory.RESERVE} of it stay free for CUDA, NCCL and kernels."
)
NO_MEMORY = "Whether it fits into memory was not looked at: --memory 24GB counts it."
OF_A_SHAPE = ("gpu", "cluster", "length", "batch", "batch_tokens", "micro_batch", "checkpointing", "tokens", "price")


def main() -> int:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="how many devices train together")
    parser.add_argument(
        "--network",
        metavar="25Gb",
        help="of a machine, in Gbit/s (default with --model: the cluster's)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was foretold into a new file")
    own = parser.add_argument_group("your own rows")
    own.add_argument("--rows", nargs="+", action="extend", metavar="ROW", help="by default all")
    own.add_argument(
        "--seal", action="store_true", help="keep what is foretold in the results, and note it in the journal"
    )
    own.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw each row's time against its memory on GPUs")
    own.add_argument("--memory", metavar="24GB", help="of a GPU: count what a row needs, and say what does not fit")
    shaped = parser.add_argument_group("full sharding on many GPUs, by a model's shape")
    shaped.add_argument("--model", type=Path, metavar="FILE", help="a model by its shape")
    machines = shaped.add_mutually_exclusive_group()
    machines.add_argument("--gpu", type=str.lower, choices=clusters.cards(), help="in machines of workflow/cards.yaml")
    machines.add_argument("--cluster", type=Path, metavar="FILE", help="machines of your own, in YAML with such keys")
    shaped.add_argument("--length", type=int, metavar="N", help="tokens of a text (default: 2048)")
    batch = shaped.add_mutually_exclusive_group()
    batch.add_argument("--batch", type=int, metavar="N", help="texts of a step, on all GPUs together")
    batch.add_argument("--batch-tokens", type=int, metavar="N", help="the same in tokens")
    shaped.add_argument(
        "--micro-batch", type=int, metavar="N", help=f"texts of a GPU at a time (default: {AT_A_TIME} tokens)"
    )
    shaped.add_argument("--checkpointing", action="store_true", help="compute activations again, in all layers")
    shaped.add_argument("--tokens", type=float, metavar="20e9", help="of an epoch, or of the whole training")
    shaped.add_argument(
        "--price", type=float, metavar="3", help="of a GPU for an hour, in any currency (default: the cluster's)"
    )
    arguments = parser.parse_args()
    cli.must_be_new(arguments.json, "--json", "file")
    cli.must_be_new(arguments.picture, "--picture", "file")
    if arguments.model is None:
        return _own_rows(arguments)
    return _by_shape(arguments)


# Rows of one's own.


def _own_rows(arguments: argparse.Namespace) -> int:
    """Foretell rows of a configuration. Returns 1 if nothing could be foretold of a row that was named."""
    if given := [name for name in OF_A_SHAPE if getattr(arguments, name) not in (None, False)]:
        option = given[0].replace("_", "-")
        raise BadInput(f"--{option}: is for a model by its shape. Name it too, as in --model llama.yaml.")
    if arguments.gpus and (len(arguments.gpus) > 1 or not 1 <= arguments.gpus[0] <= MOST_GPUS):
        raise BadInput(f"--gpus {' '.join(map(str, arguments.gpus))}: name one number, from 1 to {MOST_GPUS:,}.")
    config, results = cli.configuration(arguments, finished=True), arguments.results
    for name in arguments.rows or ():
        config.require_row(name, f"--rows {name}")
    if not paths.ready_file(results, config.data_key).is_file():
        raise BadInput(
            f"{results} has no data that was prepared for this configuration. Prepare it: lockstep bench --until plan"
        )
    names = list(dict.fromkeys(arguments.rows or config.rows))
    number = arguments.gpus[0] if arguments.gpus else None
    if arguments.seal:
        seals.refuse(results, names)
    rows = [foretelling.on(config.rows[name], number) for name in names]
    link = None if arguments.network is None else clusters.NETWORK.read(arguments.network, "--network")
    capacity = None if arguments.memory is None else memory.free(arguments.memory, memory.RESERVE)
    counted = memory.of_rows(config, rows, results, capacity) if arguments.memory or arguments.picture else {}
    found = [_tell_one(foretelling.foretell(config, row, results, link)) for row in rows]
    _tell_rows(found, {row.name: _measured(config, row, results) for row in rows}, counted)
    if arguments.json:
        write_json(arguments.json, {"rows": found} | ({"memory": counted, "capacity": capacity} if counted else {}))
    if arguments.picture:
        _draw(arguments.picture, found, counted, capacity)
    if arguments.seal:
        print(f"sealed in {paths.foretold_file(results)}, sha256 {seals.seal(results, found)}")
        print("Share this number before the rows run, with whoever is to trust the forecast.")
    without = [each for each in found if not each["seconds"]]
    return int(bool(without) if arguments.rows else len(without) == len(found))


def _tell_one(found: dict) -> dict:
    """Say that a row was looked at, which takes some seconds."""
    said = f"{1000 * found['seconds']['value']:.3g} ms" if found["seconds"] else found["known"]
    print(f"{found['row']}: {said}", file=sys.stderr, flush=True)
    return found


def _measured(config: Config, row: Row, results: Path) -> float | None:
    """The milliseconds of a row's step in the runs that it has already; None without any of such settings and data."""
    runs = [record_files.read_run(file.parent) for file in paths.run_files(results, paths.RECORD, row=row.name)]
    own = [run for run in runs if not staleness.run(config, config.repetition(row, run.repeat), run, results)]
    steps = [1000 * run.clock.train_seconds / run.steps for run in own]
    return statistics.median(steps) if steps else None


def _tell_rows(found: list[dict], measured: dict[str, float | None], counted: dict[str, dict]) -> None:
    """Print what is foretold of rows, the fastest first, and what is not. counted: memory.of_rows, or nothing."""
    done = sorted((each for each in found if each["seconds"]), key=_per_sample)
    single = next((each for each in found if each["row"] == "single"), None)
    header = ["row", "ranks", "a step, ms", "of it communication, ms", "times as fast as single", "how it is known"]
    lines = [[*_row_cells(each, single), each["known"]] for each in done]
    if there := any(measured.values()):
        header.insert(3, "measured, ms")
        lines = [[*line[:3], f"{measured[line[0]]:.3g}" if measured[line[0]] else "", *line[3:]] for line in lines]
    if counted:
        header.insert(-1, "a GPU, GiB")
        lines = [[*line[:-1], _gib(counted[line[0]]), line[-1]] for line in lines]
    if lines:
        print_table(header, lines)
    for each in found:
        if each["why"]:
            print(f"{each['row']}: {each['known']}: {'; '.join(each['why'])}")
    for name, each in counted.items():
        if each["why"]:
            print(f"{name}: memory not counted: {each['why']}")
        elif name not in {line[0] for line in lines}:
            print(f"{name}: a GPU, GiB: {_gib(each)}")
    disturbed = [f"{each['row']} ({'; '.join(each['disturbed'])})" for each in found if each["disturbed"]]
    if disturbed:
        print(f"Disturbed, so foretold as too slow: {', '.join(disturbed)}.")
    if there:
        print("Measured is the median of the runs that are there; nothing of it went into what is foretold.")
    if done:
        print(
            "Foretold from each row's own code, run alone on this machine, what was measured of messages, and what each"
            f" strategy sends. {OF_MEMORY if counted else NO_MEMORY}"
        )


def _gib(counted: dict) -> str:
    if counted["why"]:
        return ""
    return f"{counted['allocated'] / 2**30:.3g}" + ("" if counted["fits"] else ", does not fit")


def _draw(file: Path, found: list[dict], counted: dict[str, dict], capacity: int | None) -> None:
    """Draw the rows of which both time and memory are known, and say why the others are not there."""
    from lockstep.forecast import picture  # matplotlib takes a while

    without = {each["row"]: "; ".join(each["why"]) for each in found if not each["seconds"]}
    without |= {name: each["why"] for name, each in counted.items() if each["why"] and name not in without}
    marks = [
        picture.Mark(
            each["row"],
            *(None if end is None else 1000 * end for end in map(each["seconds"].get, ("value", "low", "high"))),
            counted[each["row"]]["allocated"] / 2**30,
            counted[each["row"]]["fits"],
        )
        for each in found
        if each["row"] not in without
    ]
    usual = found[0]["global_batch"]
    others = {each["row"]: each["global_batch"] for each in found if each["global_batch"] != usual}
    notes = {name: f"has {batch} samples in a step, and the first row {usual}" for name, batch in others.items()}
    if not marks:
        print(f"{file}: not drawn: of no row are both time and memory known")
        return
    picture.draw(file, marks, None if capacity is None else capacity / 2**30, notes | without)
    print(f"drawn: {file}")


def _per_sample(found: dict) -> float:
    return found["seconds"]["value"] / found["global_batch"]


def _row_cells(found: dict, single: dict | None) -> list[str]:
    seconds, faster = found["seconds"], foretelling.speedup(found, single)
    cells = [f"{1000 * part['value']:.3g}" for part in (seconds, found["parts"]["communication"])]
    if seconds["low"] is not None:
        cells[0] += f" ({1000 * seconds['low']:.3g} to {1000 * seconds['high']:.3g})"
    return [found["row"], str(found["ranks"]), *cells, "" if faster is None else f"{faster:.2f}"]


# Full sharding, by a model's shape.


def _by_shape(arguments: argparse.Namespace) -> int:
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
    runs = [_run(arguments, cluster, gpus) for gpus in dict.fromkeys(arguments.gpus)]
    for run in runs:
        _must_hold(shape, run)
    foretold = [_foretell(shape, run, window, arguments) for run in runs]
    print(
        f"{described.config['architectures'][0]}, {shape.weights:,} weights, texts of {arguments.length:,} tokens, fsdp"
        f" in bf16, activations {'computed again' if arguments.checkpointing else 'kept'}"
    )
    print(f"{arguments.gpu or arguments.cluster}: {cluster}")
    _tell(shape, runs, foretold, arguments)
    if arguments.json:
        write_json(arguments.json, {"model": asdict(shape), "price": arguments.price, "foretold": foretold})
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """The machines that are asked for. The price becomes theirs if there is no other, and something to pay for."""
    cluster = clusters.cards()[arguments.gpu] if arguments.gpu else clusters.read(arguments.cluster)
    if arguments.network is not None:
        cluster = replace(cluster, network=clusters.NETWORK.read(arguments.network, "--network"))
    if arguments.price is None and arguments.tokens is not None:
        arguments.price = cluster.price
    return cluster


def _refuse(arguments: argparse.Namespace, cluster: Cluster) -> None:
    """Raise BadInput for a number that no training has."""
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
    for option, most in MOST.items():
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= most:  # nor is it NaN
            raise BadInput(f"--{option} {value:g}: expected a number above 0, of at most {most:g}.")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise BadInput(f"--tokens {arguments.tokens:g}: expected at least 1.")
    if arguments.price is not None and arguments.tokens is None:
        raise BadInput("--price: say of how many tokens, as in --tokens 20e9.")


def _run(arguments: argparse.Namespace, cluster: Cluster, gpus: int) -> Run:
    """How so many GPUs train. Raises BadInput where they can't share the batch evenly."""
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
    return Run(cluster, gpus, length, micro, accumulation, recomputed)


def _must_hold(shape: Shape, run: Run) -> None:
    """Raise BadInput where weights, gradients and optimizer alone are more than the GPUs hold."""
    memory = run.cluster.memory
    kept = sharded.STATE * shape.weights
    if kept > run.gpus * memory:
        raise BadInput(
            f"--gpus {run.gpus}: it does not fit. Weights, gradients and AdamW's state take {sharded.STATE} bytes for"
            f" each weight, {kept / 2**30:,.0f} GiB in all, and {run.gpus} GPUs have"
            f" {run.gpus * memory / 2**30:,.0f}. At least {-(-kept // memory)} are needed, and more for activations."
        )


def _foretell(shape: Shape, run: Run, window: int | None, arguments: argparse.Namespace) -> dict:
    """Everything that is foretold of a run. window: tokens that the model's attention sees, if not all.

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
    if arguments.tokens:
        found["gpu_hours"] = arguments.tokens / speed / 3600
    return found


def _tell(shape: Shape, runs: list[Run], foretold: list[dict], arguments: argparse.Namespace) -> None:
    """Print what is foretold, what that rests on, and what is not foretold."""
    header = ["GPUs", "a step", "tokens/s per GPU", "MFU, %"]
    if arguments.tokens:
        header.append(f"hours for {arguments.tokens:,.0f} tokens")
    if arguments.price:
        header.append("cost of them")
    lines = [_line(run, each, arguments) for run, each in zip(runs, foretold, strict=True)]
    print_table([*header, "how it is known"], lines)
    for run, each in zip(runs, foretold, strict=True):
        print(
            f"{run.gpus} GPUs: steps of {run.tokens:,} tokens; each GPU computes {_texts(run.micro_batch)} at a time,"
            f" {_times(run.accumulation)} in a step. {_shares(each)}."
        )
        if each["extrapolated"]:
            print(f"{run.gpus} GPUs: extrapolated, so there is no interval: {'; '.join(each['extrapolated'])}.")
    if MEASURED.is_file():
        print(_nearest(shape, runs[0]))
    others = [name for name in registry.ours() if name not in ("fsdp", "single")]
    print(f"Not foretold, for want of published runs to hold it against: {', '.join(others)}.")
    print(
        "An interval holds nine in ten published runs of llm-foundry that had no part in the rates, and all of other"
        " programs on such cards. None was Lockstep's own, on several GPUs. Weights and gradients are taken to be sent"
        " in bf16; Lockstep's fsdp sends gradients in fp32, and weights, too, unless the row has mixed_precision:"
        " policy, so up to twice as many bytes. Whether activations fit into memory was not looked at: lockstep fits"
        " counts it."
    )


def _texts(number: int) -> str:
    return "one text" if number == 1 else f"{number} texts"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _line(run: Run, found: dict, arguments: argparse.Namespace) -> list[str]:
    """A line of the table: each number with its interval, if there is one."""
    speed, known = found["speed"], "foretold, extrapolated" if found["extrapolated"] else "foretold"
    low, high = (found["low"], found["high"]) if found["low"] else (speed, speed)

    def taking(value: float) -> str:
        """A time or a cost with its interval; both fall as the speed rises."""
        return _within(value, value * speed / high, value * speed / low)

    line = [str(run.gpus), f"{taking(found['step_seconds'])} s"]
    line += [_within(speed, low, high), f"{100 * found['mfu']:.0f}"]
    if arguments.tokens:
        line.append(taking(found["gpu_hours"] / run.gpus))
    if arguments.price:
        line.append(taking(found["gpu_hours"] * arguments.price))
    return [*line, known]


def _within(value: float, low: float, high: float) -> str:
    return f"{_short(value)} ({_short(low)} to {_short(high)})" if low < high else _short(value)


def _short(value: float) -> str:
    """A number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _shares(found: dict) -> str:
    """The parts of a step's time, the largest first."""
    parts = sorted(found["parts"].items(), key=lambda part: -part[1])
    shares = {name: 100 * seconds / found["step_seconds"] for name, seconds in parts}
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)


def _nearest(shape: Shape, run: Run) -> str:
    """The published run on such a card that is most like this one, by the ratios of their sizes."""
    own = {"gpus": run.gpus, "weights": shape.weights, "length": run.length, "micro_batch": run.micro_batch}
    kinds = {name: card.rates for name, card in clusters.cards().items()}
    with MEASURED.open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if kinds[line["card"]] == run.cluster.rates]

    def distance(line: dict) -> float:
        there = {name: int(line[name]) for name in ("gpus", "weights", "length", "micro_batch")}
        again = abs(float(line["recomputed"]) - run.recomputed)
        return again + sum(abs(math.log(own[name] / value)) for name, value in there.items())

    best = min(lines, key=distance)
    again = "computed again" if float(best["recomputed"]) else "kept"
    return (
        "Measured, by llm-foundry, and most like the first line:"
        f" {int(best['tokens_per_second_per_gpu']):,} tokens/s per GPU, for"
        f" {int(best['weights']):,} weights, {best['length']} tokens, {best['gpus']} {best['card']},"
        f" {_texts(int(best['micro_batch']))} at a time, activations {again}."
    )


if __name__ == "__main__":
    cli.run(main)
