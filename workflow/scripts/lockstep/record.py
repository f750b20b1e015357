"""What a run leaves behind: its progress while it runs, each rank's files, and the ledger and events made of them."""

import json
import os
import time
import traceback
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from jsonschema import Draft202012Validator

from lockstep.errors import BadInput, OtherWork
from lockstep.files import atomic_file, read_json, write_json, write_text
from lockstep.plan import Plan

SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "record.schema.yaml"
STEPS = "steps.npy"  # float32 [ranks, steps], seconds of each step by each rank's clock
UNTESTED = "untested.json"  # why a run that trained could not be converted and tested
WEIGHTS = "weights.safetensors"  # what a trial for the proof, or a variation of it, ended with


class Progress:
    """How far each rank is, in memory that the launcher shares: a rank writes a number, and no system call is made.

    int64 [world size, 3]: process id, things done of any kind (so that standing still shows), steps done.
    """

    def __init__(self, folder: Path, world_size: int | None = None):
        path = folder / "progress"
        if world_size:
            np.zeros((world_size, 3), dtype=np.int64).tofile(path)
        self.table = np.memmap(path, dtype=np.int64, mode="r+").reshape(-1, 3)

    def begin(self, rank: int) -> None:
        self.row = self.table[rank]
        self.row[0] = os.getpid()
        self.alive()

    def alive(self) -> None:
        self.row[1] += 1

    def step(self) -> None:
        self.row[1] += 1
        self.row[2] += 1


class RankFiles:
    """What one rank writes for the launcher: ranks/<rank>.json and .npz at the end, or <rank>.error.json."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder / "ranks", rank
        self.ids: list[np.ndarray] = []
        self.id_steps: list[int] = []
        self.events: list[dict] = []
        self.gradient_norm: float | None = None  # of the first step, in a trial for the proof

    def consume(self, step: int, ids: np.ndarray) -> None:
        """Note that this rank trained samples `ids` in `step`: its ledger."""
        self.ids.append(ids)
        self.id_steps.append(step)

    def event(self, key: str, value=None) -> None:
        """One line of events.jsonl, in the spirit of MLPerf's log (github.com/mlcommons/logging)."""
        self.events.append({"time": time.time(), "key": key, "value": value, "rank": self.rank})

    def write(self, summary: dict, step_seconds: np.ndarray) -> None:
        steps = np.repeat(np.array(self.id_steps, dtype=np.int64), [len(ids) for ids in self.ids])
        ids = np.concatenate([np.empty(0, dtype=np.int64), *self.ids])
        with atomic_file(self.folder / f"{self.rank}.npz") as temporary, temporary.open("wb") as stream:
            np.savez(stream, step=steps, id=ids, seconds=step_seconds.astype(np.float32))
        write_json(self.folder / f"{self.rank}.json", summary | {"events": self.events})

    def write_error(self, error: BaseException, step: int) -> None:
        message = str(error).strip() or type(error).__name__
        write_json(
            self.folder / f"{self.rank}.error.json",
            {
                "time": time.time(),
                "rank": self.rank,
                "step": step,
                "type": type(error).__name__,
                "message": message.splitlines()[0][:300],
                "traceback": "".join(traceback.format_exception(error)),
            },
        )


def read_ranks(folder: Path, world_size: int) -> list[dict]:
    return [read_json(folder / "ranks" / f"{rank}.json") for rank in range(world_size)]


def read_errors(folder: Path) -> list[dict]:
    """What ranks said when they failed, the first one first."""
    return sorted(
        (read_json(file) for file in (folder / "ranks").glob("*.error.json")), key=lambda error: error["time"]
    )


def gather_ledger(folder: Path, world_size: int) -> dict[str, np.ndarray]:
    """The ledgers of all ranks as three columns of equal length: rank, step, id; in order of step, then rank."""
    columns = {"rank": [], "step": [], "id": []}
    for rank in range(world_size):
        with np.load(folder / "ranks" / f"{rank}.npz", allow_pickle=False) as arrays:
            columns["rank"].append(np.full(len(arrays["id"]), rank, dtype=np.int64))
            columns["step"].append(arrays["step"])
            columns["id"].append(arrays["id"])
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.lexsort((joined["rank"], joined["step"]))
    return {name: column[order] for name, column in joined.items()}


def gather_steps(folder: Path, world_size: int) -> np.ndarray:
    """The seconds that each step took each rank, float32 [ranks, steps]."""
    seconds = []
    for rank in range(world_size):
        with np.load(folder / "ranks" / f"{rank}.npz", allow_pickle=False) as arrays:
            seconds.append(arrays["seconds"])
    return np.stack(seconds)


def check_ledger(ledger: dict[str, np.ndarray], plan: Plan) -> None:
    """Raises OtherWork at the first step in which the ranks did not train each of the plan's samples once, no other."""
    bounds = np.searchsorted(ledger["step"], np.arange(plan.steps + 1))
    if bounds[-1] != len(ledger["step"]):
        raise OtherWork(f"the ledger has steps beyond the plan's {plan.steps}")
    for step in range(plan.steps):
        consumed = ledger["id"][bounds[step] : bounds[step + 1]]
        planned = plan.step_ids(step)
        if not np.array_equal(np.sort(consumed), np.sort(planned)):
            missing = np.setdiff1d(planned, consumed)
            extra = len(consumed) - len(planned) + len(missing)
            raise OtherWork(
                f"the ledger differs from the plan in step {step + 1}: {len(missing)} of {len(planned)} samples were"
                f" not trained, {extra} were trained that should not have been, or more than once"
            )


def write_ledger(path: Path, ledger: dict[str, np.ndarray]) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **ledger)


def write_steps(path: Path, seconds: np.ndarray) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, seconds)


def write_events(path: Path, ranks: list[dict]) -> None:
    events = sorted((event for rank in ranks for event in rank["events"]), key=lambda event: event["time"])
    write_text(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events))


def read_run(folder: Path) -> dict | None:
    """The record of the run in `folder`: of the last attempt, whether it succeeded or failed; None if there is none.

    Raises BadInput where it is no valid one.
    """
    for name in ("record.json", "failed.json"):
        if (folder / name).is_file():
            found = read_json(folder / name)
            if problems := invalid(found):
                raise BadInput(
                    f"{folder / name}: is no valid record: {problems[0]}. Remove it, and train the row again."
                )
            return found
    return None


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8")))


def invalid(found: dict) -> list[str]:
    """What is wrong with a run's record, by its schema."""
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(found)]


def write_run(path: Path, found: dict) -> None:
    _validator().validate(found)
    write_json(path, found)
