"""python -m benchmarks.foretold [CASES ...] --out FOLDER: how wrong `lockstep which` is on rows of this machine.

A case is a model, a number of ranks and a network, with several rows. Nothing of them was used to find what the
forecast assumes. Of each case, data and messages between ranks come first, then `lockstep which --seal`, then its rows
are trained, so that no forecast can know its run; `lockstep check`'s rule on seals is asked too. A network of 1 Gbit/s
or 100 Mbit/s is two network namespaces with a shaped link between them (ip, tc; root); it is skipped where these can't
be made.

What is done already in FOLDER is not done again, so it can run in parts: name some cases, or stop it after --minutes,
and start it again. The table has all that is there; --write puts it into docs/measurements/foretold. With --seal it
ends before rows are trained, so that forecasts can be published before anything can be known of their runs.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import PROJECT, SCRIPTS, between_marks, markdown
from lockstep import paths
from lockstep.config import reading
from lockstep.files import write_json
from lockstep.run import record_files, seals
from lockstep.terminal import print_table

PAGE = PROJECT / "docs" / "measurements" / "foretold" / "README.md"
MARKS = ("<!-- foretold: begin -->", "<!-- foretold: end -->")
HEADER = ["case", "row", "foretold, ms", "interval, ms", "measured, ms", "error, %", "inside", "disturbed"]
COMMON = {
    "data": {"limit": 3000},
    "train": {"epochs": 2, "max_steps": 60, "eval_every": 0, "checkpoint": "last"},
    "profile": {"steps": 0},
    "retries": 0,
}
DDP = {"ddp": {"strategy": "ddp"}}
HOOKS = {f"ddp_{hook}": {"strategy": "ddp", "hook": hook} for hook in ("fp16", "powersgd")}
ACCUMULATED = {"ddp_accumulation": {"strategy": "ddp", "accumulation": 3}}
SHARDED = {
    "fsdp": {"strategy": "fsdp"},
    "fsdp_accumulation": {"strategy": "fsdp", "accumulation": 2},
    "zero_redundancy": {"strategy": "zero_redundancy"},
    **{f"deepspeed_{stage}": {"strategy": "deepspeed", "stage": stage} for stage in (1, 2, 3)},
}
LOCAL = {"local_sgd": {"strategy": "local_sgd", "every": 4}}
SMALL = {"model": {"hidden_size": 96, "layers": 3, "heads": 4}, "train": {"global_batch": 48}}
WIDE = {"model": {"hidden_size": 320, "layers": 3, "heads": 5}, "train": {"global_batch": 40}}
DEEP = {"model": {"hidden_size": 160, "layers": 8, "heads": 5}, "train": {"global_batch": 24, "batching": "plain"}}


@dataclass(frozen=True)
class Case:
    """keys: of the configuration, by section; config: a file that they override; rate: tc's, of a shaped link."""

    keys: dict
    rows: dict[str, dict]
    ranks: int = 2
    config: str | None = None
    rate: str | None = None
    single: dict = field(default_factory=lambda: {"single": {"strategy": "single"}})


CASES = {
    "small": Case(SMALL, DDP | {"ddp_spawn": {"strategy": "ddp_spawn"}} | HOOKS | ACCUMULATED | SHARDED | LOCAL),
    "wide": Case(WIDE, DDP | HOOKS | ACCUMULATED | SHARDED | LOCAL),
    "deep": Case(DEEP, DDP | ACCUMULATED | SHARDED),
    "llama": Case(
        {"model": {"hidden_size": 192, "layers": 4, "heads": 4}, "train": {"global_batch": 12}},
        DDP | ACCUMULATED | SHARDED,
        config="config/language.yaml",
    ),
    "images": Case({"train": {"global_batch": 48}}, DDP | ACCUMULATED | SHARDED, config="config/digits.yaml"),
    "four": Case(SMALL, DDP | ACCUMULATED | SHARDED | LOCAL, ranks=4),
    "four_wide": Case(WIDE, DDP | ACCUMULATED | SHARDED | LOCAL, ranks=4),
    "gbit": Case(WIDE, DDP | HOOKS | ACCUMULATED | SHARDED | LOCAL, rate="1gbit"),
    "100mbit": Case(SMALL, DDP | HOOKS | ACCUMULATED | SHARDED | LOCAL, rate="100mbit"),
}
NETWORK = {"1gbit": "1Gb", "100mbit": "0.1Gb"}  # as `lockstep which` takes them
# What a shaped link lets pass at once after a pause, about 2 ms of its rate: more would make it faster than its rate.
BURST = {"1gbit": "256kb", "100mbit": "32kb"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"by default all: {', '.join(CASES)}")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of each case, only these; another FOLDER is needed")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results; what is there is kept")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="how often each row is trained")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further run is started")
    parser.add_argument("--seal", action="store_true", help="only foretell")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if arguments.repeats < 1:
        parser.error("--repeats must be 1 or more")
    until = time.monotonic() + 60 * arguments.minutes
    for name in [] if arguments.table else arguments.cases or CASES:
        if why := _impossible(CASES[name]):
            print(f"{name}: skipped: {why}", flush=True)
        else:
            repeats = 0 if arguments.seal else arguments.repeats
            _measure(CASES[name], arguments.out / name, arguments.rows, repeats, until)
    lines = _print(arguments.out)
    if arguments.write and lines:
        between_marks(PAGE, MARKS, "\n".join([markdown(HEADER, list(map(_cells, lines))), "", *_in_words(lines)]))


def _impossible(case: Case) -> str:
    """Why a case can't be made here; empty if it can."""
    if not case.rate:
        return ""
    if missing := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
        return f"a link is shaped by {' and '.join(missing)}, which is not installed"
    try:
        with _namespaces(case.rate):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces and shaped links are not allowed here ({error.stderr.strip()})"


def _measure(case: Case, folder: Path, rows: list[str] | None, repeats: int, until: float) -> None:
    """Prepare a case, foretell and seal it, and train its rows, as far as this was not done and there is time."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    if not file.is_file():
        write_json(file, _configuration(case, rows))  # JSON is YAML
    results, words = folder / "results", _words(case, file)
    names = list(reading.read([Path(reading.DEFAULT), *_files(case, file)]).rows)
    if not paths.data_file(results).is_file():
        _script("prepare", results, words, until)
        _script("plan", results, words, until)
    if not paths.network_file(results).is_file():
        here = ["--set", "hardware.nodes=1", "--set", f"hardware.processes={case.ranks}"]
        _script("network", results, [*words, *here, "--ranks", str(case.ranks), "--largest", "64"], until)
    if not paths.foretold_file(results).is_file():
        link = ["--network", NETWORK[case.rate]] if case.rate else []
        _script("which", results, [*words, "--seal", *link], until)
    for repeat in range(1, repeats + 1):
        for name in names:
            run = next(results.glob(f"{paths.RUNS}/{name}/n*/rep{repeat}/{paths.RECORD}"), None)
            failed = next(results.glob(f"{paths.RUNS}/{name}/n*/rep{repeat}/{paths.FAILED}"), None)
            if not run and not failed:
                _train(case, results, [*words, "--row", name, "--repeat", str(repeat)], name, until)


def _configuration(case: Case, rows: list[str] | None) -> dict:
    """A configuration with the rows of a case, and no others."""
    merged = json.loads(json.dumps(COMMON))
    for section, keys in case.keys.items():
        merged[section] = merged.get(section, {}) | keys
    alone = case.rate is not None
    merged["hardware"] = {"device": "cpu", "processes": 1 if alone else case.ranks, "threads": 1, "oversubscribe": True}
    merged["hardware"] |= {"nodes": case.ranks if alone else 1}
    wanted = {name: row for name, row in (case.single | case.rows).items() if not rows or name in rows}
    others = reading.read([Path(reading.DEFAULT)]).rows
    return merged | {"rows": dict.fromkeys(others) | wanted}


def _files(case: Case, file: Path) -> list[Path]:
    return [*([PROJECT / case.config] if case.config else []), file]


def _words(case: Case, file: Path) -> list[str]:
    return [word for each in _files(case, file) for word in ("--config", str(each.resolve()))]


def _script(name: str, results: Path, words: list[str], until: float) -> None:
    """Run a script of Lockstep's; ends the program with what it said if it fails, or if the time is over."""
    _in_time(until)
    print(f"{results.parent.name}: {name}", flush=True)
    _wait([_start(name, results, words)])


def _train(case: Case, results: Path, words: list[str], name: str, until: float) -> None:
    """Train a row once. A run that fails is told, and leaves its failed.json."""
    _in_time(until)
    print(f"{results.parent.name}: {name}, {words[-2].removeprefix('--')} {words[-1]}", flush=True)
    if not case.rate or name == "single":
        _wait([_start("launch", results, [*words, "--node-rank", "0"] if case.rate else words)], fatal=False)
        return
    with _namespaces(case.rate) as spaces:
        words = [*words, "--set", f"hardware.endpoint={ADDRESSES[0]}"]
        # With a name of its own for each node, as DeepSpeed's launcher refuses a host that is named twice.
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        within = [["ip", "netns", "exec", space, *rename, f"node{number}"] for number, space in enumerate(spaces)]
        nodes = [
            _start("launch", results, [*words, "--node-rank", str(node)], prefix) for node, prefix in enumerate(within)
        ]
        _wait(nodes, fatal=False)


def _in_time(until: float) -> None:
    if time.monotonic() > until:
        raise SystemExit("the time is over; start it again for the rest, or with --table for what there is")


def _start(script: str, results: Path, words: list[str], prefix: list[str] = ()) -> subprocess.Popen:
    command = [*prefix, sys.executable, SCRIPTS / f"{script}.py", "--results", results.resolve(), *words]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait(processes: list[subprocess.Popen], fatal: bool = True) -> None:
    said = []
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:  # where this was interrupted
            process.terminate()
    if any(process.returncode for process in processes):
        print("".join(words[-2000:] for words in said), flush=True)
        if fatal:
            raise SystemExit("it failed, as said above")


ADDRESSES = ("10.87.65.1", "10.87.65.2")


@contextlib.contextmanager
def _namespaces(rate: str) -> Iterator[list[str]]:
    """Two network namespaces, joined by a link of so many bits/s in each direction. Needs root."""
    spaces = [f"lockstep-{os.getpid()}-{number}" for number in range(2)]
    made = []
    try:
        for space in spaces:
            _run("ip", "netns", "add", space)
            made.append(space)
        _run(
            "ip", "link", "add", "name", "lsk0", "netns", spaces[0], "type", "veth", "peer", "lsk0", "netns", spaces[1]
        )
        for space, address in zip(spaces, ADDRESSES, strict=True):
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "lsk0")
            _run("ip", "-n", space, "link", "set", "lsk0", "up")
            shaping = ["tbf", "rate", rate, "burst", BURST[rate], "latency", "50ms"]
            _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "lsk0", "root", *shaping)
        yield spaces
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def compared(folder: Path) -> list[dict]:
    """Each row of a case that was foretold and measured: both in seconds, the error, and whether it is inside."""
    results, found = folder / "results", []
    sealed = seals.read(results)
    for name, forecast in (sealed or {"rows": {}})["rows"].items():
        runs = [record_files.read_run(file.parent) for file in paths.run_files(results, paths.RECORD, row=name)]
        if not forecast["seconds"] or not runs:
            line = {"case": folder.name, "row": name, "foretold": forecast["seconds"], "measured": None}
            found.append(line | {"why": "; ".join(forecast["why"])})
            continue
        measured = statistics.median(run.clock.train_seconds / run.steps for run in runs)
        seconds = forecast["seconds"]
        inside = None if seconds["low"] is None else seconds["low"] <= measured <= seconds["high"]
        line = {"case": folder.name, "row": name, "foretold": seconds, "measured": measured, "inside": inside}
        line |= {"error": seconds["value"] / measured - 1, "link": forecast["link"], "parts": forecast["parts"]}
        line |= {"disturbed": sum(bool(run.watch.disturbed) for run in runs), "runs": len(runs)}
        found.append(line)
    return found


def _print(out: Path) -> list[dict]:
    """Print the table of all that is foretold, and how wrong it is; keep it as foretold.json, and return its lines."""
    folders = [out / name for name in CASES if (out / name).is_dir()]
    lines = [line for folder in folders for line in compared(folder)]
    known = [line for line in lines if line["foretold"]]
    if known:
        print_table(HEADER, list(map(_cells, known)))
        write_json(out / "foretold.json", {"rows": known})
    for line in lines:
        if not line["foretold"]:
            print(f"{line['case']}, {line['row']}: not foretold: {line['why']}")
    for folder in folders:
        for where, why in seals.broken(folder / "results"):
            print(f"{folder.name}: the seal does not hold: {where}: {why}")
    print(*_in_words(known), sep="\n")
    return known


def _in_words(lines: list[dict]) -> list[str]:
    """For each kind of forecast, the mean error, the largest one, and how many rows are inside their interval."""
    done, said = [line for line in lines if line["measured"] is not None], []
    for what, chosen in (
        ("on measured links", [line for line in done if not line["link"] and line["row"] != "single"]),
        ("on links whose speed was only named", [line for line in done if line["link"] and line["row"] != "single"]),
        ("one rank (single)", [line for line in done if line["row"] == "single"]),
    ):
        if chosen:
            errors, ends = [abs(line["error"]) for line in chosen], [line["inside"] for line in chosen]
            known = [inside for inside in ends if inside is not None]
            said.append(
                f"{what}: {len(chosen)} rows, {100 * statistics.mean(errors):.1f} % off in the mean, at most"
                f" {100 * max(errors):.1f} %; {sum(known)} of {len(known)} inside their interval"
            )
    return said


def _cells(line: dict) -> list[str]:
    seconds = line["foretold"]
    interval = "" if seconds["low"] is None else f"{1000 * seconds['low']:.3g} to {1000 * seconds['high']:.3g}"
    foretold = [line["case"], line["row"], f"{1000 * seconds['value']:.3g}", interval]
    if line["measured"] is None:
        return [*foretold, "", "", "", ""]
    inside = line["inside"]
    return [
        *(*foretold, f"{1000 * line['measured']:.3g}"),
        f"{100 * line['error']:+.1f}",
        "extrapolated" if inside is None else "yes" if inside else "no",
        f"{line['disturbed']} of {line['runs']}" if line["disturbed"] else "",
    ]


if __name__ == "__main__":
    main()
