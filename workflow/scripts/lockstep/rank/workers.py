"""Worker processes of a rank, which put its batches together while it trains (`hardware.workers`), by PyTorch's loader.

They are forks of the rank, as no CUDA and no thread of a library (gloo's, Horovod's) goes on in a fork: so they begin
before the rank joins the others or takes a GPU. What they are to make they are told later, by `begin`, and again for
each training in this process. They end with the rank, however that ends.
"""

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import paths
from lockstep.config import registry
from lockstep.config.settings import Settings
from lockstep.errors import RunFailed
from lockstep.run import lifetime

ENDING = 1.0  # seconds that a worker which closed its connections may take to end
# A micro-batch to be made: by which function of a module (`Strategy.collate`), of which samples, and how wide.
Order = tuple[Callable, np.ndarray, int]


class Workers:
    """Those of one rank: `settings.hardware.workers` processes, which are there once this is made."""

    def __init__(self, settings: Settings):
        if torch.cuda.is_initialized():
            raise RunFailed("hardware.workers: CUDA has begun while a module was imported, and a fork can't use it")
        self.orders: list[Order] = []
        before = multiprocessing.active_children()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # that it is many, the run notes
            self.loader = DataLoader(
                Made(
                    registry.load_task(settings.task)(settings.train), paths.split_folder(Path(settings.data), "train")
                ),
                sampler=self.orders,
                batch_size=None,  # an order is of a whole batch
                num_workers=settings.hardware.workers,
                persistent_workers=True,
                collate_fn=_as_it_is,
                multiprocessing_context="fork",
                worker_init_fn=_begin,
                generator=torch.Generator(),  # else it draws from the one by which dropout is drawn
            )
            handler = signal.getsignal(signal.SIGCHLD)
            self.begin([])
        # PyTorch's would raise wherever this process is when a worker dies; `next` finds it, and says what it means.
        signal.signal(signal.SIGCHLD, handler)
        self.processes = [child for child in multiprocessing.active_children() if child not in before]

    @property
    def pids(self) -> list[int]:
        """The processes that are alive."""
        return [process.pid for process in self.processes if process.is_alive()]

    def begin(self, orders: Iterable[Order]) -> None:
        """Have these batches made, in this order; whatever was ordered before is forgotten."""
        self.orders[:] = orders
        self.made = iter(self.loader)

    def next(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The next batch that was ordered, when it is there: its samples, int64 [n], and what was made of them.

        Raises RunFailed where it could not be made.
        """
        try:
            ids, made = next(self.made)
        except StopIteration:
            raise RunFailed("more batches are asked for than its workers were told to make") from None
        except Exception as error:
            # One that is killed closes its connections before it is known to have ended.
            connection.wait([process.sentinel for process in self.processes], timeout=ENDING)
            if gone := [process for process in self.processes if not process.is_alive()]:
                by = f"by {signal.Signals(-gone[0].exitcode).name}" if gone[0].exitcode < 0 else "by itself"
                raise RunFailed(
                    f"worker process {gone[0].pid}, which puts this rank's batches together, ended {by}: was it killed,"
                    " or out of memory, or of room in /dev/shm? (hardware.workers)"
                ) from None
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RunFailed(f"a worker could not put a batch together: {lines[-1]}") from error
        return ids, {name: _array(value) for name, value in made.items()}

    def stop(self) -> None:
        """End the processes, and wait for that."""
        del self.made, self.loader


class Made(Dataset):
    """The batches of a split, made as they are ordered; it is read in the worker."""

    def __init__(self, task, split: Path):
        self.task, self.split, self.samples = task, split, None

    def __getitem__(self, order: Order) -> tuple[np.ndarray, dict]:
        make, ids, width = order
        if self.samples is None:
            self.samples = self.task.load(self.split)
        # Tensors, which come to the rank in memory that both have; arrays would be written and read.
        return ids, {name: _tensor(value) for name, value in make(self.samples, ids, width).items()}


def _tensor(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _array(value):
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _as_it_is(made):
    return made


def _begin(number: int) -> None:
    lifetime.die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # which a rank that saves its state does not hear
