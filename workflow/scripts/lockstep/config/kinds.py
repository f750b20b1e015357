"""The kinds of runs: timed runs, trials of the proof, profiles, and tries in the search for the fastest recipe."""

from enum import StrEnum

from lockstep import paths


class Kind(StrEnum):
    """The value of a kind is its folder in the results, and its name in a run's settings.json."""

    TIMED = paths.RUNS, {"measured": True}
    TRIAL = paths.PARITY, {"dropout": False, "forgives": False, "compared": True}
    PROFILE = paths.PROFILED, {"profiled": True}
    TRY = paths.TUNE, {}

    measured: bool  # trains all of its row, is repeated if it was disturbed, and is noted in the journal
    dropout: bool  # has the model's dropout; otherwise none
    forgives: bool  # accepts a ledger with each sample once per rank, if an option of the row leads to it
    compared: bool  # has losses, first gradient and weights compared, so its loss scale must not skip a step
    profiled: bool  # has each step divided into phases by a profiler

    def __new__(cls, folder: str, rules: dict[str, bool]):
        kind = str.__new__(cls, folder)
        kind._value_ = folder
        usual = {"measured": False, "dropout": True, "forgives": True, "compared": False, "profiled": False}
        for rule, holds in (usual | rules).items():
            setattr(kind, rule, holds)
        return kind
