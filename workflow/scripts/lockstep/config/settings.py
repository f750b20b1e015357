"""The settings of one run: its row, resolved on this machine, and the places of its data and plan."""

from dataclasses import asdict, dataclass, field, replace

from lockstep.config import registry
from lockstep.config.hardware import Hardware
from lockstep.config.keys import NOTHING, names
from lockstep.config.kinds import Kind
from lockstep.config.nested import without
from lockstep.config.sections import AskedHardware, Profile, Train

# Keys that change neither what a run trains nor what it measures, by section.
DECIDE_NOTHING = {"train": names(Train, NOTHING), "hardware": names(AskedHardware, NOTHING)}


def deciding(settings: dict) -> dict:
    """The nested settings without those that do not decide a run's result."""
    return without(settings, DECIDE_NOTHING)


def in_one(options: dict, train: Train, hardware: Hardware, precision: str, task: str) -> dict:
    """All settings of a row in one dict, with which the literals of its strategy are compared (registry.matches)."""
    return options | asdict(train) | asdict(hardware) | {"precision": precision, "task": task}


@dataclass(frozen=True)
class Settings:
    """The content of a run's settings.json, written by run/runs.py and read by each rank (rank/session.py)."""

    row: str
    task: str
    strategy: str
    options: dict  # of the strategy
    division: str
    precision: str  # with amp resolved
    plan: str
    train: Train
    hardware: Hardware
    # For a trial: variations in which the same processes train the same steps again, by name, with changed settings.
    variations: dict[str, dict] = field(default_factory=dict)
    kind: Kind = Kind.TIMED
    # The following belong to a run rather than to its row:
    data: str = ""  # the folder of prepared data
    plan_file: str = ""
    dropout: float | None = None  # for every dropout layer; None keeps the model's own
    profile: Profile | None = None
    config_hash: str = ""
    order: str = ""  # of the samples in a batch: empty for the plan's, or "reversed", or "rotated" by half
    saved: str = ""  # the folder of the state that it resumes from; empty: it starts at the first step
    warm: bool = True  # whether one batch of each shape is computed before the timed window
    # Factors that only variations of a trial change: of the initial weights, and of the loss, whose gradient is then
    # divided by it.
    weights_times: float = 1
    loss_times: float = 1
    steps: int = 0  # the number of the plan's steps that are trained; 0: all. Only a variation of a trial has fewer

    @classmethod
    def from_json(cls, raw: dict) -> "Settings":
        """Settings from the output of `asdict`."""
        sections = {"train": Train.of(raw["train"]), "hardware": Hardware(**raw["hardware"])}
        return cls(**raw | sections | {"profile": Profile(**raw["profile"]), "kind": Kind(raw.get("kind", Kind.TIMED))})

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks that hold one replica of the model together, and see the same samples."""
        return registry.ranks_per_replica(self.strategy, self.options)

    def of_row(self) -> dict:
        """The settings that the row decides, as plain JSON values, without those of a single run."""
        keys = ("row", "task", "strategy", "options", "division", "precision", "plan", "train", "hardware")
        whole = asdict(self)
        return {key: whole[key] for key in keys + (("variations",) if self.variations else ())}

    def varied(self, changes: dict) -> "Settings":
        """A copy with these fields changed; `train` may contain a part of its keys."""
        train = replace(self.train, **changes.get("train", {}))
        return replace(self, **changes | {"train": train})
