"""How one run trains: what its row comes to on this machine, and where its data and plan lie."""

from dataclasses import asdict, dataclass, field, replace

from lockstep.config import registry
from lockstep.config.hardware import Hardware
from lockstep.config.keys import NOTHING, names
from lockstep.config.kinds import Kind
from lockstep.config.nested import without
from lockstep.config.sections import AskedHardware, Profile, Train

# Keys that change nothing of what a run measures or trains, by their section.
DECIDE_NOTHING = {"train": names(Train, NOTHING), "hardware": names(AskedHardware, NOTHING)}


def deciding(settings: dict) -> dict:
    """Those of nested settings that decide what a run comes to."""
    return without(settings, DECIDE_NOTHING)


@dataclass(frozen=True)
class Settings:
    """What a run's settings.json holds: written by run/runs.py, and read by each rank (rank/session.py)."""

    row: str
    task: str
    strategy: str
    options: dict  # of the strategy
    division: str
    precision: str  # one that a strategy trains in: amp is resolved
    plan: str
    train: Train
    hardware: Hardware
    # Of a trial: how the same processes train the same steps again, by name: what changes then.
    variations: dict[str, dict] = field(default_factory=dict)
    kind: Kind = Kind.TIMED
    # Of a run, not of a row:
    data: str = ""  # the folder of prepared data
    plan_file: str = ""
    dropout: float | None = None  # for every dropout layer; None leaves them as the model has them
    profile: Profile | None = None
    config_hash: str = ""
    order: str = ""  # in which a batch's samples are trained: as planned, reversed, or rotated by half of them
    saved: str = ""  # the folder of the state that it goes on from; empty: it starts at the first step
    warm: bool = True  # whether one batch of each shape is computed before the timed window
    # Factors that only a trial's variations change: for the initial weights, and for the loss, by which the gradient is
    # divided again.
    weights_times: float = 1
    loss_times: float = 1

    @classmethod
    def from_json(cls, raw: dict) -> "Settings":
        """The settings that `asdict` wrote."""
        sections = {"train": Train(**raw["train"]), "hardware": Hardware(**raw["hardware"])}
        return cls(**raw | sections | {"profile": Profile(**raw["profile"]), "kind": Kind(raw.get("kind", Kind.TIMED))})

    @property
    def ranks_per_replica(self) -> int:
        """How many ranks hold one replica of the model together, and see the same samples."""
        return registry.ranks_per_replica(self.strategy, self.options)

    def of_row(self) -> dict:
        """The settings that the row decides, as plain JSON values; the others are those of one run."""
        keys = ("row", "task", "strategy", "options", "division", "precision", "plan", "train", "hardware")
        whole = asdict(self)
        return {key: whole[key] for key in keys + (("variations",) if self.variations else ())}

    def varied(self, changes: dict) -> "Settings":
        """With these fields changed; of `train`, only the keys that are given."""
        train = replace(self.train, **changes.get("train", {}))
        return replace(self, **changes | {"train": train})
