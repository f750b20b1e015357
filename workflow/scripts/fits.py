"""Does a model fit? The largest micro-batch that each row trains in a GPU's memory, without a GPU.

    lockstep fits --model llama.yaml --task language-modelling --length 2048 --memory 24GB --gpus 8

--model is a config.json of transformers, its folder, or a YAML file with the same keys; nothing is downloaded. By
default it is the model of the prepared data. Each row's own strategy takes steps on pretended GPUs that only count
memory, as one rank of --gpus. So weights, gradients, optimizer, activations, buckets and gathered layers are counted.

Not counted are the CUDA context, NCCL, and what single kernels need while they run; --reserve is kept free for them.
"""

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from lockstep import cli, paths
from lockstep.config import machine
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed
from lockstep.files import write_json
from lockstep.forecast import memory, model
from lockstep.terminal import print_table

UNITS = {"MB": 2**20, "MIB": 2**20, "GB": 2**30, "GIB": 2**30}
COLUMNS = ["row", "tokens", "largest micro-batch", "GiB then", "GiB whatever the batch", "GiB per sample"]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, metavar="FILE", help="by default the model of the prepared data")
    parser.add_argument("--task", choices=model.CLASSES, help="by default the configuration's")
    parser.add_argument(
        "--length", type=int, nargs="+", metavar="N", help="tokens of a text (default: data.max_length)"
    )
    parser.add_argument("--memory", required=True, metavar="24GB", help="of a GPU; 1 GB is 2^30 bytes, as on its label")
    parser.add_argument("--reserve", default="1GB", help="kept free of it for what is not counted (default: 1GB)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many train together (default: 1)")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="by default all that can be counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was counted into a new file")
    arguments = parser.parse_args()
    capacity = _bytes(arguments.memory, "--memory") - _bytes(arguments.reserve, "--reserve")
    if capacity <= 0:
        raise BadInput(f"--reserve {arguments.reserve}: nothing of {arguments.memory} would be left. Lower it.")
    if arguments.gpus < 1:
        raise BadInput(f"--gpus {arguments.gpus}: expected at least 1.")
    if arguments.length and min(arguments.length) < 1:
        raise BadInput(f"--length {min(arguments.length)}: expected at least 1 token.")
    cli.must_be_new(arguments.json)
    # What trains is a machine with these GPUs, of which nothing needs to be here.
    hardware = {"device": "cuda", "node_gpus": arguments.gpus, "processes": arguments.gpus, "nodes": 1}
    hardware |= {"node_cores": 2 * arguments.gpus, "threads": 1, "gpus": None, "oversubscribe": False}
    arguments.set += [f"hardware.{key}={'null' if value is None else value}" for key, value in hardware.items()]
    arguments.set += ["train.best=loss", "model.name=scratch", *([f"task={arguments.task}"] if arguments.task else [])]
    config = cli.configuration(arguments)
    file = arguments.model or paths.data_folder(arguments.results) / paths.WEIGHTS
    if not arguments.model and not file.is_dir():
        raise BadInput(f"--model: name one, or prepare the data ({file} does not exist): lockstep bench")
    for name in arguments.rows or ():
        config.require_row(name, f"--rows {name}")
    rows = [_alone(config.rows[name]) for name in arguments.rows or config.rows]
    lengths = arguments.length or [config.data.max_length]
    shapes = [model.read(file, config.task, length) for length in lengths]
    if not arguments.model:
        shapes = [replace(shape, dropout=config.model.dropout) for shape in shapes]
    work = [(row, length, shape) for row in rows for length, shape in zip(lengths, shapes, strict=True)]
    with ThreadPoolExecutor(max(1, machine.cpu_cores() // 2)) as pool:
        counted = list(pool.map(lambda each: _count(*each, capacity), work))
    print_table(COLUMNS, [_line(each) for each in counted])
    for each in counted:
        if each["failed"]:
            print(f"{each['row']}: not counted: {each['failed']}")
    print(
        f"Counted for one of {arguments.gpus} GPUs with {arguments.memory}, of which {arguments.reserve} stay free for"
        " CUDA, NCCL and kernels: those are not counted, and differ by GPU and driver."
    )
    if arguments.json:
        write_json(arguments.json, {"gpus": arguments.gpus, "capacity": capacity, "rows": counted})


def _alone(row: Row) -> Row:
    """The row with a global batch of its own: one sample for each replica and micro-batch."""
    train = replace(row.train, global_batch=row.replicas * row.train.accumulation, device_batch=None)
    return replace(row, train=train)


def _count(row: Row, length: int, shape: model.Model, capacity: int) -> dict:
    result = {"row": row.name, "tokens": length, "largest": None, "steps": [], "failed": ""}
    if row.uncounted:
        return result | {"failed": row.uncounted}
    try:
        row.refuse()
        largest, steps = memory.largest(row, shape, capacity)
    except (BadInput, RunFailed) as error:
        return result | {"failed": str(error)}
    fixed, each = memory.line(steps)
    return result | {"largest": largest, "fixed": fixed, "per_sample": each, "steps": [asdict(step) for step in steps]}


def _line(counted: dict) -> list[str]:
    name, tokens, largest = counted["row"], str(counted["tokens"]), counted["largest"]
    if counted["failed"]:
        return [name, tokens, "not counted", "", "", ""]
    last = next(step for step in counted["steps"] if step["samples"] == max(largest, 1))
    sizes = (last["allocated"], counted["fixed"], counted["per_sample"])
    return [name, tokens, str(largest) if largest else "does not fit", *(f"{size / 2**30:.3g}" for size in sizes)]


def _bytes(text: str, option: str) -> int:
    given = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if not given or given[2].upper() not in UNITS:
        raise BadInput(f"{option} {text}: give a number and its unit, as 24GB or 500MB.")
    return int(float(given[1]) * UNITS[given[2].upper()])


if __name__ == "__main__":
    cli.run(main)
