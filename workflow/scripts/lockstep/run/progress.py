"""How a run's supervisor and its ranks communicate: the launch time, each rank's progress, and its results."""

import os
import time
import traceback
from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.errors import printable
from lockstep.files import atomic_file, write_json

# The first steps of a run, which do not count as steady: they set up allocators, thread pools and buckets.
WARMUP_STEPS = 3
# Environment variables: when the supervisor started the launcher (perf_counter, and the boot that it is of), and the
# number of its node.
LAUNCHED, NODE = "LOCKSTEP_LAUNCHED", "LOCKSTEP_NODE"
VIEW = "LOCKSTEP_VIEW_DRAWN"  # set if Snakemake shows a view (lockstep/view/), so that jobs print nothing besides it


class Progress:
    """Each rank's progress, in memory that it shares with the supervisor: ranks write numbers without a system call.

    int64 [ranks on this node, 5]: the process id; a count of anything done, which shows whether the rank hangs; the
    steps done; the step after which the rank is to save its state and end (0: never), which the rank reads; the rank.
    """

    def __init__(self, folder: Path, node: int = 0, ranks: int | None = None):
        path = paths.node_folder(folder, node) / paths.PROGRESS
        if ranks:
            np.zeros((ranks, 5), dtype=np.int64).tofile(path)
        self.table = np.memmap(path, dtype=np.int64, mode="r+").reshape(-1, 5)
        if ranks:
            self.table[:, 4] = node * ranks + np.arange(ranks)

    def begin(self, rank: int) -> None:
        """Record that this rank has begun. A node's ranks are consecutive, but c10d numbers nodes as they arrive."""
        self.counters = self.table[rank % len(self.table)]
        self.counters[4] = rank
        self.counters[0] = os.getpid()
        self.alive()

    def alive(self) -> None:
        self.counters[1] += 1

    def step(self) -> None:
        self.counters[1] += 1
        self.counters[2] += 1

    def reached(self, step: int) -> None:
        """Record that `step` steps were done before this process began."""
        self.counters[2] = step
        self.alive()

    @property
    def steps(self) -> int:
        return int(self.counters[2])

    @property
    def stop_after(self) -> int:
        return int(self.counters[3])


class RankFiles:
    """What one rank writes for the supervisor: ranks/<rank>.json and .npz at its end, or <rank>.error.json."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.node = int(os.environ.get(NODE, 0))
        self.replica, self.counts = rank, True  # until its strategy's `World` sets them
        self.ids: list[np.ndarray] = []
        self.id_steps: list[int] = []
        self.events: list[dict] = []
        self.gradient_norm: float | None = None  # that of the first step, in a trial of the proof

    def consume(self, step: int, ids: np.ndarray) -> None:
        """Record in the ledger that this rank trained the samples `ids` in `step`."""
        self.ids.append(ids)
        self.id_steps.append(step)

    def event(self, key: str, value=None) -> None:
        """One line of events.jsonl, in the spirit of MLPerf's log (github.com/mlcommons/logging)."""
        self.events.append({"time": time.time(), "key": key, "value": value, "rank": self.rank})

    def ledger(self) -> tuple[np.ndarray, np.ndarray]:
        """The step in which each sample was trained, and the sample's id: int64 [n] each."""
        steps = np.repeat(np.array(self.id_steps, dtype=np.int64), [len(ids) for ids in self.ids])
        return steps, np.concatenate([np.empty(0, dtype=np.int64), *self.ids])

    def take_over(self, steps: np.ndarray, ids: np.ndarray) -> None:
        """Add the ledger that a rank of the interrupted run had saved."""
        for step in np.unique(steps):
            self.consume(int(step), ids[steps == step])

    def write(self, summary: dict, step_seconds: np.ndarray) -> None:
        steps, ids = self.ledger()
        with atomic_file(paths.rank_arrays(self.folder, self.rank)) as temporary, temporary.open("wb") as stream:
            place = {"replica": self.replica, "counts": self.counts}
            np.savez(stream, step=steps, id=ids, seconds=step_seconds.astype(np.float32), **place)
        write_json(paths.rank_summary(self.folder, self.rank), summary | {"events": self.events})

    def write_error(self, error: BaseException, step: int) -> None:
        message = str(error).strip() or type(error).__name__
        write_json(
            paths.rank_error(self.folder, self.rank),
            {
                "time": time.time(),
                "at": time.perf_counter(),  # which error was first must not depend on a clock that may be set
                "rank": self.rank,
                "node": self.node,
                "step": step,
                "type": type(error).__name__,
                "message": printable(message.splitlines()[0][:300]),
                "traceback": "".join(traceback.format_exception(error)),
            },
        )
