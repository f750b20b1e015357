"""A run's processes: all of them end with it, however it ends, and the reason is the right one.

Small programs stand for the ranks here, so that dying and hanging take no PyTorch;
test_failures.py does it with real ones.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from lockstep.paths import PROJECT, SCRIPTS
from lockstep.run import processes

# A rank that reports progress, then does what the test says; it leaves a grandchild in a session of its own.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from lockstep.run.progress import Progress
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
progress = Progress(folder)
progress.begin(rank)
grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
for _ in range(3):
    progress.step()
{then}
"""
# What torchrun does with two ranks: sessions of their own, and an end when one of them ends badly.
LAUNCHER = """
import subprocess, sys, time
program, folder = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, program, folder, rank], start_new_session=True) for rank in "01"]
while all(rank.poll() is None for rank in ranks):
    time.sleep(0.05)
sys.exit(max(abs(rank.wait()) for rank in ranks if rank.poll() is not None))
"""


def supervise(tmp_path: Path, then: str, timeout: float = 60) -> processes.Outcome:
    folder = tmp_path / "row" / "n2" / "rep1"
    (folder / "ranks").mkdir(parents=True)
    (tmp_path / "rank.py").write_text(RANK.format(then=textwrap.dedent(then)))
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "rank.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with (folder / "run.log").open("w") as log:
        run = processes.Supervised(folder, ranks=2, steps=10, timeout=timeout)
        return processes.supervise(run, command, environment, log)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    deadline = time.monotonic() + 2
    while psutil.Process().children(recursive=True) and time.monotonic() < deadline:
        processes.reap_orphans()  # supervise makes this process the one that orphans fall to
        time.sleep(0.05)
    assert psutil.Process().children(recursive=True) == []


def test_a_good_end_has_no_reason(tmp_path):
    outcome = supervise(tmp_path, "(folder / 'ranks' / f'{rank}.json').write_text('{}')")
    assert (outcome.exit_code, outcome.reason) == (0, "")


def test_a_killed_rank_is_named(tmp_path):
    outcome = supervise(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    assert outcome.reason == "rank 1 died after step 3 of 10 without an error message; killed, or out of memory?"
    assert outcome.seconds < 10


@pytest.mark.parametrize(
    ("how", "state"), [("time.sleep(600)", ""), ("os.kill(os.getpid(), signal.SIGSTOP)", " (stopped)")]
)
def test_a_rank_that_hangs_ends_the_run(tmp_path, how, state):
    outcome = supervise(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{how}", timeout=1)
    assert "no progress for 1 s" in outcome.reason
    assert f"rank 0{state} after step 3, rank 1{state} after step 3 of 10" in outcome.reason
    assert outcome.seconds < 10


@pytest.mark.parametrize("last", [0, 1])
def test_a_launcher_that_goes_on_after_a_rank_has_failed_is_not_waited_for(tmp_path, last):
    """As where SIGTERM does not end a rank that waits for the others in C++: torchrun then waits for 30 seconds."""
    fails = f"if rank == {last}: (folder / 'ranks' / f'{{rank}}.error.json').write_text('{{}}')"
    outcome = supervise(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{fails}\ntime.sleep(600)")
    assert outcome.reason == ""  # the rank has said it
    assert outcome.seconds < 5 + 3 + 7


def test_a_launcher_that_fails_at_once(tmp_path):
    outcome = supervise(tmp_path, "sys.exit(3)")
    assert outcome.exit_code == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ending_the_supervisor_ends_everything(tmp_path, number):
    """Also by SIGKILL, which it can't see: each process asks the kernel to go when its parent goes."""
    program = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from tests.run.test_processes import supervise
then = "from lockstep.run.processes import die_with_parent; die_with_parent(); (folder / f'ready{{rank}}').touch()"
supervise(Path({str(tmp_path)!r}), f"{{then}}; time.sleep(600)")
"""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    supervisor = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    ranks = wait_for(
        lambda: [child for child in descendants(supervisor.pid) if "rank.py" in " ".join(child.cmdline())], 2
    )
    wait_for(lambda: list(tmp_path.rglob("ready?")), 2, seconds=60)
    supervisor.send_signal(number)
    supervisor.wait(timeout=20)
    assert wait_for(lambda: [rank for rank in ranks if not rank.is_running() or rank.status() == "zombie"], 2)
    for sleeper in psutil.process_iter(["cmdline", "cwd"]):  # grandchildren, whom no death signal reaches
        if (sleeper.info["cmdline"], sleeper.info["cwd"]) == (["sleep", "600"], str(Path.cwd())):
            assert number == signal.SIGKILL
            sleeper.kill()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for(find, count: int, seconds: float = 20) -> list:
    deadline = time.monotonic() + seconds
    while len(matches := find()) < count:
        assert time.monotonic() < deadline, f"only {matches} of {count} after {seconds} s"
        time.sleep(0.05)
    return matches


INTERRUPTED_FORK = """
import os, signal, sys
from pathlib import Path
from lockstep.run import processes
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
folder = Path(sys.argv[1])
try:
    with (folder / "run.log").open("w") as log:
        run = processes.Supervised(folder, ranks=1, steps=10, timeout=60)
        processes.supervise(run, ["sleep", "600"], dict(os.environ), log)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_in_the_midst_of_a_fork_is_not_lost(tmp_path):
    folder = tmp_path / "row" / "n1" / "rep1"
    (folder / "ranks").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_FORK, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        check=False,
    )
    assert done.stdout == "interrupted\n", done.stderr


def test_a_process_that_the_kernel_does_not_end_is_named_and_not_waited_for():
    """It waits for a GPU's driver, or for a file system that is gone; here its signals are withheld from it."""
    program = """
    import subprocess, sys
    from lockstep.errors import RunFailed
    from lockstep.run import processes
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    processes._signal = lambda *_: None
    processes.lifetime.GRACE_SECONDS = processes.KILLED_SECONDS = 0.1
    try:
        processes.end_descendants()
    except RunFailed as error:
        print(str(child.pid) in str(error), error)
    finally:
        child.kill()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, timeout=50, check=True
    )
    assert ended.stdout.startswith("True processes of the run can't be ended: ")
