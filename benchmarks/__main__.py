"""make benchmark: how fast Lockstep is, as ratios paired within one run, because machines drift.

    python -m benchmarks [--data FILE] [--rounds N] [--write] [NAME ...]

padding   `single` against the loop that pads to 128 and tokenises in collate, in one process, in turns
libraries `single` against transformers.Trainer and accelerate as their documentation starts them, likewise
harness   `single` with all that is noted of it against a bare loop over the same plan, likewise
images    the same for images of MNIST's size; and against Trainer as its documentation starts it
language  the same for packed sequences, by a small Llama
tuned     the open division's recipe (bf16 throughout, fp32 optimizer) against padding and Trainer, likewise
ddp       `ddp` with two processes against `single`, as real runs in turns; and against what two processes reach that do
          the same work without talking to each other, which is as much as this machine has to give
memory    what `single` takes against the bare loop, as real runs in turns
start     from launch to first step, each row against importing PyTorch and BERT, likewise
recorder  what `lockstep prove` costs the script that it records: time of a step, and memory
growth    speed, memory and planning at 10,000, 100,000 and 1,000,000 rows
gpu       on one GPU: a bare loop and rows in turns, in fp32, tf32 and bf16, compiled, packed, as CUDA graphs, and MFU
          beside that of the matrix products alone; only by itself, with --minutes and --out FOLDER (gpu.csv)
gating    how often `lockstep gate` fails a commit that is compared with itself, and which slow-down it finds; only by
          itself, with --rounds for blocks (209 make 200 comparisons of ten)
workflow  the default benchmark as a user runs it, once: how much of its time is Snakemake's and the rules' own
"""

import argparse
import csv
import datetime
import tempfile
import time
from pathlib import Path

from benchmarks.common import PROJECT, between_marks, markdown, refuse
from benchmarks.growth import growth
from benchmarks.processes import ddp, memory, start
from benchmarks.recorder import recorder
from benchmarks.turns import harness, images, language, libraries, padding, tuned
from benchmarks.workflow import workflow
from lockstep.rank import environment
from lockstep.terminal import print_table

ALL = (padding, libraries, harness, images, language, tuned, ddp, memory, start, recorder, growth, workflow)
REAL_DATA = PROJECT.parent / "shared" / "data" / "emotion" / "emotion-10k.json"
PAGE = PROJECT / "docs" / "performance.md"
MARKS = ("<!-- make benchmark: begin -->", "<!-- make benchmark: end -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="names as above; all without")
    parser.add_argument(
        "--data", type=Path, default=REAL_DATA if REAL_DATA.is_file() else None, help="texts to train on"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each pair is measured")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md too")
    parser.add_argument("--minutes", type=float, default=10, help="of gpu, after which it ends with what it has")
    parser.add_argument("--out", type=Path, help="of gpu: the folder for its table")
    arguments = parser.parse_args()
    if arguments.what == ["gpu"]:
        return on_gpu(arguments)
    if arguments.what == ["gating"]:
        from benchmarks.gating import HEADER, gating

        with tempfile.TemporaryDirectory() as folder:
            return print_table(HEADER, gating(Path(folder), arguments.rounds))
    benchmarks = {benchmark.__name__: benchmark for benchmark in ALL}
    refuse(parser, arguments, "benchmark", benchmarks, "rounds", PAGE)
    keys = {"data.path": arguments.data.resolve()} if arguments.data else {}
    print(f"on {arguments.data or 'the embedded synthetic corpus'}")
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            line
            for name in arguments.what or benchmarks
            for line in benchmarks[name](Path(folder), keys, arguments.rounds)
        ]
    header = ["ratio", "median", "range", "rounds", "target"]
    print_table(header, lines)
    if arguments.write:
        texts = f"the texts of {arguments.data.name}" if arguments.data else "the embedded synthetic corpus"
        write(header, lines, texts)


def on_gpu(arguments: argparse.Namespace) -> None:
    """Print the table of benchmarks/gpu.py, each line as it comes, and write it to gpu.csv."""
    from benchmarks.gpu import HEADER, gpu

    out = arguments.out or Path.cwd()
    out.mkdir(parents=True, exist_ok=True)
    until, lines = time.monotonic() + 60 * arguments.minutes, []
    with tempfile.TemporaryDirectory() as folder, (out / "gpu.csv").open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(HEADER)
        for line in gpu(Path(folder), arguments.rounds, until):
            lines.append(line)
            table.writerow(line)
            stream.flush()
            print(", ".join(f"{name} {cell}" for name, cell in zip(HEADER, line, strict=True) if cell), flush=True)
    print_table(HEADER, lines)


def write(header: list[str], lines: list[list[str]], texts: str) -> None:
    """Put the table, and what it was measured on, between the marks in docs/performance.md."""
    about = environment.describe()
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("torch", "transformers", "accelerate"))
    machine = f"{about['cores']} CPU cores ({about['cpu']}, {', '.join(about['cpu_flags'])}), {about['memory_mb']} MiB"
    measured = f"On {machine}; Python {about['python']}, {packages}; {texts}; {datetime.date.today()}."
    between_marks(PAGE, MARKS, f"{markdown(header, lines)}\n\n{measured}")


if __name__ == "__main__":
    main()
