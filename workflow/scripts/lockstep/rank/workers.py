"""Worker processes of a rank, which make its batches while it trains (`hardware.workers`), by PyTorch's DataLoader.

They are forks of the rank. Neither CUDA nor a library's threads (gloo's, Horovod's) work in a fork, so workers start
before the rank joins the others or uses a GPU. `begin` tells them later which batches to make, once for each training
in this process. They end with the rank, however that ends.
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

# Seconds to wait for the end of a worker after an error: one that it may have survived, or a closed connection, which
# none survives.
ENDING, CLOSED = 1.0, 30.0
# A micro-batch to make: the function of a module that makes it (`Strategy.collate`), its samples, and its width.
Order = tuple[Callable, np.ndarray, int]


class Workers:
    """The workers of one rank: `settings.hardware.workers` processes, which are running after construction."""

    def __init__(self, settings: Settings):
        if torch.cuda.is_initialized():
            raise RunFailed("hardware.workers: importing a module has initialised CUDA, which a fork can't use")
        self.orders: list[Order] = []
        before = multiprocessing.active_children()
        with warnings.catch_warnings():
            # The run itself notes it if there are more workers than cores.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self.loader = DataLoader(
                Made(
                    registry.load_task(settings.task)(settings.train), paths.split_folder(Path(settings.data), "train")
                ),
                sampler=self.orders,
                batch_size=None,  # one order is one batch
                num_workers=settings.hardware.workers,
                persistent_workers=True,
                collate_fn=_as_it_is,
                multiprocessing_context="fork",
                worker_init_fn=_begin,
                generator=torch.Generator(),  # otherwise it would draw from dropout's generator
            )
            handler = signal.getsignal(signal.SIGCHLD)
            self.begin([])
        # PyTorch's handler raises at any point of this process when a worker dies; `next` notices that and explains it.
        signal.signal(signal.SIGCHLD, handler)
        self.processes = [child for child in multiprocessing.active_children() if child not in before]

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that are alive."""
        return [process.pid for process in self.processes if process.is_alive()]

    def begin(self, orders: Iterable[Order]) -> None:
        """Have these batches made, in this order; earlier orders are dropped."""
        self.orders[:] = orders
        self.made = iter(self.loader)

    def next(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Wait for the next ordered batch: its samples, int64 [n], and its arrays by name.

        Raises RunFailed if it could not be made.
        """
        try:
            ids, made = next(self.made)
        except StopIteration:
            raise RunFailed("more batches were requested than the workers were told to make") from None
        except Exception as error:
            # A worker that is killed closes its connections before its end can be observed.
            closed = isinstance(error, (ConnectionError, EOFError))
            connection.wait([process.sentinel for process in self.processes], timeout=CLOSED if closed else ENDING)
            if gone := [process for process in self.processes if not process.is_alive()]:
                by = f"by {signal.Signals(-gone[0].exitcode).name}" if gone[0].exitcode < 0 else "by itself"
                raise RunFailed(
                    f"worker process {gone[0].pid}, which makes this rank's batches, ended {by}: was it killed, or did"
                    " memory or /dev/shm run out? (hardware.workers)"
                ) from None
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RunFailed(f"a worker could not make a batch: {lines[-1]}") from error
        return ids, {name: _array(value) for name, value in made.items()}

    def stop(self) -> None:
        """End the processes, and wait until they have ended."""
        del self.made, self.loader


class Made(Dataset):
    """The batches of a split, made in the worker as they are ordered; the worker also reads the split."""

    def __init__(self, task, split: Path):
        self.task, self.split, self.samples = task, split, None

    def __getitem__(self, order: Order) -> tuple[np.ndarray, dict]:
        make, ids, width = order
        if self.samples is None:
            self.samples = self.task.load(self.split)
        # As tensors, which reach the rank by shared memory; arrays would be sent through a pipe.
        return ids, {name: _tensor(value) for name, value in make(self.samples, ids, width).items()}


def _tensor(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _array(value):
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _as_it_is(made):
    return made


def _begin(number: int) -> None:
    lifetime.die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # it is blocked in a rank that saves its state
