"""The sections of the configuration, as frozen dataclasses: one field for each key, as the schema describes it."""

import re
from dataclasses import dataclass

OWN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
EPS = 1e-8  # of Adam and AdamW
LAST_RATE = 1e-7  # of the learning rate, where a polynomial schedule ends, as transformers has it


@dataclass(frozen=True)
class Data:
    path: str | None
    url: str | None
    sha256: str | None
    mirrors: list[str]
    files: dict[str, str]
    hub: str | None
    revision: str | None
    subset: str | None
    split: str
    format: str
    text: str | int
    prompt: str | int | None
    completion: str | int | None
    image: str
    image_size: int | None
    mean: list[float] | None
    std: list[float] | None
    label: str | int
    labels: list[str] | None
    limit: int | None
    join_blanks: bool | str
    splits: dict[str, float]
    seed: int
    max_length: int

    @property
    def embedded(self) -> bool:
        """Whether no data is named, so that the task takes what comes with it."""
        return not (self.path or self.url or self.files or self.hub)


@dataclass(frozen=True)
class Model:
    name: str
    revision: str | None
    hidden_size: int
    layers: int
    heads: int
    dropout: float | None

    @property
    def file(self) -> str | None:
        """The file of a model of one's own, whose name is that file's and a class's, as in my_model.py:MyModel."""
        match = OWN.fullmatch(self.name)
        return match["file"] if match else None


@dataclass(frozen=True)
class Train:
    epochs: int
    max_steps: int | None
    global_batch: int | None  # in a row, and in its table, always a number: with device_batch what that comes to
    device_batch: int | None
    accumulation: int
    batching: str
    optimizer: str
    betas: list[float]
    momentum: float
    nesterov: bool
    learning_rate: float
    weight_decay: float
    schedule: str
    power: float
    step_epochs: int
    constant_epochs: int
    gamma: float
    warmup: float
    warmup_start: float
    clip: float
    lora: int  # the rank of the updates; 0: all weights are trained
    lora_alpha: float | None
    lora_targets: list[str] | None
    lora_dropout: float
    class_weights: list[float] | str | None
    label_smoothing: float
    loss_weights: dict[str, float] | None
    pos_weight: float | str | None
    hard_share: float
    precision: str
    attention: str
    eval_every: int
    eval_samples: int | None
    checkpoint: str
    best: str
    checkpoint_every: int
    snapshot_every: int
    keep: int
    log_every: int
    log_to: list[str]
    pictures_every: int
    seed: int

    def factors(self, terms: tuple[str, ...]) -> list[float]:
        """What each term counts in a loss that is their sum, by `loss_weights`."""
        return [(self.loss_weights or {}).get(name, 1.0) for name in terms]

    @property
    def plan_name(self) -> str:
        """Names the plan by all of this that shapes it."""
        cut = f"-max{self.max_steps}" if self.max_steps else ""
        return f"{self.batching}-b{self.global_batch}-e{self.epochs}{cut}-s{self.seed}"


@dataclass(frozen=True)
class AskedHardware:
    device: str
    processes: int | str
    gpus: list[int] | None
    mixed_gpus: bool
    threads: int | str
    workers: int
    pin_memory: bool | str
    nodes: int
    node_cores: int | None
    node_gpus: int | None
    hosts: list[str] | str | None
    endpoint: str | None
    interface: str | None
    backend: str
    port: int | str
    timeout: float
    oversubscribe: bool


@dataclass(frozen=True)
class Predict:
    label: str | None
    count: int
    texts: list[str]
    file: str | None
    seed: int


@dataclass(frozen=True)
class Profile:
    steps: int
    trace: bool


@dataclass(frozen=True)
class Tune:
    seconds: float
    steps: int


@dataclass(frozen=True)
class Shared:
    """What rows share: the task; and what they override: the configuration's own `train` and `hardware` sections."""

    task: str
    train: Train
    hardware: AskedHardware
