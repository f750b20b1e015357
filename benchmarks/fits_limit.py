"""python -m benchmarks.fits_limit --count | --measure --out FOLDER: does a row train in the memory that `fits` counts?

A case is a model, a row and a micro-batch. --count writes of each into docs/measurements/fits/limits.csv the memory
that `lockstep fits` counts; commit that, so that nobody can say it came later. --measure then trains each row by the
real launcher on pretended GPUs that compute, whose memory ends there: it must train. With 2 % less than its tensors
take by the count, it must end out of memory. A row that does not train in what is counted is trained again with another
of the allocator's segments, which `lockstep fits` keeps free: it is a false "fits" if it does not train there either.

Pretended GPUs compute attention by its formula and need no cuBLAS, so that is what is counted here. They share memory
out as PyTorch's allocator does, without a CUDA context: nothing is kept free for one. What is done already is not done
again.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.common import PROJECT, between_marks, markdown
from lockstep import paths
from lockstep.config import reading
from lockstep.data.plan import Plan
from lockstep.files import atomic_file, read_json, write_json
from lockstep.forecast import memory
from lockstep.forecast.model import Model
from lockstep.run import record_files
from lockstep.script import pretended
from lockstep.terminal import print_table

FOLDER = PROJECT / "docs" / "measurements" / "fits"
TABLE, PAGE = FOLDER / "limits.csv", FOLDER / "README.md"
MARKS = ("<!-- limits: begin -->", "<!-- limits: end -->")
COUNTED = ["case", "tokens", "samples", "tensors", "segments", "below"]
MEASURED = ["at_limit", "at_below", "took", "trains"]
HEADER = ["case", "tokens", "micro-batch", "fits, MiB", "in that", "2 % below tensors", "tensors, MiB: counted, took"]
GPUS = 2
BELOW = 0.98  # of what the tensors take
TRAINED, ENDED = "trained", "out of memory"
COUNTED_ALONE, WITH_ANOTHER = "counted", "segment"  # in which it trains: what is counted, or another segment besides
HERE = ["hardware.device=cuda", f"hardware.node_gpus={GPUS}", f"hardware.node_cores={2 * GPUS}"]
COMMON = {
    "data": {"limit": 700},
    "train": {"epochs": 1, "max_steps": 4, "eval_every": 0, "checkpoint": "last", "attention": "math"},
    "hardware": {"threads": 1, "oversubscribe": True, "timeout": 400},
    "profile": {"steps": 0},
    "retries": 0,
}
LANGUAGE = "config/language.yaml"
CHECKPOINTING = {"activation_checkpointing": True}
# By the model: a configuration that its keys override, or none; the keys; and its rows.
CASES = {
    "bert": (
        None,
        {"model": {"hidden_size": 128, "layers": 2}, "train": {"global_batch": 48, "batching": "padded"}},
        {
            "single": {"strategy": "single"},
            "ddp": {"strategy": "ddp"},
            "fsdp": {"strategy": "fsdp"},
            "deepspeed_3": {"strategy": "deepspeed", "stage": 3},
            "zero_redundancy": {"strategy": "zero_redundancy"},
        },
    ),
    "bert_wide": (
        None,
        {"model": {"hidden_size": 256, "layers": 2, "heads": 4}, "train": {"global_batch": 24, "batching": "padded"}},
        {
            "ddp_fp16": {"strategy": "ddp", "precision": "fp16"},
            "fsdp_bf16": {"strategy": "fsdp", "precision": "bf16"},
            "deepspeed_1": {"strategy": "deepspeed", "stage": 1},
            "ddp_accumulation": {"strategy": "ddp", "accumulation": 3},
            "trainer": {"strategy": "trainer"},
        },
    ),
    "bert_short": (
        None,
        {
            "data": {"max_length": 20},
            "model": {"hidden_size": 160, "layers": 3, "heads": 4},
            "train": {"global_batch": 64, "batching": "padded"},
        },
        {
            "accelerate": {"strategy": "accelerate"},
            "fabric": {"strategy": "fabric"},
            "ddp_spawn": {"strategy": "ddp_spawn"},
            "deepspeed_2": {"strategy": "deepspeed", "stage": 2},
            "ddp_bf16_hook": {"strategy": "ddp", "hook": "bf16"},
        },
    ),
    "bert_deep": (
        None,
        {"model": {"hidden_size": 96, "layers": 6, "heads": 3}, "train": {"global_batch": 32, "batching": "padded"}},
        {
            "single_bf16": {"strategy": "single", "precision": "bf16"},
            "ddp_checkpointing": {"strategy": "ddp"} | CHECKPOINTING,
            "fsdp_checkpointing": {"strategy": "fsdp"} | CHECKPOINTING,
            "local_sgd": {"strategy": "local_sgd", "every": 2},
            "zero_redundancy_bf16": {"strategy": "zero_redundancy", "precision": "bf16"},
        },
    ),
    "llama": (
        LANGUAGE,
        {
            "data": {"max_length": 128},
            "model": {"hidden_size": 128, "layers": 3, "heads": 4},
            "train": {"global_batch": 16},
        },
        {
            "single": {"strategy": "single"},
            "ddp": {"strategy": "ddp"},
            "fsdp": {"strategy": "fsdp"},
            "tp": {"strategy": "tp", "tensor": 2},
            "deepspeed_3": {"strategy": "deepspeed", "stage": 3},
        },
    ),
    "llama_long": (
        LANGUAGE,
        {
            "data": {"max_length": 256},
            "model": {"hidden_size": 128, "layers": 2, "heads": 4},
            "train": {"global_batch": 8},
        },
        {
            "ddp_bf16": {"strategy": "ddp", "precision": "bf16"},
            "fsdp_accumulation": {"strategy": "fsdp", "accumulation": 2},
            "cp": {"strategy": "cp", "context": 2},
            "tp_sequence": {"strategy": "tp", "tensor": 2, "sequence": True},
            "fsdp_checkpointing": {"strategy": "fsdp"} | CHECKPOINTING,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--count", action="store_true", help="write what is counted, before anything is measured")
    what.add_argument("--measure", action="store_true", help="train what was counted")
    what.add_argument("--table", action="store_true", help="only print what is there, and put it into the page")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for a copy of the project and its results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further case is begun")
    arguments = parser.parse_args()
    if not arguments.table and arguments.out is None:
        parser.error("--out: name a folder for results; what is there is kept")
    lines = read()
    until = time.monotonic() + 60 * arguments.minutes
    machine = cache(lambda model: Machine(arguments.out.resolve(), model, *CASES[model]))
    for model, row in () if arguments.table else in_turn():
        case = f"{model}, {row}"
        if time.monotonic() > until:
            break
        if arguments.count and case not in lines:
            lines[case] = {"case": case} | machine(model).count(row)
        elif arguments.measure and case in lines and not lines[case]["at_limit"]:
            lines[case] |= machine(model).measure(row, lines[case])
        else:
            continue
        print(", ".join(f"{name} {value}" for name, value in lines[case].items()), flush=True)
        write(lines)
    write(lines)
    tell(list(lines.values()))


def in_turn() -> list[tuple[str, str]]:
    """Each model and row: the first row of each model, then the second, so that a part of them has all models."""
    rows = [(number, model, row) for model, (*_, rows) in CASES.items() for number, row in enumerate(rows)]
    return [(model, row) for _, model, row in sorted(rows, key=lambda each: each[0])]


class Machine:
    """A copy of the project on a machine with pretended GPUs, and the results of one model's rows there."""

    def __init__(self, folder: Path, model: str, config: str | None, keys: dict, rows: dict[str, dict]):
        self.place, self.results = folder / "project", folder / model
        if not self.place.is_dir():
            for part in ("workflow", "config", "docker", "resources"):
                shutil.copytree(PROJECT / part, self.place / part)
            for file in ("requirements.txt", "CITATION.cff"):  # which records read
                shutil.copy2(PROJECT / file, self.place)
            for file in pretended.LOADED:
                shutil.copy2(pretended.PARTS / file, self.place / "workflow" / "scripts" / file)
        file = folder / f"{model}.yaml"
        write_json(file, configuration(keys, rows))  # JSON is YAML
        self.files = [*([PROJECT / config] if config else []), file]
        if not paths.data_file(self.results).is_file():
            for script in ("prepare", "plan"):
                if (done := self._script(script)).returncode:
                    raise SystemExit(f"{model}: {script}: {done.stderr}")

    def count(self, row: str) -> dict:
        """What `fits` says of a row: bytes of its tensors, and of the segments that hold them, which it needs."""
        config = reading.read([PROJECT / reading.DEFAULT, *self.files], HERE)
        asked = config.rows[row]
        plan = Plan.load(paths.plan_file(self.results, asked.plan_name))
        shape = read_json(paths.data_folder(self.results) / paths.WEIGHTS / "config.json")
        model = Model(shape, int(plan.widths.max()), config.model.dropout)
        samples = -(-int(np.diff(plan.starts).max()) // (asked.replicas * asked.train.accumulation))
        (peak,) = memory.peaks(asked, model, [samples], workspace=0)
        counted = [model.length, samples, peak.allocated, peak.reserved, int(BELOW * peak.allocated)]
        return dict(zip(COUNTED[1:], counted, strict=True)) | dict.fromkeys(MEASURED, "")

    def measure(self, row: str, counted: dict) -> dict:
        """Train with what is counted, with another segment if it must be, and with less than the tensors take."""
        limit, trains, took = int(counted["segments"]), "", ""
        at_limit = self._train(row, limit, 1)
        if at_limit == TRAINED:
            trains, took = COUNTED_ALONE, self._took(row, 1)
        elif at_limit == ENDED and self._train(row, limit + memory.SEGMENT, 3) == TRAINED:
            trains, took = WITH_ANOTHER, self._took(row, 3)
        below = self._train(row, int(counted["below"]), 2)
        return dict(zip(MEASURED, (at_limit, below, took, trains), strict=True))

    def _train(self, row: str, limit: int, repeat: int) -> str:
        """How a row's run on GPUs with so many bytes ended."""
        done = self._script("launch", "--row", row, "--repeat", str(repeat), LOCKSTEP_PRETENDED_MEMORY=str(limit))
        if not done.returncode:
            return TRAINED
        said = " ".join((done.stdout + done.stderr).split())
        return ENDED if "CUDA out of memory" in said else f"failed: {said[-300:]}"

    def _took(self, row: str, repeat: int) -> int:
        """The most bytes of tensors on the first GPU, in a run that has trained."""
        (record,) = self.results.glob(f"{paths.RUNS}/{row}/n*/rep{repeat}/{paths.RECORD}")
        return int(2**20 * record_files.read_run(record.parent).memory_by_gpu[0])

    def _script(self, name: str, *more: str, **variables: str) -> subprocess.CompletedProcess:
        scripts = self.place / "workflow" / "scripts"
        configs = [word for file in self.files for word in ("--config", str(file))]
        command = [sys.executable, scripts / f"{name}.py", "--results", self.results, *configs, *more]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        environment |= pretended.variables(GPUS) | {"PYTHONPATH": str(scripts)} | variables
        return subprocess.run(command, cwd=self.place, env=environment, capture_output=True, text=True, check=False)


def configuration(keys: dict, rows: dict[str, dict]) -> dict:
    """A configuration with these rows and no others."""
    asked = COMMON | {section: COMMON.get(section, {}) | values for section, values in keys.items()}
    return asked | {"rows": dict.fromkeys(reading.read([PROJECT / reading.DEFAULT]).rows) | rows}


def read() -> dict[str, dict]:
    """The lines of the table that is there, by their cases."""
    if not TABLE.is_file():
        return {}
    with TABLE.open(encoding="utf-8") as stream:
        return {line["case"]: line for line in csv.DictReader(stream)}


def write(lines: dict[str, dict]) -> None:
    """Keep the table in the order of CASES, and its picture in the page, if there is one."""
    order = [f"{model}, {row}" for model, (*_, rows) in CASES.items() for row in rows]
    kept = [lines[case] for case in order if case in lines]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(TABLE) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COUNTED + MEASURED, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    if PAGE.is_file():
        between_marks(PAGE, MARKS, markdown(HEADER, list(map(cells, kept))))


def cells(line: dict) -> list[str]:
    tensors = f"{int(line['tensors']) / 2**20:.1f}"
    if line["took"]:
        tensors += f", {int(line['took']) / 2**20:.1f}"
    there = str(line["at_limit"]) or "not measured yet"
    if there == ENDED:
        there += "; trained with another segment" if line["trains"] else "; with another segment, too"
    limit = f"{int(line['segments']) / 2**20:.0f}"
    return [line["case"], str(line["tokens"]), str(line["samples"]), limit, there, str(line["at_below"]), tensors]


def tell(lines: list[dict]) -> None:
    """Print the table, and how many of its cases are as they were counted."""
    print_table(HEADER, list(map(cells, lines)))
    done = [line for line in lines if line["at_limit"]]
    if not done:
        return
    short = [line["case"] for line in done if line["at_limit"] != TRAINED]
    false = [line["case"] for line in done if not line["trains"]]
    late = [line["case"] for line in done if line["at_below"] != ENDED]
    print(f"{len(done) - len(short)} of {len(done)} trained in what is counted; not so: {', '.join(short) or 'none'}")
    print(f"{len(done) - len(false)} of {len(done)} trained where they fit; not so: {', '.join(false) or 'none'}")
    print(f"{len(done) - len(late)} of {len(done)} ended out of memory below; not so: {', '.join(late) or 'none'}")
    errors = [int(line["tensors"]) / int(line["took"]) - 1 for line in done if line["took"]]
    if errors:
        sizes = 100 * np.abs(errors)
        print(f"tensors: counted {np.median(sizes):.2f} % off in the median, at most {sizes.max():.2f} %")


if __name__ == "__main__":
    main()
