"""How long does full sharding (fsdp) take on many GPUs? The time of a step, and what an epoch costs, without a GPU.

    lockstep which --model llama.yaml --gpus 8 64 512 --gpu h100 --length 2048 --batch 1024 --tokens 20e9 --price 3

--model is a config.json of transformers, its folder, or a YAML file with the same keys; nothing is downloaded. The time
is foretold from the model's shape, for training in bf16, with rates that were found from published runs. Each number
has an interval, from the errors on runs that had no part in the rates. Where a run is beyond what was checked, it is
"extrapolated", and has no interval.

Whether it fits into memory is counted by `lockstep fits`.
"""

import argparse
import csv
import math
import re
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, paths
from lockstep.config import registry
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.forecast import model, sharded
from lockstep.forecast.sharded import Run, Shape
from lockstep.terminal import print_table

MEASURED = paths.PROJECT / "docs" / "measurements" / "others" / "llm-foundry.csv"  # it is not in images
AT_A_TIME = 16384  # tokens that a GPU computes at a time, at most, where no micro-batch is named
# Of a training, of a GPU at a time, and of a step: beyond these even a guess would mislead, or a digit is too many.
MOST_GPUS, MOST_AT_A_TIME, MOST_IN_A_STEP = 16384, 2**20, 2**32
MOST = {"tokens": 1e18, "price": 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a model by its shape")
    parser.add_argument("--gpu", type=str.lower, required=True, choices=sharded.CARDS, help="SXM, with NVLink")
    parser.add_argument("--gpus", type=int, nargs="+", required=True, metavar="N", help="how many train together")
    parser.add_argument(
        "--network", metavar="3200Gb", help="of a machine with 8 GPUs, in Gbit/s (default: A100 1600Gb, H100 3200Gb)"
    )
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a text (default: 2048)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch", type=int, metavar="N", help="texts of a step, on all GPUs together")
    batch.add_argument("--batch-tokens", type=int, metavar="N", help="the same in tokens")
    parser.add_argument(
        "--micro-batch", type=int, metavar="N", help=f"texts of a GPU at a time (default: {AT_A_TIME} tokens)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again, in all layers")
    parser.add_argument("--tokens", type=float, metavar="20e9", help="of an epoch, or of the whole training")
    parser.add_argument("--price", type=float, metavar="3", help="of a GPU for an hour, in any currency")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was foretold into a new file")
    arguments = parser.parse_args()
    _refuse(arguments)
    described = model.read(arguments.model, "language-modelling", arguments.length)
    shape = sharded.shape_of(described)
    window = described.config.get("sliding_window")
    runs = [_run(arguments, gpus) for gpus in dict.fromkeys(arguments.gpus)]
    for run in runs:
        _must_hold(shape, run)
    foretold = [_foretell(shape, run, window, arguments) for run in runs]
    print(
        f"{described.config['architectures'][0]}, {shape.weights:,} weights, texts of {arguments.length:,} tokens, fsdp"
        f" in bf16, activations {'computed again' if arguments.checkpointing else 'kept'}"
    )
    _tell(shape, runs, foretold, arguments)
    if arguments.json:
        write_json(arguments.json, {"model": asdict(shape), "price": arguments.price, "foretold": foretold})


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise BadInput for a number that no training has."""
    cli.must_be_new(arguments.json, "--json", "file")
    for gpus in arguments.gpus:
        if not 1 <= gpus <= MOST_GPUS:
            raise BadInput(f"--gpus {gpus}: expected 1 to {MOST_GPUS:,}.")
        if gpus > sharded.NODE_GPUS and gpus % sharded.NODE_GPUS:
            raise BadInput(f"--gpus {gpus}: machines have {sharded.NODE_GPUS} GPUs each; name a multiple of that.")
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


def _run(arguments: argparse.Namespace, gpus: int) -> Run:
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
    network = None if arguments.network is None else _bits(arguments.network)
    recomputed = 1.0 if arguments.checkpointing else 0.0
    return Run(arguments.gpu, gpus, length, micro, accumulation, recomputed, network=network)


def _bits(text: str) -> float:
    """Bits/s, of a text as 3200Gb."""
    given = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:Gb|Gbit|Gbps|Gbit/s|Gb/s)", text.strip(), re.ASCII)
    if not given or not 0.1 <= float(given[1]) <= 100_000:
        raise BadInput(f"--network {text}: give .1 to 100000 Gbit/s of a machine, as 3200Gb (bits, not bytes).")
    return 1e9 * float(given[1])


def _must_hold(shape: Shape, run: Run) -> None:
    """Raise BadInput where weights, gradients and optimizer alone are more than the GPUs hold."""
    memory = sharded.CARDS[run.card].memory
    kept = sharded.STATE * shape.weights
    if kept > run.gpus * memory:
        raise BadInput(
            f"--gpus {run.gpus}: it does not fit. Weights, gradients and AdamW's state take {sharded.STATE} bytes for"
            f" each weight, {kept / 2**30:,.0f} GiB in all, and {run.gpus} {run.card} have"
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
    ends = sharded.INTERVALS[sharded.CARDS[run.card].kind]
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
        " programs on such cards. None was Lockstep's own, on several GPUs. Whether activations fit into memory was not"
        " looked at: lockstep fits counts it."
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
    kind = sharded.CARDS[run.card].kind
    with MEASURED.open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if sharded.CARDS[line["card"]].kind == kind]

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
