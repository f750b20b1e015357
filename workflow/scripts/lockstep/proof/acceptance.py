"""Find out in a few minutes what works on a machine: proofs in parallel, then timed runs in turn (accept.py).

Ranks of a proof are forks of this process unless their launcher is what is tested (run/forked.py), so this process must
not initialise CUDA. Every result is written to accept.json at once.
"""

import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from lockstep import nvml, paths
from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.config.machine import cpu_cores, visible_gpus
from lockstep.config.row import Row
from lockstep.errors import BadInput, RunFailed, RunStopped
from lockstep.files import read_json, write_json
from lockstep.model import metrics
from lockstep.paths import PROJECT, SCRIPTS
from lockstep.proof import parity, verdicts
from lockstep.rank import imports
from lockstep.run import lifetime, refusals, runs
from lockstep.run.fork import Fork

CONFIGS = PROJECT / "config"
PROOFS, TIMES = CONFIGS / "accept.yaml", CONFIGS / "accept_times.yaml"
FIRST_PROOFS = 0.5  # share of the time for the first, most informative proofs, before anything is timed
PER_RANK = 3 * 2**30  # bytes of memory that a rank of a trial may need
PER_RANK_ON_GPU = 2 * 2**30
POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0  # for trials that are running when the time is up
MARGIN = 1.2  # a run starts only if the longest run so far, times this factor, would end in time


class Acceptance:
    """The state of one acceptance: its results, and what was not reached in time.

    configs: files that override the configuration of the proofs, as for another task. timed: whether rows are timed.
    """

    def __init__(self, folder: Path, deadline: float, configs: tuple[Path, ...] = (), timed: bool = True):
        self.folder, self.deadline = folder, deadline
        self.began = time.monotonic()
        _require_own(folder)
        self.gpus = visible_gpus()
        of_gpus = [Path(reading.ON_GPUS)] if self.gpus else []
        self.proofs, proven = _read([PROOFS], self.gpus, configs)
        self.proof_rows = {name: replace(row, in_forks=True) for name, row in proven.items()}
        self.times, self.time_rows = _read([*of_gpus, TIMES], self.gpus)
        if not timed:
            self.time_rows = {}
        self.found: dict = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["lockstep", "accept", *sys.argv[1:]]),
            "task": self.proofs.task,
            "proofs": {},
            "times": [],
            "not_reached": [],
            "cannot": {},
            "machine": None,
            "finished": False,
        }

    def run(self, say: Callable[[str], None]) -> None:
        """Prove and time rows, and write the results. Raises BadInput if another process uses the folder."""
        self.say = say
        with lifetime.hold(self.folder):
            self._run()

    def _run(self) -> None:
        self._begin_anew()
        self._prepare()
        imports.preload(list(self.proof_rows.values()))
        if self.gpus and not imports.reaches_gpus():
            self.say("forks of this process can't use the GPUs, so each trial does its own imports")
            self.proof_rows = {name: replace(row, in_forks=False) for name, row in self.proof_rows.items()}
        able = [row for row in self.proof_rows.values() if self._can(row)]
        share = FIRST_PROOFS if self.time_rows else 1.0
        first = self.began + share * (self.deadline - self.began)
        self._prove_references(able)
        left = self._prove(able, first)
        self._time(self.deadline)
        self._prove(left, self.deadline)
        self.found["finished"] = True
        self._write()

    @property
    def wrong(self) -> list[str]:
        """Rows whose trial failed, or that train another model without being designed to."""
        proofs = self.found["proofs"].items()
        return [name for name, verdict in proofs if verdict["proof"] in verdicts.WRONG and not verdict["nature"]]

    @property
    def passed(self) -> bool:
        """Whether at least one row was proven, no proof is wrong, and no timed row failed."""
        return bool(self.found["proofs"]) and not self.wrong and not self._failed()

    def _failed(self) -> list[str]:
        return [line["name"] for line in self.found["times"] if "failed" in line]

    def _begin_anew(self) -> None:
        for part in ("proofs", "times", "logs"):
            shutil.rmtree(self.folder / part, ignore_errors=True)
        (self.folder / "logs").mkdir()
        self._write()

    def _write(self) -> None:
        """Write the results so far and what was not reached; the file is then complete whenever the process ends."""
        cannot, timed = self.found["cannot"], [line["name"] for line in self.found["times"]]
        proofs = [name for name in self.proof_rows if name not in cannot and name not in self.found["proofs"]]
        times = [name for name, _ in _with_bare_loops(self.time_rows) if name not in cannot and name not in timed]
        self.found["not_reached"] = [*(f"proof of {name}" for name in proofs), *(f"time of {name}" for name in times)]
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.folder / paths.ACCEPT, self.found)

    def _prepare(self) -> None:
        """Prepare data, initial weights and plans of both configurations in parallel."""
        parts = [(self.proofs, "proofs"), *([(self.times, "times")] if self.time_rows else [])]
        for script in ("prepare", "plan"):
            started = [
                subprocess.Popen(
                    self._command(script, config, part),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for config, part in parts
            ]
            for process in started:
                _, errors = process.communicate()
                if process.returncode:
                    raise RunFailed(f"{script}: {errors.strip()[-500:]}")
        self.say(f"prepared, after {self._seconds()} s")

    def _command(self, script: str, config: Config, part: str, *more: str) -> list[str]:
        file = paths.config_file(self.folder / part)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            file.write_text(json.dumps(config.source), encoding="utf-8")  # JSON is valid YAML
        program = [sys.executable, str(SCRIPTS / f"{script}.py")]
        return [*program, "--results", str(self.folder / part), "--config", str(file), *more]

    def _can(self, row: Row) -> bool:
        """Whether a row can run on this machine; the reason is noted if it can't."""
        try:
            refusals.refuse_to_start(row)
        except BadInput as error:
            self.found["cannot"][row.name] = str(error).removeprefix(f"rows.{row.name}").lstrip(":. ")
            return False
        return True

    def _prove_references(self, rows: list[Row]) -> None:
        every = [reference for row in rows for reference in self.proofs.references(row).values()]
        trials = {each.name: (lambda each=each: self._reference(each)) for each in every}
        codes = dict(self._in_forks(trials, len(trials), self.deadline))
        if not codes:
            return
        if any(codes.values()):
            name = next(name for name, code in codes.items() if code)
            raise RunFailed(f"{name}: failed (log: {self._log(name)})")
        self.say(f"references trained, after {self._seconds()} s")

    def _reference(self, reference: Row) -> None:
        in_forks = any(row.in_forks for row in self.proof_rows.values())
        parity.prove_reference(self.proofs, reference, self.folder / "proofs", in_forks)

    def _prove(self, rows: list[Row], until: float) -> list[Row]:
        """Prove rows in parallel; returns those that were not reached."""
        results = self.folder / "proofs"
        left = {row.name: row for row in rows}
        trials = {row.name: (lambda row=row: parity.prove(self.proofs, row, results)) for row in rows}
        for name, _ in self._in_forks(trials, self._at_once(rows), until):
            row = left.pop(name)
            verdict = verdicts.read(self.proofs, row, results) or verdicts.failed(
                self.proofs, row, "it left no verdict"
            )
            if self.found["machine"] is None:
                self.found["machine"] = self._machine(results / self.proofs.trial(row).folder(1))
            self.found["proofs"][name] = _brief(verdict)
            self._write()
            why = f" ({verdict['reason']})" if verdict["reason"] else ""
            self.say(f"{name}: {verdict['proof'].replace('-', ' ')}{why}")
        return list(left.values())

    def _at_once(self, rows: list[Row]) -> int:
        """How many trials may run in parallel, by cores and memory; CPU ranks wait half the time, so at least 2."""
        ranks = max((self.proofs.trial(row).hardware.processes for row in rows), default=1)
        most = min(max(2, cpu_cores() // ranks), psutil.virtual_memory().available // (PER_RANK * ranks))
        gpus = [nvml.ask("nvmlDeviceGetMemoryInfo", nvml.gpu(number)) for number in range(nvml.count())]
        if self.gpus and gpus and None not in gpus:
            most = min(most, min(gpu.free for gpu in gpus) // PER_RANK_ON_GPU)
        return max(1, int(most))

    def _in_forks(
        self, functions: dict[str, Callable[[], None]], at_once: int, until: float
    ) -> Iterator[tuple[str, int]]:
        """Call functions in forks; yields the name and exit code of each that ends. None starts after `until`."""
        waiting, running = list(functions), {}
        try:
            while running or (waiting and time.monotonic() < until):
                while waiting and len(running) < at_once and time.monotonic() < until:
                    name = waiting.pop(0)
                    with self._log(name).open("w", encoding="utf-8") as log:
                        running[name] = Fork(functions[name], dict(os.environ), log, new_session=True)
                for name, fork in list(running.items()):
                    if fork.poll() is not None:
                        yield name, running.pop(name).wait()
                if running and time.monotonic() > until + GRACE_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            _end(running)

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _time(self, until: float) -> None:
        """Time rows in turn until the time is up."""
        longest = 0.0
        for name, row in _with_bare_loops(self.time_rows):
            if time.monotonic() + MARGIN * longest > until:
                return
            if row and not self._can(row):
                continue
            began = time.monotonic()
            try:
                line = self._timed(row) if row else self._bare(name)
            except RunStopped:
                raise
            except (RunFailed, BadInput) as error:
                self.say(f"{name}: {error}")
                line = {"name": name, "failed": str(error)}
            longest = max(longest, time.monotonic() - began)
            self.found["times"].append(line)
            self._write()
            if "step_ms" in line:
                self.say(f"{name}: {line['step_ms']:.3g} ms a step")

    def _timed(self, row: Row) -> dict:
        folder = self.folder / "times"
        with contextlib.redirect_stdout(sys.stderr):
            record = runs.run(self.times, row, 1, folder)
        clock, work = record.clock, record.work
        environment = read_json(folder / row.folder(1) / paths.ENVIRONMENT)
        devices, peak = metrics.peak_of(row, record.settings, environment, None)
        shutil.rmtree(folder / row.folder(1) / paths.CHECKPOINT, ignore_errors=True)
        return {
            "name": row.name,
            "precision": row.precision,
            "devices": row.hardware.devices,
            "step_ms": 1000 * clock.step_seconds_median,
            "samples_per_second": record.throughput.samples_per_second,
            "train_seconds": clock.train_seconds,
            "cold_seconds": clock.cold_seconds,
            "stall_seconds": clock.stall_seconds,
            "startup_seconds": clock.first_step_seconds,
            "mfu": metrics.utilisation(work.flops, clock.train_seconds, devices, peak),
            "mfu_padded": metrics.utilisation(work.padded_flops, clock.train_seconds, devices, peak),
            "attention": record.settings.get("attention_kernels"),
            "disturbed": record.watch.disturbed,
        }

    def _bare(self, name: str) -> dict:
        row = self.time_rows[name.removeprefix(BARE)]
        finished = subprocess.run(
            self._command("bare", self.times, "times", "--row", row.name), capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise RunFailed(f"the bare loop failed: {finished.stderr.strip()[-500:]}")
        figures = json.loads(finished.stdout.splitlines()[-1])
        return {"name": name, "precision": row.precision, "devices": 1} | figures

    def _machine(self, folder: Path) -> dict | None:
        file = folder / paths.ENVIRONMENT
        names = (
            "cpu",
            "cores",
            "memory_mb",
            "gpus",
            "cuda",
            "cudnn",
            "nccl",
            "python",
            "packages",
            "commit",
            "changed",
        )
        if not file.is_file():
            return None
        about = read_json(file)
        return {name: about.get(name) for name in names}

    def _seconds(self) -> str:
        return f"{time.monotonic() - self.began:.0f}"

    def proof_table(self) -> tuple[list[str], list[list[str]]]:
        header = ["proof", "same model?", "times its floor", "a mistake is times further", "why"]
        lines = [
            [
                name,
                verdict["proof"].replace("-", " "),
                "" if verdict["above_floor"] is None else f"{verdict['above_floor']:.1g}",
                "" if verdict["below_mistake"] is None else verdicts.multiple(verdict["below_mistake"]),
                verdict["nature"] or verdict["reason"],
            ]
            for name, verdict in self.found["proofs"].items()
        ]
        return header, lines

    def time_table(self) -> tuple[list[str], list[list[str]]]:
        """A line for each timed row; the bare loop it is compared with has the same precision, on one device."""
        timed = [line for line in self.found["times"] if "step_ms" in line]
        bare = {line["precision"]: line["step_ms"] for line in timed if line["name"].startswith(BARE)}
        lines = []
        for line in self.found["times"]:
            if "failed" in line:
                lines.append([line["name"], *[""] * 5, line["failed"]])
                continue
            theirs = bare.get(line["precision"]) if line["devices"] == 1 else None
            mfu, cold = line.get("mfu_padded"), line.get("cold_seconds")
            lines.append(
                [
                    line["name"],
                    f"{line['step_ms']:.1f}",
                    f"{theirs / line['step_ms']:.2f}" if theirs else "",
                    f"{line['samples_per_second']:,.0f}",
                    f"{100 * mfu:.1f} %" if mfu else "",
                    "" if cold is None else f"{cold:.1f}",
                    "; ".join(line.get("disturbed", [])),
                ]
            )
        header = [
            "timed",
            "step ms",
            "of the bare loop's speed",
            "samples/s",
            "MFU with padding",
            "cold price s",
            "note",
        ]
        return header, lines

    def last_lines(self) -> Iterator[str]:
        proofs = self.found["proofs"]
        right = f"{len(proofs) - len(self.wrong)} of {len(proofs)} proofs are as expected"
        yield f"{right if proofs else 'nothing was proven'}, after {self._seconds()} s"
        if self.wrong:
            yield f"wrong: {', '.join(self.wrong)}"
        if failed := self._failed():
            yield f"failed while they were timed: {', '.join(failed)}"
        for name, why in self.found["cannot"].items():
            yield f"not possible here: {name}: {why}"
        if self.found["not_reached"]:
            yield f"not reached: {', '.join(self.found['not_reached'])}; give more --minutes"
        yield f"all results: {self.folder / paths.ACCEPT}; pass on the whole folder {self.folder}"

    def tidy(self) -> None:
        """Delete all large files, and keep records, verdicts and logs."""
        for part in ("proofs", "times"):
            shutil.rmtree(paths.data_folder(self.folder / part), ignore_errors=True)
            for pattern in (paths.FINAL_WEIGHTS, paths.CHECKPOINT, paths.LEDGER):
                for left in (self.folder / part).rglob(pattern):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


def _require_own(folder: Path) -> None:
    """Create the folder. Raises BadInput if that fails, or if the folder has other content, which could be deleted."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = (folder / paths.ACCEPT).is_file()
        others = [] if own else sorted({file.name for file in folder.iterdir()} - {lifetime.LOCK})
    except OSError as error:
        raise BadInput(f"--results: {folder}: {error.strerror}. Name a folder that can be written.") from None
    if others:
        raise BadInput(
            f"--results: {folder} holds {others[0]} and no {paths.ACCEPT}, so it is not a folder of an earlier"
            " `lockstep accept`. Name a new one."
        )


BARE = "bare loop, as "  # followed by the row whose precision and plan the loop uses


def _read(files: list[Path], gpus: int, over: tuple[Path, ...] = ()) -> tuple[Config, dict[str, Row]]:
    """The default configuration overridden by `files`, then by those in `over`.

    Its rows are those of the last of `files`, in that order, and then those that `over` adds.

    If there are GPUs, the device is set to cuda, so that a fork that sees no GPU fails instead of proving a CPU's run.
    """
    device = [f"hardware.device={'cuda' if gpus else 'cpu'}"]
    config = reading.read([PROJECT / reading.DEFAULT, *(PROJECT / file for file in files), *over], device)
    named = [
        reading.load_yaml(PROJECT / files[-1])["rows"],
        *(reading.load_yaml(file).get("rows") or {} for file in over),
    ]
    order = dict.fromkeys(name for rows in named for name in rows)
    return config, {name: config.rows[name] for name in order if name in config.rows}


def _with_bare_loops(rows: dict[str, Row]) -> list[tuple[str, Row | None]]:
    """Rows by name, with a bare loop before the first row of each precision."""
    names: list[tuple[str, Row | None]] = []
    seen = set()
    for name, row in rows.items():
        if row.precision not in seen:
            seen.add(row.precision)
            names.append((f"{BARE}{name}", None))
        names.append((name, row))
    return names


def _brief(verdict: dict) -> dict:
    """The part of a verdict that accept.json keeps."""
    names = ("proof", "reason", "above_floor", "below_mistake", "fp64", "lossy", "precision", "world_size")
    return {name: verdict.get(name) for name in names} | {"nature": verdict.get("by_nature", "")}


def _end(running: dict[str, Fork]) -> None:
    """Terminate trials that are still running."""
    for fork in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork.pid, signal.SIGTERM)
    for fork in running.values():
        fork.wait()
