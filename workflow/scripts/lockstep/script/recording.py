"""Record a user's own training script: run it with workflow/recorder/ in each process, and read the recording.

A recording is a folder. Each process that trained wrote process.PID.json (its steps), each process that imported
PyTorch wrote started.PID.json (how it was started), and rank 0 wrote the initial weights.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from lockstep.config.machine import free_port
from lockstep.errors import BadInput, RunFailed
from lockstep.files import write_json
from lockstep.paths import PROJECT
from lockstep.script import pretended

RECORDER = PROJECT / "workflow" / "recorder"
FEWEST = 3  # timed steps of a run
GRACE = 5.0  # seconds that processes have to end after a signal
STACKS = signal.SIGRTMIN + 11  # at which a process writes where it is; neither Slurm nor Lightning use it
WRITING = 1.0  # seconds that this takes at most
WRAPPERS = ("wrapper", "decorate_context", "noted", "outermost", "inner")  # functions that only call another
FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')  # of faulthandler
OF_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
# Prefixes of variables that launchers set for their ranks; they are removed for a replay, which has one rank.
OF_RANKS = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "HOROVOD_", "SLURM_", "LOCKSTEP_", "GROUP_", "ROLE_", "CROSS_")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
# What srun and mpirun tell a single rank. A script may read them, also in a shell that is within a job already.
OF_ONE = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_NPROCS": "1"}
OF_ONE |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
OF_ONE |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}


class Hangs(RunFailed):
    """Raised if a command did no further step for too long, and was ended."""


class OthersIdle(RunFailed):
    """Only some ranks stepped, though the others computed as many gradients, whose weights stayed as they began.

    line: where the first of them stepped.
    """

    def __init__(self, says: str, line: str):
        super().__init__(says)
        self.line = line


@dataclass(frozen=True)
class Recording:
    """A recording of one command: `ranks` in order, each as the recorder wrote it; `hung` says how it hung, if so."""

    folder: Path
    ranks: list[dict]
    exit_code: int
    log: Path | None
    hung: str = ""

    @property
    def world(self) -> int:
        return self.ranks[0]["world"]

    @property
    def elsewhere(self) -> dict[str, str]:
        """The files of modules that were imported from the folder in LOCKSTEP_ELSEWHERE, by name."""
        return {name: file for rank in self.ranks for name, file in rank["elsewhere"].items()}

    @property
    def others(self) -> dict[str, str]:
        """The files of modules that were imported from anywhere else but Python's own folder, by name."""
        return {name: file for rank in self.ranks for name, file in rank.get("others", {}).items()}

    @property
    def read(self) -> set[str]:
        """The files in that folder that Python opened, without modules and environments."""
        return {file for rank in self.ranks for file in rank.get("read", ())}

    @property
    def last_words(self) -> str:
        """The last line of its output; empty if the output was not kept."""
        return _last_words(self.log) if self.log else ""

    @property
    def steps(self) -> int:
        """The number of steps that every rank has done."""
        return min(len(rank["steps"]) for rank in self.ranks)

    def broken_off(self, steps: int) -> str:
        """Why it failed before it had done this many steps; empty if it did them, or ended by itself before."""
        if self.hung or self.steps >= steps:
            return self.hung
        after = f"after {self.steps} of {steps} steps"
        failed = self._failure()
        if self.exit_code:
            return f"ended with exit code {self.exit_code} {after}" + (f": {failed}" if failed else "")
        if failed:  # what started the ranks has hidden it
            return f"failed {after}: {failed}"
        started = {each["pid"] for each in _all(self.folder, "started")}  # of forks it is not known how they end
        unfinished = [rank for rank in self.ranks if len(rank["steps"]) < steps and rank["pid"] in started]
        killed = [rank["rank"] for rank in unfinished if not rank["ended"]]
        return f"failed {after}: rank {killed[0]} was killed, or left by os._exit" if killed else ""

    def _failure(self) -> str:
        """The error or exit code of a rank, or else of a process that started ranks; empty if all ended well."""
        failed = {each["pid"]: each for each in _all(self.folder, "failed")}
        parents = {each["pid"]: each["parent"] for each in [*_all(self.folder, "started"), *self.ranks]}
        pids = [rank["pid"] for rank in self.ranks]
        for pid in pids:  # the list grows
            if parents.get(pid, pid) not in pids:
                pids.append(parents[pid])
        first = next((pid for pid in pids if pid in failed), None)
        if first is None:
            return ""
        of_rank = pids.index(first) < len(self.ranks)
        return (f"rank {failed[first]['rank']}: " if of_rank else "") + failed[first]["says"]

    def indices(self, loader: dict) -> np.ndarray:
        """The distinct samples of the part of data that a rank's loader is over, as indices of the whole; sorted."""
        return np.unique(np.fromfile(self.folder / loader["part"]["file"], np.int64) % loader["part"]["size"])

    def until(self, steps: int) -> "Recording":
        """The recording without later steps."""
        return replace(self, ranks=[rank | {"steps": rank["steps"][:steps]} for rank in self.ranks])


@dataclass(frozen=True)
class Timing:
    """The result of a timed run of a script: seconds per optimizer step (mean and median), and the number of steps."""

    seconds: float
    median: float
    steps: int
    world: int
    elsewhere: dict[str, str] = field(default_factory=dict)  # as in Recording
    others: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """How to record a script: the number of optimizer steps, and other options."""

    steps: int = 8
    keep_dropout: bool = False
    patience: float = 600.0  # seconds without a further step after which the script counts as hanging
    gpus: int = 0  # the number of pretended GPUs; 0: the machine's own devices


@dataclass(frozen=True)
class Place:
    """Where a command is run: its folder, further variables, and the file for its output (None: not redirected)."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    log: Path | None = None


def record(command: list[str], folder: Path, asked: Asked, place: Place | None = None) -> Recording:
    """Run a user's unchanged command until each of its ranks has done its steps; by default in the current folder.

    Raises BadInput if the command can't be started, and RunFailed if no step was recorded.
    """
    place = place or Place(Path.cwd())
    script = _script(command, place.folder)
    beside = {"LOCKSTEP_SCRIPT_FOLDER": str(script.resolve().parent if script else place.folder)}
    try:
        exit_code = _run(command, dict(os.environ) | place.variables, place.folder, folder, asked, beside, place.log)
    except Hangs as error:
        with contextlib.suppress(RunFailed):
            return replace(_read(folder, 0, place.log), hung=f"hung: {error}")
        raise
    return _read(folder, exit_code, place.log)


def time_steps(command: list[str], folder: Path, asked: Asked, place: Place, warm_up: int) -> Timing:
    """Run a command for `warm_up` steps, and time those that follow, until asked.steps are done or it ends.

    Raises BadInput if the command can't be started, and RunFailed if it failed or ended before three timed steps.
    """
    beside = {"LOCKSTEP_WARM_UP": str(warm_up)}
    exit_code = _run(command, dict(os.environ) | place.variables, place.folder, folder, asked, beside, place.log)
    recorded = _read(folder, exit_code, place.log)
    timed = recorded.steps - warm_up
    if exit_code and recorded.steps < asked.steps:
        in_step = f"with exit code {exit_code} in step {recorded.steps + 1}"
        raise RunFailed(f"the command ended {in_step}: {recorded.last_words}")
    if timed < FEWEST:
        raise RunFailed(
            f"the command ended after {recorded.steps} steps, and the first {warm_up} of them are not timed; it must do"
            f" at least {warm_up + FEWEST}"
        )
    window = slice(warm_up - 1, recorded.steps)
    each = [np.diff(rank["steps"][window]) for rank in recorded.ranks]
    slowest = max(each, key=np.sum)  # ranks wait for each other in each step, so that they differ little
    modules = {"elsewhere": recorded.elsewhere, "others": recorded.others}
    return Timing(float(slowest.mean()), float(np.median(slowest)), timed, recorded.world, **modules)


def replay(
    recorded: Recording,
    folder: Path,
    asked: Asked,
    *,
    backwards: bool = False,
    reseeded: bool = False,
    in_turn: bool = False,
    variables: dict[str, str] | None = None,
) -> Recording:
    """Run a recording's script as one process, on the samples of all its ranks, from rank 0's initial weights.

    backwards: whether to reverse the samples of each batch, which changes nothing but rounding. reseeded: whether
    models are to draw other random numbers. in_turn: whether to give the batches of all ranks one after the other, not
    as one. variables: of the environment, set last. The output is in `folder`/log.txt. Raises RunFailed if no step was
    recorded.
    """
    write_json(recorded.folder / "replay.json", merged(recorded, in_turn))
    started = _start(recorded)
    kept = {
        name: value
        for name, value in started["variables"].items()
        if not name.startswith(OF_RANKS) and name not in ALONE
    }
    environment = dict(os.environ) | kept
    if "MASTER_PORT" in started["variables"] or "RANK" in started["variables"]:
        environment |= ALONE | {"MASTER_PORT": str(free_port("auto"))}
    environment |= {name: of_one for name, of_one in OF_ONE.items() if name in environment | started["variables"]}
    if recorded.ranks[0]["initial"]["devices"] == ["cuda:0"]:  # a script may count the GPUs that it sees
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        asked = replace(asked, gpus=min(asked.gpus, 1))
    environment |= variables or {}
    beside = {
        "LOCKSTEP_REPLAY": str(recorded.folder.resolve()),
        "LOCKSTEP_REVERSED": str(int(backwards)),
        "LOCKSTEP_RESEEDED": str(int(reseeded)),
        "LOCKSTEP_SCRIPT_FOLDER": started["variables"].get("LOCKSTEP_SCRIPT_FOLDER", ""),
    }
    log = folder / "log.txt"
    exit_code = _run(started["command"], environment, Path(started["folder"]), folder, asked, beside, log)
    return _read(folder, exit_code, log, of_one=True)


def merged(recorded: Recording, in_turn: bool = False) -> dict:
    """What a replay needs of a recording: the batches of all ranks, with their parts, and the learning rates.

    Batches of one turn are merged or, if `in_turn`, follow one another.
    """
    loaders = []
    for same in loaders_alike(recorded.ranks):
        epochs = max(len(loader["batches"]) for loader in same)
        turns = [_turns(same, epoch) for epoch in range(epochs)]
        sizes = [[[[len(batch)] for batch in turn] for turn in epoch] for epoch in turns]
        batches, parts = ([_joined(epoch, in_turn) for epoch in each] for each in (turns, sizes))
        several = in_turn and not same[0]["dispatched"]  # for a dispatcher, only rank 0 draws
        length = same[0]["length"] and same[0]["length"] * (len(same) if several else 1)
        loaders.append(same[0] | {"batches": batches, "parts": parts, "length": length})
    rates = [step["rates"] for step in recorded.ranks[0]["steps"]]
    calls = _joined([[[file] for file in turn] for turn in zip(*_inputs(recorded), strict=False)], in_turn)
    return {"loaders": loaders, "rates": rates, "calls": calls, "world": recorded.world, "in_turn": in_turn}


def _inputs(recorded: Recording) -> list[list[str]]:
    """The file of each rank's inputs for each call of a model; empty if a loss depends on anything else, too."""
    if recorded.world == 1 or not all(step.get("inside") for rank in recorded.ranks for step in rank["steps"]):
        return []
    counts = [sum(len(step["calls"]) for step in rank["steps"]) for rank in recorded.ranks]
    files = [
        [f"inputs.{rank['pid']}.{number}.pt" for number in range(count)]
        for rank, count in zip(recorded.ranks, counts, strict=True)
    ]
    return files if all((recorded.folder / name).is_file() for names in files for name in names) else []


def _joined(turns: list[list[list]], in_turn: bool) -> list[list]:
    """The batches of a single process, given those of all ranks in each turn."""
    if in_turn:
        return [batch for turn in turns for batch in turn]
    return [[each for batch in turn for each in batch] for turn in turns]


def loaders_alike(ranks: list[dict]) -> list[list[dict]]:
    """The data loaders of all ranks that correspond: by the size of the data that they index, in order of creation.

    Those of which each rank has another part of the same data (Subset) count as loaders of all of it.
    """
    by_kind: dict[tuple, list[dict]] = {}
    for rank in ranks:
        for loader in rank["loaders"]:
            if loader["indexed"]:
                by_kind.setdefault((loader["size"], loader["ordinal"]), []).append(loader)
    divided = _divided_by_hand(ranks, list(by_kind.values()))
    taken = {id(loader) for same in divided for loader in same}
    others = ([loader for loader in same if id(loader) not in taken] for same in by_kind.values())
    return [*filter(None, others), *([_of_the_whole(loader) for loader in same] for same in divided)]


def _divided_by_hand(ranks: list[dict], groups: list[list[dict]]) -> list[list[dict]]:
    """Corresponding loaders of which each rank goes through another part of as many samples, in order of creation.

    groups: loaders over data of the same size. Where all ranks have the same samples, or a sampler divides what each
    has, these are no parts.
    """
    alike = [same for same in groups if len(same) == len(ranks) and len({loader["subset"] for loader in same}) == 1]
    known = {id(loader) for same in alike for loader in same}
    by_whole: dict[tuple, list[dict]] = {}
    for rank in ranks:
        counts: Counter = Counter()
        for loader in rank["loaders"]:
            if loader["indexed"] and loader.get("part") and id(loader) not in known and goes_through_all(loader):
                kind = loader["part"]["size"], loader["trains"]
                by_whole.setdefault((*kind, counts[kind]), []).append(loader)
                counts[kind] += 1
    complete = [same for same in by_whole.values() if len(same) == len(ranks)]
    return [same for same in complete if len({loader["subset"] for loader in same}) > 1]


def goes_through_all(loader: dict) -> bool:
    """Whether an epoch of a loader has nearly as many samples as its data set, so that no sampler divides these."""
    own = loader.get("own", loader)
    samples = (loader["length"] or 0) * len(next(iter(own["batches"][0]), []))
    return bool(own["size"]) and samples > 0.75 * own["size"]


def _of_the_whole(loader: dict) -> dict:
    """A loader over a part of data as one over all of it, with indices there; `own` has what it is over the part."""
    part, own = loader["part"], {name: loader[name] for name in ("size", "batches", "subset")}
    given = loader.get("chosen") or [own["size"], own["subset"]]
    whole = {"size": part["size"], "batches": part["batches"], "subset": None, "chosen": given}
    return loader | whole | {"divided": True, "own": own}


def _turns(loaders: list[dict], epoch: int) -> list[list[list[int]]]:
    """The batches of all ranks at each position of an epoch."""
    each = [loader["batches"][epoch] for loader in loaders if epoch < len(loader["batches"])]
    turns = max(map(len, each), default=0)
    return [[batches[turn] for batches in each if turn < len(batches)] for turn in range(turns)]


def _run(
    command: list[str],
    environment: dict[str, str],
    cwd: Path,
    folder: Path,
    asked: Asked,
    beside: dict[str, str],
    log: Path | None = None,
) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pretended_gpus = pretended.variables(asked.gpus) if asked.gpus else {}
    loaded_first = [RECORDER, *([pretended.PARTS] if asked.gpus else [])]
    path = os.pathsep.join(filter(None, [*map(str, loaded_first), environment.get("PYTHONPATH", "")]))
    environment = environment | {
        **pretended_gpus,
        "PYTHONPATH": path,
        "LOCKSTEP_RECORDING": str(folder.resolve()),
        "LOCKSTEP_STEPS": str(asked.steps),
        "LOCKSTEP_KEEP_DROPOUT": str(int(asked.keep_dropout)),
        "LOCKSTEP_KNOWN": ",".join(os.environ),
        "LOCKSTEP_STACKS": str(int(STACKS)),
        **beside,
    }
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        try:
            process = subprocess.Popen(
                command, env=environment, cwd=cwd, stdout=output, stderr=output and subprocess.STDOUT
            )
        except OSError as error:
            raise BadInput(f"{command[0]}: can't be started: {error.strerror}.") from None
        signals = [signal.SIGTERM, signal.SIGKILL]
        try:
            return _wait(process, folder, asked, beside.get("LOCKSTEP_SCRIPT_FOLDER") or str(cwd))
        except Hangs:
            # PyTorch and DeepSpeed compile under a lock. SIGTERM would leave it, and later runs would wait for ever.
            signals.insert(0, signal.SIGINT)
            raise
        finally:
            _end_all(process, folder, signals)


def _wait(process: subprocess.Popen, folder: Path, asked: Asked, script_folder: str) -> int:
    """Wait for a process to end, and return its exit code. Raises Hangs if nothing is recorded for too long."""
    seen, since, done_since = -1.0, time.monotonic(), None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
        if _all_are_done(folder):
            done_since = done_since or time.monotonic()
            # What started the ranks may wait for a result that they did not hand over, as Fabric does where it spawns.
            if time.monotonic() - done_since > GRACE:
                return 0
        latest = max((file.stat().st_mtime for file in folder.glob("*.json")), default=0.0)
        if latest != seen:
            seen, since = latest, time.monotonic()
        if time.monotonic() - since > asked.patience:
            where = "".join(f"; {each}" for each in _standing(folder, script_folder))
            raise Hangs(
                f"no further step in {asked.patience:.0f} s; it was ended{where}. If its steps take longer, set"
                " --patience SECONDS"
            )


def _standing(folder: Path, script_folder: str) -> list[str]:
    """A sentence on what each rank of a command that hangs has done, and where it is now if that is known."""
    steps = {each["pid"]: each for each in _all(folder, "process")}
    started = _all(folder, "started")
    for about in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(about["pid"], STACKS)
    time.sleep(WRITING)
    told: dict[int, str] = {}
    for about in sorted(started, key=lambda each: each["pid"] not in steps):  # the others may be a rank's workers
        pid, set_by_launcher = about["pid"], next(filter(None, map(about["variables"].get, OF_RANK)), "")
        where = _line_of(folder / f"stacks.{pid}.txt", script_folder) if _lives(pid) else "has ended"
        if pid in steps:
            told[steps[pid]["rank"]] = f"did {len(steps[pid]['steps'])} steps{where and f' and {where}'}"
        elif set_by_launcher.isdigit() and where:
            told.setdefault(int(set_by_launcher), f"did no step and {where}")
    for each in steps.values():  # also forks, of which more is not known
        told.setdefault(each["rank"], f"did {len(each['steps'])} steps")
    return [f"rank {rank} {words}" for rank, words in sorted(told.items())]


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _line_of(stacks: Path, script_folder: str) -> str:
    """The line of its script where a process is, and what it calls there; empty if its threads do not show it."""
    for thread in stacks.read_text(encoding="utf-8", errors="replace").split("\n\n") if stacks.is_file() else ():
        frames = FRAME.findall(thread)  # the innermost first
        for place, (name, line, _) in enumerate(frames):
            if name.startswith(script_folder + os.sep) and "site-packages" not in name:
                inner = [function for _, _, function in reversed(frames[:place])]
                called = next((each for each in inner if not each.startswith("_") and each not in WRAPPERS), "")
                at = f"{os.path.relpath(name, script_folder)}:{line}"
                return f"is at {at}" + (f" in {called}" if called else "")
    return ""


def _all_are_done(folder: Path) -> bool:
    """Whether every rank has done its steps, and has ended itself because of that."""
    done = [file.suffix for file in folder.glob("done.*")]
    if not done:
        return False
    process = folder / f"process{done[0]}.json"
    return process.is_file() and len(done) >= json.loads(process.read_text(encoding="utf-8"))["world"]


def _end_all(process: subprocess.Popen, folder: Path, signals: list[signal.Signals]) -> None:
    """End what remains of a command: its descendants, and others with this recording in their environment.

    Each signal is sent to those that the previous one has not ended within GRACE seconds. They are looked for only
    once, since a process whose parent has ended is no descendant any more.
    """
    left: set[psutil.Process] = set()
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            left |= {psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}
        left |= {each for each in psutil.process_iter() if _records(each, folder)} - {psutil.Process()}
        for number in signals:
            _send(left, number)
            _, left = psutil.wait_procs(left, GRACE)
    except KeyboardInterrupt:  # pressed once more: no longer patient, but nothing may be left
        _send(left, signal.SIGKILL)
        process.wait()
        raise
    process.wait()


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def _records(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("LOCKSTEP_RECORDING") == str(folder.resolve())
    except (psutil.Error, OSError):
        return False


def _all(folder: Path, kind: str) -> list[dict]:
    """All files of this kind that processes have written."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{kind}.*.json"))]


def _read(folder: Path, exit_code: int, log: Path | None, of_one: bool = False) -> Recording:
    processes = _all(folder, "process")
    for failed in (each["notes"]["failed"] for each in processes if each.get("notes", {}).get("failed")):
        raise RunFailed(f"the command could not be recorded: {failed}")
    for each in processes:  # one that was killed may not have recorded the weights after its last step
        each["steps"] = [step for step in each["steps"] if not isinstance(step, dict) or "hashes" in step]
    rank_of = {each["pid"]: each["rank"] for each in processes if each["steps"]}
    # A process that a rank started is no rank, unless it was given a number of its own, as by Lightning.
    ranks_alone = [each for each in processes if each["steps"] and rank_of.get(each["parent"]) != each["rank"]]
    trained = sorted(ranks_alone, key=lambda each: each["rank"])
    if not trained:
        seen = any(folder.glob("started.*.json"))
        why = "did no optimizer step on a model (an nn.Module that is called)"
        if not seen:
            why = (
                "did not import PyTorch in a Python process that Lockstep can observe; add to PYTHONPATH rather than"
                " set it, and do without Python's -E, -I and -S"
            )
        code = f", and ended with exit code {exit_code}" if exit_code else ""
        words = _last_words(log) if log else _first_failure(folder)
        raise RunFailed(f"the command {why}{code}{words and f': {words}'}")
    ranks = [each["rank"] for each in trained]
    if of_one and len(ranks) > 1:
        raise RunFailed("the script starts several ranks itself; start them by torchrun or by torch's mp.spawn")
    if len(ranks) > len(set(ranks)):
        rank = max(ranks, key=ranks.count)
        raise RunFailed(
            f"{ranks.count(rank)} processes trained as rank {rank} of {trained[0]['world']}, so they do not know of"
            " each other, and each trains a model of its own; call init_process_group in each, with the number of ranks"
        )
    if ranks != list(range(trained[0]["world"])):
        says = f"of {trained[0]['world']} ranks, only these did a step: {', '.join(map(str, ranks))}"
        if _others_are_idle(trained[0], processes, trained[0]["world"] - len(ranks)):
            says += "; the others compute gradients, and keep the weights with which they began"
            raise OthersIdle(says, trained[0]["steps"][0].get("line", ""))
        raise RunFailed(says)
    for each in trained:
        _tell_samples(each)
        of_rank = [about for about in _all(folder, "parts") if about["pid"] == each["pid"]]
        each["parts"] = {
            (about["size"], index): hashes for about in of_rank for index, hashes in about["hashes"].items()
        }
    return Recording(folder, trained, exit_code, log)


def _tell_samples(rank: dict) -> None:
    """Where a model is called with tensors of several lengths, take for samples what changes from call to call."""
    calls = [call for step in rank["steps"] if isinstance(step, dict) for call in step["calls"]]  # else it was timed
    for model in {call["model"] for call in calls if "others" in call}:
        its = [[call["rows"], *call.get("others", ())] for call in calls if call["model"] == model]
        changes = [len({tuple(rows) for rows in at_place}) > 1 for at_place in zip(*its, strict=False)]
        place = changes.index(True) if True in changes else 0
        for call in calls:
            if call["model"] == model:
                call["rows"] = [call["rows"], *call.pop("others", ())][place]


def _others_are_idle(first: dict, processes: list[dict], count: int) -> bool:
    """Whether so many processes took part in the first rank's steps, and changed no weights, unlike that one."""
    idle = [each["idle"] for each in processes if not each["steps"] and each.get("idle")]
    if len(idle) < count:  # as always where steps are only timed
        return False
    passes = sum(len(step["losses"]) for step in first["steps"][:-1])  # in the last step one may have failed
    took_part = [each for each in idle if each["passes"] >= max(passes, 2) and not each["changed"]]
    return len(took_part) == count and first["steps"][-1]["hashes"] != first["initial"]["hashes"]


def _first_failure(folder: Path) -> str:
    """The error of the process that failed first, not counting those that started others; empty if none is known."""
    parents = {each["parent"] for each in _all(folder, "started")}
    files = sorted(folder.glob("failed.*.json"), key=lambda file: file.stat().st_mtime_ns)
    failed = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return next((f"rank {each['rank']}: {each['says']}" for each in failed if each["pid"] not in parents), "")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _start(recorded: Recording) -> dict:
    """The command that started rank 0's script; for a process of multiprocessing, the one that started its parent."""
    started = {about["pid"]: about for about in _all(recorded.folder, "started")}
    if recorded.ranks[0]["pid"] not in started:
        raise RunFailed("its ranks are forks of a process that had imported PyTorch, so how to start one is not known")
    about = started[recorded.ranks[0]["pid"]]
    while any("multiprocessing" in word for word in about["command"][:4]) and about["parent"] in started:
        about = started[about["parent"]]
    return about


def _script(command: list[str], folder: Path) -> Path | None:
    """The first Python file that a command names, if it is started in this folder."""
    return next((folder / word for word in command if word.endswith(".py") and (folder / word).is_file()), None)
