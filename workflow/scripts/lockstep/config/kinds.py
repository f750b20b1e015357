"""The kinds of runs: timed ones, the proof's trials, profiles, and tries of the search for the fastest recipe."""

from enum import StrEnum

from lockstep import paths


class Kind(StrEnum):
    """A kind's value is its folder of results, and its name in a run's settings.json."""

    TIMED = paths.RUNS, {"measured": True}
    TRIAL = paths.PARITY, {"dropout": False, "forgives": False, "compared": True}
    PROFILE = paths.PROFILED, {"taken_apart": True}
    TRY = paths.TUNE, {}

    measured: bool  # trains all that its row asks for, is repeated where it was disturbed, and is noted in the journal
    dropout: bool  # as the model has it; else none
    forgives: bool  # a ledger in which each sample stands once for every rank, where the row's option says so
    compared: bool  # by its losses, first gradient and weights, so that a loss scale must not make it skip a step
    taken_apart: bool  # each step into what its time went to, by a profiler beside the clock

    def __new__(cls, folder: str, rules: dict[str, bool]):
        kind = str.__new__(cls, folder)
        kind._value_ = folder
        usual = {"measured": False, "dropout": True, "forgives": True, "compared": False, "taken_apart": False}
        for rule, holds in (usual | rules).items():
            setattr(kind, rule, holds)
        return kind
