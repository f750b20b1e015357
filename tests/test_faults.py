"""Every fault that a run may meet, under every strategy, with real launchers and processes.

Each test lets a run come to the midst of its plan, has something go wrong there, and looks at what a user would: that
it ends soon, what its row says, what is left on the machine, what became of earlier results, and whether the same
command then ends as a run that nothing went wrong with. What happened goes into docs/reliability.md, where asked for:

    WRITE=1 python -m pytest -m "slow or not slow" tests/test_faults.py
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.common import between_marks, markdown
from lockstep import paths
from lockstep.config import schema
from tests import faulted
from tests.conftest import HOROVOD, PROJECT, Workplace, copy_project

PAGE, MARKS = PROJECT / "docs" / "reliability.md", ("<!-- faults: begin -->", "<!-- faults: end -->")
# Dropout is on, so that random states matter. The plan has 34 steps.
CONFIG = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0.1}
train: {epochs: 2, global_batch: 31, eval_every: 7, checkpoint: last, checkpoint_every: 5}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 60, oversubscribe: true}
profile: {steps: 0}
repeats: 1
retries: 0
"""
STEPS, AFTER = 34, 12  # faults come after this step: the states after steps 5 and 10 are saved by then
TIMEOUT = 6  # seconds, of a run in which a rank stands still
SOON = TIMEOUT + 10  # seconds: within these every run must have ended
NEXT = 2  # which repetition is tried; the first one of `single` lies beside it, and must not be touched
ROWS = ("single", "all_threads", "dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed", "accelerate")
ROWS += ("trainer", "fabric", "fsdp")
ALONE = ("single", "all_threads", "dataparallel")  # one process
MEET_WITHOUT_A_PORT = (*ALONE, "ddp_spawn", "ddp_amp", "horovod")
FAULTS = {
    "killed": "a rank is killed (SIGKILL)",
    "stopped": f"a rank stands still (SIGSTOP; `timeout: {TIMEOUT}`)",
    "raises": "a rank raises an exception",
    "memory": "out of memory (RLIMIT_AS)",
    "disk": "the disk is full when a state is saved (tmpfs)",
    "changed": "the data changes under a run",
    "vanished": "the data vanishes under a run",
    "truncated": "killed; its last state is truncated",
    "power": "power cut: files of 0 bytes, a lock left",
    "port": "its port is taken",
    "port_lost": "its port is taken at the last moment",
    "clock": "the clock jumps, by a day and back by two",
    "second": "the same command a second time",
}
told: dict[tuple[str, str], tuple[str, str]] = {}  # of each fault and row: what was said, and after how long


def cells(fault: str, fast: tuple[str, ...] = (), ci: tuple[str, ...] = (), rows: tuple[str, ...] = ROWS):
    """A test for each row: `make test` has those of `fast`, CI also those of `ci`, and `make test-slow` all others."""
    parameters = []
    for row in rows:
        marks = [] if row in fast else [pytest.mark.slow, pytest.mark.ci] if row in ci else [pytest.mark.slow]
        if row == "horovod":
            marks.append(pytest.mark.skipif(not HOROVOD, reason="needs: make horovod"))
        parameters.append(pytest.param(fault, row, marks=marks, id=f"{fault}-{row}"))
    return parameters


def several(*parameters):
    return pytest.mark.parametrize(("fault", "row"), list(itertools.chain.from_iterable(parameters)))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    """A copy of the project with prepared data, and one run, of `single`, that has ended."""
    place = copy_project(tmp_path_factory.mktemp("faults"))
    place.path("small.yaml").write_text(CONFIG, encoding="utf-8")
    place.path("tmp").mkdir()
    faulted.into(place)
    place.ended = {}
    for words in (("prepare",), ("plan",), ("launch", "--row", "single")):
        finished = subprocess.run(command("prepared", *words), **options(place), capture_output=True, check=False)
        assert finished.returncode == 0, finished.stderr
    place.ended["single"] = outcome(place.path("prepared/runs/single/n1/rep1"))
    return place


def command(results: str, script: str, *arguments: str) -> list[str]:
    configs = ["--config=config/config.yaml", "--config=small.yaml"]
    return ["python", f"workflow/scripts/{script}.py", *configs, f"--results={results}", *arguments]


def options(place: Workplace, **environment: str) -> dict:
    """How a command is started in the project's copy. What it leaves in the temporary folder is found in `tmp`."""
    environment = place.environment() | {"TMPDIR": str(place.path("tmp"))} | environment
    return {"cwd": place.folder, "env": environment, "text": True}


@dataclass
class Run:
    """A row's run in a results folder of its own, and what was there before it."""

    place: Workplace
    fault: str
    row: str
    process: subprocess.Popen | None = None
    descendants: list[psutil.Process] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)  # on which they listen
    shared: set[str] = field(default_factory=set)  # files of shared memory that were there before
    began: float = 0.0  # when the fault came
    seconds: float = 0.0  # from then to the end

    @property
    def results(self) -> Path:
        return self.place.path(f"{self.fault}-{self.row}")

    @property
    def folder(self) -> Path:
        return self.results / paths.RUNS / paths.run_name(self.row, 1 if self.row in ALONE else 2, NEXT)

    @property
    def gate(self) -> Path:
        return self.place.path(f"gate-{self.fault}-{self.row}")

    def command(self, *arguments: str) -> list[str]:
        return command(self.results.name, "launch", "--row", self.row, "--repeat", str(NEXT), *arguments)

    def start(self, *arguments: str, fault: dict | None = None, **environment: str) -> None:
        asked = json.dumps({"after": AFTER, "gate": str(self.gate)} | (fault or {}))
        self.shared, self.began = set(os.listdir("/dev/shm")), time.monotonic()
        self.process = subprocess.Popen(
            self.command(*arguments),
            **options(self.place, LOCKSTEP_FAULT=asked, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def come_to_the_gate(self) -> None:
        """Until the last rank waits after step 12; then what the run consists of is noted."""
        deadline = time.monotonic() + 180
        while not self.gate.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, (self.folder / paths.LOG).read_text()
            time.sleep(0.02)
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        pids = {process.pid for process in self.descendants}
        self.ports = {port for pid, port in listening() if pid in pids}
        self.began = time.monotonic()

    def ranks(self) -> list[psutil.Process]:
        table = np.fromfile(self.folder / paths.PROGRESS, dtype=np.int64).reshape(-1, 5)
        return [psutil.Process(int(pid)) for pid in table[:, 0]]

    def states(self) -> list[Path]:
        return paths.saved_states(self.folder)

    def end(self, within: float = SOON) -> tuple[int, str, str]:
        """Its exit code, and what it said on stdout and stderr, once it has ended: in time, and all of it."""
        self.gate.unlink(missing_ok=True)
        try:
            out, err = self.process.communicate(timeout=self.began + within + 20 - time.monotonic())
        finally:
            self.kill()
        self.seconds = time.monotonic() - self.began
        assert self.seconds < within, (self.seconds, err)
        self.leaves_nothing()
        assert "Traceback" not in err, err
        return self.process.returncode, out, err

    def leaves_nothing(self, temporary: bool = True) -> None:
        _, alive = psutil.wait_procs(self.descendants, timeout=2)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert [process.cmdline() for process in working_in(self.place)] == []
        assert not {port for _, port in listening()} & self.ports
        assert leaked(self.shared) == set()
        if temporary:
            assert [file.name for file in self.place.path("tmp").iterdir()] == []

    def kill(self) -> None:
        """The whole job at once, as when a machine is switched off."""
        for process in [*self.descendants, *working_in(self.place)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def failed(self, within: float = SOON) -> str:
        """The reason of a run that must have failed, which is the only thing that it says."""
        code, _, err = self.end(within)
        assert code == 1, err
        reason = json.loads((self.folder / paths.FAILED).read_text())["reason"]
        log = (self.folder / paths.LOG).relative_to(self.place.folder)
        assert err.splitlines()[-1] == f"failed: {self.row}: {reason} (log: {log})"
        assert err.count("failed: ") == 1
        assert not (self.folder / paths.RECORD).exists()
        return reason

    def again(self, *arguments: str, resumed: list[int] | None = None) -> str:
        """The same command: it succeeds, and ends as a run that nothing went wrong with. What it said."""
        done = subprocess.run(self.command(*arguments), **options(self.place), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        self.is_right(resumed)
        return done.stderr

    def is_right(self, resumed: list[int] | None = None) -> None:
        ours, theirs = outcome(self.folder), undisturbed(self.place, self.row)
        assert ours[1:] == theirs[1:]
        for key in ("losses", "dev", "steps"):
            assert ours[0][key] == theirs[0][key]
        if resumed is not None:
            assert ours[0]["resumed"] == resumed

    def tell(self, said: str, goes_on: bool = False) -> None:
        if self.fault in FAULTS:
            told[self.fault, self.row] = (said, "goes on" if goes_on else f"{self.seconds:.0f} s")
            if os.environ.get("WRITE"):
                write_down()


def outcome(folder: Path) -> tuple[dict, str, str]:
    """A run's record, the hash of its last weights, and that of its ledger."""
    record = json.loads((folder / paths.RECORD).read_text())
    weights = json.loads((folder / paths.CHECKPOINT / "manifest.json").read_text())["weights"]
    with np.load(folder / paths.LEDGER) as ledger:
        return record, weights, str([(name, hashlib.sha256(ledger[name]).hexdigest()) for name in sorted(ledger.files)])


def undisturbed(place: Workplace, row: str) -> tuple[dict, str, str]:
    """The outcome of the row's run when nothing goes wrong; it is made once."""
    if row not in place.ended:
        shutil.copytree(place.path("prepared"), place.path(f"whole-{row}"))
        words = command(f"whole-{row}", "launch", "--row", row, "--repeat", str(NEXT))
        done = subprocess.run(words, **options(place), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder,) = place.path(f"whole-{row}/runs").glob(f"{row}/n*/rep{NEXT}")
        place.ended[row] = outcome(folder)
        shutil.rmtree(place.path(f"whole-{row}"))
    return place.ended[row]


def listening() -> set[tuple[int | None, int]]:
    """Process ids and the TCP ports on which they listen."""
    every = psutil.net_connections(kind="tcp")
    return {(socket.pid, socket.laddr.port) for socket in every if socket.status == psutil.CONN_LISTEN}


def working_in(place: Workplace) -> list[psutil.Process]:
    """All processes whose working directory is the place."""
    return [
        process
        for process in psutil.process_iter(["cwd", "status"])
        if process.info["cwd"] == str(place.folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def leaked(before: set[str]) -> set[str]:
    """Files of shared memory that came since, and that no process uses any more.

    Tests beside this one have theirs meanwhile, and DeepSpeed's ranks write 66 MiB into theirs before they map them:
    what a process has open is in use, too.
    """
    since = set(os.listdir("/dev/shm")) - before
    for process in psutil.process_iter() if since else ():
        with contextlib.suppress(psutil.Error, OSError):
            used = {file.path for file in (*process.open_files(), *process.memory_maps(grouped=True))}
            # What lost its name is told of as "/dev/shm/name (deleted)".
            since -= {name for name in since if {f"/dev/shm/{name}", f"/dev/shm/{name} (deleted)"} & used}
    return since


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def run(place, fault, row):
    """The run that a fault is to meet, in a copy of the prepared results, of which nothing may be lost."""
    run = Run(place, fault, row)
    empty(place.path("tmp"))
    shutil.copytree(place.path("prepared"), run.results)
    earlier = content(run.results / paths.RUNS / "single" / "n1" / "rep1")
    assert earlier
    yield run
    run.gate.unlink(missing_ok=True)
    if run.process:
        run.kill()
    if os.path.ismount(run.folder):
        subprocess.run(["umount", "--lazy", str(run.folder)], check=True)
    assert {file: file.read_bytes() for file in earlier} == earlier
    shutil.rmtree(run.results)


def kill_a_rank(run: Run) -> None:
    run.ranks()[-1].send_signal(signal.SIGKILL)


def stop_a_rank(run: Run) -> None:
    run.ranks()[-1].send_signal(signal.SIGSTOP)


def limit_memory(run: Run) -> None:
    """To what the rank has now, and what writing down its end may take."""
    (rank,) = run.ranks()[-1:]
    limit = rank.memory_info().vms + 2**26
    resource.prlimit(rank.pid, resource.RLIMIT_AS, (limit, limit))


def nothing_outside(run: Run) -> None:
    pass


@dataclass
class Ending:
    """A fault that ends its run: what is done from outside, what inside, and what the row says then."""

    says: str
    outside: Callable[[Run], None] = nothing_outside
    inside: str = "nothing"
    timeout: int = 60


ENDINGS = {
    "killed": Ending(
        r"rank \d died after step 12 of 34 without an error message; killed, or out of memory\?", kill_a_rank
    ),
    "stopped": Ending(
        rf"no progress for {TIMEOUT} s, so the run was ended as hung \(.*rank \d \(stopped\) after step 12.* of 34\)",
        stop_a_rank,
        timeout=TIMEOUT,
    ),
    "raises": Ending(r"rank \d, after step 12 of 34: ValueError: a label that nobody has", inside="raises"),
    "memory": Ending(
        r"rank \d, after step 12 of 34: \w+: .*(can't allocate memory|bad allocation|MemoryError).*",
        limit_memory,
        inside="allocates",
    ),
    # Other ways for a rank to end: one row of each kind of launcher.
    "exits": Ending(r"rank \d, after step 12 of 34: SystemExit: 3", inside="exits"),
    "leaves": Ending(r"rank \d died after step 12 of 34 without an error message; .*", inside="leaves"),
    "aborts": Ending(r"rank \d died after step 12 of 34 without an error message; .*", inside="aborts"),
    "segfaults": Ending(r"rank \d died after step 12 of 34 without an error message; .*", inside="segfaults"),
    "explodes": Ending(r"rank \d, after step 15 of 34: RunFailed: the loss is nan in step 13; .*", inside="explodes"),
}


@several(
    cells("killed", ci=("ddp",)),
    cells("stopped"),
    cells("raises", fast=("single",)),
    cells("memory"),
    cells("leaves", rows=("ddp", "ddp_spawn")),
    cells("explodes", rows=("ddp", "ddp_spawn"), ci=("ddp",)),
    *(cells(kind, rows=("ddp", "ddp_spawn")) for kind in ("exits", "aborts", "segfaults")),
)
def test_a_fault_that_ends_a_run(run, fault):
    ending = ENDINGS[fault]
    run.start(f"--set=hardware.timeout={ending.timeout}", fault={"do": ending.inside})
    run.come_to_the_gate()
    before = [content(state) for state in run.states()]
    assert len(before) == 2
    ending.outside(run)
    reason = run.failed()
    assert re.fullmatch(ending.says, reason), reason
    assert [content(state) for state in run.states()] == before
    run.tell(reason)
    if fault == "killed":  # what the others leave is the same
        run.again(resumed=[10])


@several(cells("disk"))
def test_a_full_disk_while_a_state_is_saved(run):
    run.folder.mkdir(parents=True)
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64m", "lockstep", str(run.folder)]
    if shutil.which("mount") is None or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("needs to be root, to make a small file system")
    run.start()
    run.come_to_the_gate()
    before = [content(state) for state in run.states()]
    filler = run.folder / "filler"
    room = shutil.disk_usage(run.folder).free - 2**16
    filler.write_bytes(bytes(room))
    reason = run.failed()
    assert re.search("can't be written: (No space left on device|.* where the disk is full)", reason), reason
    run.tell(reason)
    assert [content(state) for state in run.states()] == before
    filler.unlink()
    run.again(resumed=[10])


@several(cells("changed"))
def test_data_that_changes_under_a_run(run):
    (file,) = (run.results / "data" / paths.DATASET / "train").glob("*.arrow")
    whole = file.read_bytes()
    run.start()
    run.come_to_the_gate()
    with file.open("r+b") as stream:  # in place: the ranks see it
        stream.seek(len(whole) // 2)
        stream.write(bytes(64))
    reason = run.failed(within=60)
    assert f"{file.relative_to(run.place.folder)}: was changed or removed while the run trained on it" in reason
    run.tell(reason)
    assert run.states() == []  # made of what nobody knows, so the next run begins anew


@several(cells("vanished", ci=("single",)))
def test_data_that_vanishes_under_a_run(run):
    data = run.results / "data"
    run.start()
    run.come_to_the_gate()
    data.rename(data.with_name("away"))
    reason = run.failed(within=60)
    assert ": was changed or removed while the run trained on it" in reason
    run.tell(reason)
    refused = subprocess.run(run.command(), **options(run.place), capture_output=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {data.name}") or "does not exist. Run" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.fixture
def switched_off(run):
    """The run, all of it killed at once. Two tests of a row begin with what one such run left."""
    left = run.place.path(f"left-{run.row}")
    if not left.exists():
        run.start()
        run.come_to_the_gate()
        run.kill()
        for name in leaked(run.shared):  # horovodrun's semaphores: memory, which no machine keeps that is switched off
            Path("/dev/shm", name).unlink()
        run.leaves_nothing(temporary=False)
        run.gate.unlink()
        shutil.copytree(run.results, left)
    shutil.rmtree(run.results)
    shutil.copytree(left, run.results)
    return run


@several(cells("truncated", ci=("ddp",)))
def test_a_truncated_state_is_named_and_the_one_before_is_used(switched_off):
    run = switched_off
    last = run.states()[0]
    largest = max((file for file in last.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    said = run.again(resumed=[5])
    (warning,) = (line for line in said.splitlines() if line.startswith("warning: "))
    assert f"{largest.relative_to(run.place.folder)}: is missing or has changed since it was written" in warning
    run.tell(warning.removeprefix(f"warning: {run.row}: "), goes_on=True)


@several(cells("power"))
def test_a_machine_that_was_switched_off(switched_off):
    run = switched_off
    last, before = run.states()
    shutil.copytree(before, last.with_name(".step-00000015.tmp"))
    for file in [*last.rglob("*"), *run.folder.glob("*"), *last.with_name(".step-00000015.tmp").rglob("*")]:
        if file.is_file():
            os.truncate(file, 0)
    for name in (paths.RECORD, paths.FAILED, paths.RENDEZVOUS, f".{paths.RECORD}.1.tmp"):
        (run.folder / name).touch()
    for name in ("0.json", "0.error.json", "0.npz"):
        (run.folder / paths.RANKS / name).touch()
    (run.folder / paths.LOCK).write_text('{"pid": 1, "host": "another", "since": "yesterday"}')
    said = run.again(resumed=[5])
    (warning,) = (line for line in said.splitlines() if line.startswith("warning: "))
    assert "a saved state is damaged" in warning
    run.tell(warning.removeprefix(f"warning: {run.row}: "), goes_on=True)
    assert not [file.name for file in run.folder.rglob("*.tmp")]


def empty(folder: Path) -> None:
    """What a killed supervisor could not take away."""
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


@pytest.fixture
def occupied():
    """A port on which somebody listens."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


@several(cells("port", rows=tuple(row for row in ROWS if row not in MEET_WITHOUT_A_PORT), ci=("ddp",)))
def test_a_port_that_is_taken(run, occupied):
    """Before the launcher looks for one, which is no fault to the run."""
    run.start(f"--set=hardware.port={occupied}", fault={"after": None})
    code, _, said = run.end(within=60)
    assert (code, said) == (0, f"port {occupied} is in use; another is taken\n")
    run.is_right()
    run.tell(said.strip(), goes_on=True)


@several(cells("port_lost", rows=tuple(row for row in ROWS if row not in MEET_WITHOUT_A_PORT)))
def test_a_port_that_is_taken_at_the_last_moment(run, occupied):
    run.start(f"--set=hardware.timeout={TIMEOUT}", fault={"after": None, "port": occupied})
    if run.row == "accelerate":  # whose launcher looks again, and takes another
        code, _, said = run.end(within=60)
        assert code == 0, said
        run.is_right()
        run.tell("nothing", goes_on=True)
        return
    reason = run.failed(within=60)
    assert re.search("EADDRINUSE|[Aa]ddress already in use", reason), reason
    run.tell(reason)
    run.again(resumed=[])


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return faulted.clock(tmp_path_factory.mktemp("clock"))


@several(cells("clock"))
def test_a_clock_that_jumps(run, clock, tmp_path):
    """All that is timed is measured by the clock that nobody sets; dates may be wrong."""
    offset = tmp_path / "offset"
    offset.write_bytes(bytes(8))
    run.start(LD_PRELOAD=str(clock), LOCKSTEP_CLOCK=str(offset))
    run.come_to_the_gate()
    day = 24 * 60 * 60
    for seconds in (day, -day):
        with offset.open("r+b") as stream:
            stream.write(seconds.to_bytes(8, "little", signed=True))
        time.sleep(1)
    code, _, said = run.end(within=60)
    assert code == 0, said
    run.is_right(resumed=[])
    record = json.loads((run.folder / paths.RECORD).read_text())
    assert 0 < record["clock"]["train_seconds"] < record["wall_seconds"] < 200
    assert np.load(run.folder / paths.STEPS).min() > 0
    run.tell("nothing", goes_on=True)


@several(cells("second"))
def test_the_same_command_a_second_time(run):
    run.start()
    run.come_to_the_gate()
    before = {file: file.stat().st_ino for file in run.folder.rglob("*") if file.is_file()}
    began = time.monotonic()
    second = subprocess.run(run.command(), **options(run.place), capture_output=True, check=False)
    seconds = time.monotonic() - began
    assert seconds < SOON
    assert second.returncode == 2
    who = rf"process {run.process.pid} has worked here since \S+ \S+ Wait for it, or end it: kill {run.process.pid}"
    assert re.fullmatch(rf"error: {run.folder.relative_to(run.place.folder)}: {who}\n", second.stderr), second.stderr
    assert before == {file: file.stat().st_ino for file in run.folder.rglob("*") if file.is_file()}
    code, _, said = run.end(within=60)
    assert code == 0, said
    run.is_right(resumed=[])
    run.seconds = seconds
    run.tell(second.stderr.removeprefix("error: "))


NOTHING = ("nothing", "")
NOT_MET = "–"  # a row that has no port; "?" is one that was not tried yet


def table_of(page: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """What stands in the page's table: of each fault and row what was said, and after how long."""
    text = page.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    if not lines:
        return {}
    (_, _, *rows), _, *faults = lines
    keys = {title: key for key, title in FAULTS.items()}
    return {
        (keys[title], row): (said, cell)
        for title, said, *seconds in faults
        if title in keys
        for row, cell in zip(rows, seconds, strict=True)
    }


def write_down() -> None:
    """The table of docs/reliability.md, of what was tried now, and of what stood there of the rest."""
    known = table_of(PAGE) | told
    lines = []
    for fault, title in FAULTS.items():
        said = next((told[fault, row][0] for row in ROWS if told.get((fault, row), NOTHING)[0] != "nothing"), None)
        said = said or next((known[fault, row][0] for row in ROWS if (fault, row) in known), "")
        portless = MEET_WITHOUT_A_PORT if fault in ("port", "port_lost") else ()
        cells_of_it = [NOT_MET if row in portless else known.get((fault, row), ("", "?"))[1] for row in ROWS]
        lines.append([title, short(said), *cells_of_it])
    between_marks(PAGE, MARKS, markdown(["fault", "what the row says", *ROWS], lines))


def short(said: str) -> str:
    """Without what differs from run to run, or would end a cell."""
    said = re.sub(r"\S*/(?=[\w.-]+)", "", said.strip()).replace("|", "/")
    said = re.sub(r"process \d+|kill \d+", lambda match: match[0].split()[0] + " N", said)
    said = re.sub(r"\bport:? \d+", "port N", re.sub(r"\d{4}-\d\d-\d\d \S+", "…", said))
    return said if len(said) < 170 else said[:160] + " …"


def test_the_table_names_every_fault_and_every_default_row():
    default = schema.of_configuration()["properties"]["rows"]["default"]
    assert sorted(ROWS) == sorted(default)
    table = table_of(PAGE)
    assert {fault for fault, _ in table} == set(FAULTS)
    assert {row for _, row in table} == set(ROWS)
    assert all(said for said, _ in table.values())
    for (fault, row), (_, cell) in table.items():
        without_port = fault in ("port", "port_lost") and row in MEET_WITHOUT_A_PORT
        assert (cell == NOT_MET) == without_port, (fault, row)
