"""Records that no run has made, for tests of what reads them."""

from lockstep.run.facts import of
from lockstep.run.record import Record, Tested

SOUND = {
    **{"row": "ddp", "strategy": "ddp", "division": "closed", "status": "ok", "reason": "", "world_size": 1},
    **{"repeat": 1, "precision": "fp32", "global_batch": 64, "started": "2026-01-01T00:00:00+00:00", "log": "run.log"},
    "asked": {},
    "settings": {},
    **{"steps": 100, "seeds": [7], "losses": [1.0], "dev": [], "command": ["python", "train.py"], "wall_seconds": 9.0},
    "clock": {"setup": {"imports": 3.0}, "first_step_seconds": 3.5, "train_seconds": 5.0, "stall_seconds": 0.0}
    | {"step_seconds_median": 0.05, "step_seconds_quartiles": [0.04, 0.06], "total_seconds": 8.5},
    "work": {"samples": 6400, "tokens": 0, "padded_tokens": 0, "flops": 0, "padded_flops": 0},
    "throughput": {"samples_per_second": 1280.0, "tokens_per_second": 0, "padded_tokens_per_second": 0}
    | {"flops_per_second": 0, "padded_flops_per_second": 0},
    "memory": {f"{kind}_mb{each}": None for kind in ("peak", "reserved", "proportional") for each in ("", "_per_rank")},
    "energy": {"gpu_joules": None, "cpu_joules": None},
    "watch": {"samples": 8, "others_cores": 0.0, "disturbed": []},
    "hashes": {"data": 64 * "d", "plan": 64 * "a", "weights": 64 * "f"},
}
PARTS = ("clock", "work", "throughput", "memory", "energy", "watch", "hashes")


def raw(**given) -> dict:
    """The content of a sound record.json, with these fields, or fields of a part, in place of its own."""
    parts = {name: SOUND[name] | given[name] for name in PARTS if name in given}
    return SOUND | given | parts


def run(**given) -> Tested:
    """A sound run as the report has it, with these fields in place of its own."""
    return of(Tested, raw(**given))


def record(**given) -> Record:
    """The same, as a run leaves it."""
    return of(Record, raw(**given))
