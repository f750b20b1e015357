"""Does a model fit? The largest micro-batch that each row trains in a GPU's memory, without a GPU.

    lockstep fits --model llama.yaml --task language-modelling --length 2048 --memory 24GB --gpus 8

--model is a config.json of transformers, its folder, or a YAML file with the same keys; nothing is downloaded. By
default it is the model of the prepared data. Each row's own strategy takes steps on pretended GPUs that only count
memory, as the first rank of --gpus. So weights, gradients, optimizer, activations, buckets and gathered layers are
counted. It takes PyTorch's CPU build and g++.

Not counted are the CUDA context, NCCL, what single kernels need while they run, evaluation, and saving; --reserve is
kept free for them.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from lockstep import cli, paths
from lockstep.config import machine, reading
from lockstep.config.configuration import Config
from lockstep.config.nested import flat
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed
from lockstep.files import write_json
from lockstep.forecast import memory, model
from lockstep.forecast.clusters import MEMORY
from lockstep.script import pretended
from lockstep.terminal import print_table, short

COLUMNS = ["row", "tokens", "largest micro-batch", "GiB then", "GiB whatever the batch", "GiB per sample"]


def main() -> int:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, metavar="FILE", help="by default the model of the prepared data")
    parser.add_argument("--task", choices=model.CLASSES, help="by default the configuration's")
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help="tokens of a text (default: data.max_length)",
    )
    parser.add_argument(
        "--memory",
        required=True,
        metavar="24GB",
        help="of a GPU, as nvidia-smi shows it: 1 GB is 2^30 bytes, and an L4, sold with 24GB, has 23034MiB",
    )
    parser.add_argument(
        "--reserve", default=memory.RESERVE, help=f"kept free for what is not counted (default: {memory.RESERVE})"
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many train together (default: 1)")
    parser.add_argument("--rows", nargs="+", action="extend", metavar="ROW", help="by default all that can be counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was counted into a new file")
    arguments = parser.parse_args()
    capacity = memory.free(arguments.memory, arguments.reserve)
    shown = MEMORY.read(arguments.memory, "--memory") / 2**20
    if arguments.gpus < 1:
        raise BadInput(f"--gpus {arguments.gpus}: expected at least 1.")
    if arguments.length and min(arguments.length) < 1:
        raise BadInput(f"--length {min(arguments.length)}: expected at least 1 token.")
    cli.must_be_new(arguments.json, "--json", "file")
    config, shapes = _configured(arguments)
    pretended.variables(1)  # compiled here, once, if at all
    rows = [config.rows[name] for name in arguments.rows or config.rows]
    work = [(row, length, shape) for row in rows for length, shape in shapes.items()]
    with ThreadPoolExecutor(max(1, machine.cpu_cores() // 2)) as pool:
        counted = list(pool.map(partial(_count, capacity=capacity), *zip(*work, strict=True)))
    done = [each for each in counted if not each["failed"]]
    shape = next(iter(shapes.values()))  # they differ in length only
    described = shape.config
    if done:
        precisions = " or ".join(dict.fromkeys(each["precision"] for each in done))
        print(f"{described['architectures'][0]}, {done[0]['parameters']:,} weights, {config.task} in {precisions}")
    if shape.remark:
        print(shape.remark)
    print_table(COLUMNS, [_line(each, config.task) for each in counted])
    for row, why in {each["row"]: each["failed"] for each in counted if each["failed"]}.items():
        print(f"{row}: not counted: {why}")
    for row, devices in {each["row"]: each["devices"] for each in done}.items():
        if devices not in (1, arguments.gpus):
            print(f"{row}: counted for {devices} GPUs, as the row asks")
    print(
        f"Counted for one of {arguments.gpus} GPUs with {arguments.memory} ({shown:,.0f} MiB in nvidia-smi), of which"
        f" {arguments.reserve} stay free for CUDA, NCCL and kernels: those are not counted, and differ by GPU and"
        " driver. Nor are evaluation and saving."
    )
    if arguments.json:
        about = {"gpus": arguments.gpus, "capacity": capacity, "task": config.task}
        write_json(arguments.json, about | {"model": described, "rows": counted})
    asked = set(arguments.rows or [each["row"] for each in done])
    return 0 if done and asked <= {each["row"] for each in done} else 1


def _configured(arguments: argparse.Namespace) -> tuple[Config, dict[int, model.Model]]:
    """The configuration for a machine with these GPUs, of which nothing needs to be here; and the model by length."""
    hardware = memory.machine(arguments.gpus)
    own = flat(reading.overridden(arguments.set))
    if theirs := [key for key in hardware if f"hardware.{key}" in own]:
        raise BadInput(f"--set hardware.{theirs[0]}: here --gpus says what trains.")
    own_dropout = "model.dropout" in own
    arguments.set += [f"hardware.{key}={value}" for key, value in hardware.items()]
    if arguments.model:
        arguments.set += ["model.name=scratch"]
    if arguments.task:
        arguments.set += [f"task={arguments.task}", "train.best=loss"]
    config = cli.configuration(arguments)
    file = arguments.model or paths.data_folder(arguments.results) / paths.WEIGHTS
    if not arguments.model and not paths.ready_file(arguments.results, config.data_key).is_file():
        raise BadInput(
            f"--model: name one; {arguments.results} has no data that was prepared for this configuration's model."
        )
    for name in arguments.rows or ():
        config.require_row(name, f"--rows {name}")
    if arguments.length and config.task == "image-classification":
        raise BadInput("--length: an image has no tokens. Leave it out, and name its size: --set data.image_size=224")
    shapes = {
        length: model.read(file, config.task, length, config.data.image_size)
        for length in arguments.length or [config.data.max_length]
    }
    if own_dropout or not arguments.model:
        shapes = {length: replace(shape, dropout=config.model.dropout) for length, shape in shapes.items()}
    return config, shapes


def _count(row: Row, length: int, shape: model.Model, capacity: int) -> dict:
    result = {"row": row.name, "tokens": length, "largest": None, "steps": [], "failed": ""}
    try:
        row = memory.countable(row)
        largest, steps = memory.largest(row, shape, capacity)
    except (BadInput, RunFailed) as error:
        return result | {"failed": str(error)}
    fixed, each = memory.line([step for step in steps if step.samples <= max(largest, 2)])
    result |= {"largest": largest, "fixed": fixed, "per_sample": each, "devices": row.hardware.devices}
    result |= {"precision": row.precision, "parameters": steps[0].parameters}
    return result | {"steps": [asdict(step) for step in steps]}


def _line(counted: dict, task: str) -> list[str]:
    name, largest = counted["row"], counted["largest"]
    tokens = "" if task == "image-classification" else str(counted["tokens"])
    if counted["failed"]:
        return [name, tokens, "not counted", "", "", ""]
    last = next(step for step in counted["steps"] if step["samples"] == max(largest, 1))
    sizes = (last["allocated"], counted["fixed"], counted["per_sample"])
    said = f"{largest} or more" if largest == memory.MOST else str(largest) if largest else "does not fit"
    return [name, tokens, said, *(short(size / 2**30) for size in sizes)]


if __name__ == "__main__":
    cli.run(main)
