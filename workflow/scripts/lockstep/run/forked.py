"""Ranks that are forks of this process, which has imported what they need: for runs of which nothing is timed.

Twenty trials then cost one import, of some seconds, and not twenty. Nothing of CUDA may have begun in this process, nor
any thread of PyTorch's, as neither goes on in a fork.
"""

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.config import registry
from lockstep.config.row import Row
from lockstep.run import lifetime
from lockstep.run.coordination import Rendezvous
from lockstep.run.processes import die_with_parent

# How a row's processes may be started, so that a fork with the variables that torchrun sets does as well.
LAUNCHERS = ("python", "torchrun", "launch", "accelerate", "deepspeed")
NOT_BEFORE = ("deepspeed", "horovod")  # what chooses its device while it is imported
MODELS = ("bert", "llama")  # transformers' modules of the models from scratch


def preload(rows: list[Row]) -> None:
    """Import what the ranks of `rows` will need; with one thread, so that none is lost in a fork."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else to ask for GPUs begins CUDA
    torch.set_num_threads(1)
    for name in MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    importlib.import_module("lockstep.rank.main")
    for strategy in {row.strategy for row in rows}:
        if not any(need.package in NOT_BEFORE for need in registry.needs(strategy)) and not unavailable(rows, strategy):
            registry.load(strategy)


def reaches_gpus() -> bool:
    """Whether a fork of this process can use a GPU, which it can't where an import has begun CUDA."""
    return Fork(lambda: torch.zeros(1, device="cuda").item(), dict(os.environ)).wait() == 0


def unavailable(rows: list[Row], strategy: str) -> bool:
    return all(row.unavailable for row in rows if row.strategy == strategy)


def possible(row: Row) -> bool:
    """Whether the ranks of a row can be forked: by its launcher, and because nothing of CUDA has begun here."""
    by_launcher = row.options.get("launcher", "python") in LAUNCHERS
    return by_launcher and "horovod" not in row.strategy and not torch.cuda.is_initialized() and row.hardware.nodes == 1


def ranks(row: Row, folder: Path, rendezvous: Rendezvous) -> Callable[[], None]:
    """What starts all ranks of a row that trains in `folder`, waits for them, and exits with the code of the worst."""
    from lockstep.rank import main

    count = row.hardware.processes

    def start() -> None:
        began = []
        for rank in range(count):
            variables = dict(os.environ)
            if row.options.get("launcher", "python") != "python":
                variables |= {
                    **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                    **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                    **{"GROUP_RANK": "0", "MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)},
                    "TORCHELASTIC_RUN_ID": "none",  # by which frameworks know torchrun
                }
            began.append(Fork(lambda: main.main(folder), variables))
        sys.exit(max(fork.wait() for fork in began))

    return start


class Fork:
    """What subprocess.Popen is of a command, of a function that a fork of this process calls; `pid`, `returncode`."""

    def __init__(self, function: Callable[[], None], variables: dict[str, str], log=None, new_session: bool = False):
        sys.stdout.flush(), sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _call(function, variables, log, new_session)

    def poll(self) -> int | None:
        self._wait(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        self._wait(0)
        return self.returncode

    def _wait(self, options: int) -> None:
        if self.returncode is not None:
            return
        with contextlib.suppress(ChildProcessError):  # somebody else has collected it
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            return
        self.returncode = 1


def _call(function: Callable[[], None], variables: dict[str, str], log, new_session: bool) -> None:
    """In the fork: become a process of its own, call, and end."""
    code = 1
    try:
        die_with_parent()
        if new_session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        lifetime.let_go()
        if log is not None:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(variables)
        function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
