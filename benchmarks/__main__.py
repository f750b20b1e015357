"""make benchmark: how fast Lockstep is, as ratios paired within one run, because machines drift.

    python -m benchmarks [--data FILE] [--rounds N] [--write] [padding] [libraries] [harness] [tuned] [ddp]

padding   `single` against the loop that pads to 128 and tokenises in collate, in one process, in turns
libraries `single` against transformers.Trainer and accelerate as their documentation starts them, likewise
harness   `single` with all that is noted of it against a bare loop over the same plan, likewise
tuned     the open division's recipe (bf16 throughout, fp32 optimizer) against padding and Trainer, likewise
ddp       `ddp` with two processes against `single`, as real runs in turns; and against what two processes reach that do
          the same work without talking to each other, which is as much as this machine has to give
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep import environment
from lockstep.terminal import print_table

PROJECT = Path(__file__).parents[1]
SCRIPTS = PROJECT / "workflow" / "scripts"
REAL_DATA = PROJECT.parent / "shared" / "data" / "emotion" / "emotion-10k.json"
PAGE = PROJECT / "docs" / "performance.md"
MARKS = ("<!-- make benchmark: begin -->", "<!-- make benchmark: end -->")
COMMON = {
    "train.epochs": 1,
    "train.eval_every": 0,
    "train.checkpoint": "last",
    "hardware.device": "cpu",
}
SMALL = {"model.layers": 2, "model.hidden_size": 128, "model.heads": 2}
LARGER = {"model.layers": 4, "model.hidden_size": 256, "model.heads": 4}


def command(script: str, results: Path, keys: dict, *more: str) -> list[str]:
    overrides = [f"--set={key}={value}" for key, value in (COMMON | keys).items()]
    return [sys.executable, str(SCRIPTS / f"{script}.py"), "--results", str(results), *overrides, *more]


def prepared(folder: Path, keys: dict) -> Path:
    for script in ("prepare", "plan"):
        subprocess.run(command(script, folder, keys), check=True, cwd=PROJECT, stdout=subprocess.DEVNULL)
    return folder


def padding(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import PaddedLoop, PlannedLoop

    results = prepared(folder / "padding", keys | SMALL)
    ratios = in_turns(PlannedLoop(results), 16, PaddedLoop(results), 4, rounds)
    return [line("single over padding to 128, samples/s (2 x 128)", ratios, "at least 5")]


def libraries(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import AccelerateLoop, PlannedLoop, TrainerLoop

    results = prepared(folder / "libraries", keys | SMALL)
    return [
        line(
            f"single over {name}'s documented loop, samples/s (2 x 128)",
            in_turns(PlannedLoop(results), 16, loop(results), 12, rounds),
            "at least 2.8",
        )
        for name, loop in (("transformers.Trainer", TrainerLoop), ("accelerate", AccelerateLoop))
    ]


def tuned(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import PaddedLoop, TrainerLoop, TunedLoop

    results = prepared(folder / "tuned", keys | SMALL)
    return [
        line(
            f"tuned over {name}, samples/s (2 x 128)",
            in_turns(TunedLoop(results), 24, loop(results), steps, rounds),
            target,
        )
        for name, loop, steps, target in (
            ("padding to 128", PaddedLoop, 4, "at least 7"),
            ("transformers.Trainer", TrainerLoop, 12, "at least 4"),
        )
    ]


def harness(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import BareLoop, PlannedLoop

    results = prepared(folder / "harness", keys | SMALL)
    ratios = in_turns(PlannedLoop(results), 20, BareLoop(results), 20, 4 * rounds)
    return [line("single over a bare loop on the same plan, samples/s (2 x 128)", ratios, "at least 0.98")]


def in_turns(ours, our_steps: int, theirs, their_steps: int, rounds: int) -> list[float]:
    """Ratios of samples per second, each of two measurements side by side; who is first changes from round to round."""
    ratios = []
    for part in range(rounds + 1):
        pair = [(ours, our_steps), (theirs, their_steps)]
        speeds = {loop: loop.train(part * steps, steps) for loop, steps in (pair if part % 2 else pair[::-1])}
        if part:  # the first round warms up
            ratios.append(speeds[ours] / speeds[theirs])
    return ratios


def ddp(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    keys = keys | LARGER | {"hardware.processes": 2, "hardware.threads": 1}
    whole = prepared(folder / "whole", keys)
    plan = json.loads((whole / "data" / "plan" / "bucketed-b64-e1-s42.json").read_text())
    halved = keys | {"train.global_batch": 32, "train.max_steps": plan["steps"]}
    half, other = prepared(folder / "half", halved), prepared(folder / "other", halved)

    def start(results: Path, row: str, keys: dict) -> subprocess.Popen:
        launch = command("launch", results, keys, "--row", row)
        return subprocess.Popen(launch, cwd=PROJECT, stdout=subprocess.DEVNULL)

    def seconds(results: Path, row: str, world_size: int) -> float:
        record = json.loads((results / f"runs/{row}/n{world_size}/rep1/record.json").read_text())
        return record["clock"]["train_seconds"]

    def run(*processes: subprocess.Popen) -> None:
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            raise SystemExit("a run failed; its log is above")

    speedups, ceilings = [], []
    for _ in range(rounds):
        run(start(whole, "single", keys))
        run(start(whole, "ddp", keys))
        run(start(half, "single", halved), start(other, "single", halved))
        single = seconds(whole, "single", 1)
        speedups.append(single / seconds(whole, "ddp", 2))
        ceilings.append(single / max(seconds(half, "single", 1), seconds(other, "single", 1)))
    shares = [speedup / ceiling for speedup, ceiling in zip(speedups, ceilings, strict=True)]
    return [
        line("ddp with 2 processes over single, time (4 x 256)", speedups, "at least 1.8"),
        line("the same without communication: this machine's ceiling", ceilings, ""),
        line("ddp as a share of that ceiling", shares, ""),
    ]


def line(name: str, ratios: list[float], target: str) -> list[str]:
    return [
        name,
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        str(len(ratios)),
        target,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="padding, libraries, harness, tuned, ddp; all without")
    parser.add_argument(
        "--data", type=Path, default=REAL_DATA if REAL_DATA.is_file() else None, help="texts to train on"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each pair is measured")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md too")
    arguments = parser.parse_args()
    benchmarks = {"padding": padding, "libraries": libraries, "harness": harness, "tuned": tuned, "ddp": ddp}
    if unknown := set(arguments.what) - set(benchmarks):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(benchmarks)}")
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
        write(header, lines, "the 10,000 published rows" if arguments.data else "the embedded synthetic corpus")


def write(header: list[str], lines: list[list[str]], texts: str) -> None:
    """Put the table, and what it was measured on, between the marks in docs/performance.md."""
    about = environment.describe()
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("torch", "transformers", "accelerate"))
    machine = f"{about['cores']} CPU cores ({about['cpu']}, {', '.join(about['cpu_flags'])}), {about['memory_mb']} MiB"
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    measured = f"On {machine}; Python {about['python']}, {packages}; {texts}; {datetime.date.today()}."
    PAGE.write_text(f"{before}{MARKS[0]}\n{table}\n\n{measured}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
