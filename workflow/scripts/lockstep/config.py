"""The configuration: read, merged, checked against its schema, and turned into frozen dataclasses.

Needs neither torch nor a framework: the Snakefile imports it.
"""

import importlib.metadata
import json
import os
import random
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path

import yaml

from lockstep import commands, schema, strategies
from lockstep.errors import BadInput
from lockstep.files import hash_text
from lockstep.hardware import Hardware, cpu_cores, resolve

SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "config.schema.yaml"
# Rules of the Snakefile: a row's name is a target too (`snakemake ddp`), so it can't be one of these.
RESERVED = (
    "all",
    "prepare",
    "plan",
    "peak",
    "decide",
    "evaluate",
    "predict",
    "report",
    "parity",
    "reference",
    "profile",
    "tune",
)
RESERVED_PREFIXES = ("train_", "parity_", "prove_", "profile_", "reference_")
# The proof's trials. An odd batch, so that the shares of two ranks differ, as do those of three and of four.
TRIAL_STEPS, TRIAL_BATCH, TRIAL_RATE, TRIAL_PROCESSES = 12, 31, 5e-4, 4
EXACT = 1e-9  # how far apart any two may be that compute the same in float64
# The reference, trained again as every trial of a row may be: its sums in another order, as shares of two and of three
# ranks make them.
OTHER_ORDERS = {"in_2_parts": {"train": {"accumulation": 2}}, "in_3_parts": {"train": {"accumulation": 3}}}
# And as no trial may be: with the mildest of the mistakes that tests/test_parity.py makes, and one as mild.
MISTAKES = {
    "weights .1 % larger": {"weights_times": 1.001},
    "learning rate 5 % higher": {"train": {"learning_rate": 1.05 * TRIAL_RATE}},
}
# What decides, besides strategy and precision, which model a row ends with.
RECIPE = ("epochs", "max_steps", "global_batch", "batching", "learning_rate", "weight_decay", "schedule", "warmup")
RECIPE += ("clip", "seed")
# With `repeats: auto`: the blocks that hold every row, how many there may be, and the width of an interval (its upper
# end over its lower one, less 1) at which they end (lockstep/blocks.py).
FIRST_BLOCKS, MOST_BLOCKS, PRECISE = 2, 20, 0.05
# Keys of `hardware` that let a run start, or end it, and change nothing of what it measures or trains.
NOT_DECIDING = ("port", "timeout", "oversubscribe")
PATHS = (("data", "path"), ("model", "name"), ("predict", "file"))  # in which ~ is the user's home
# Steps at the beginning of a run that do not count as steady: allocators, thread pools and buckets are being set up.
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Data:
    path: str | None
    url: str | None
    sha256: str | None
    hub: str | None
    revision: str | None
    subset: str | None
    split: str
    format: str
    text: str | int
    label: str | int
    labels: list[str] | None
    limit: int | None
    join_blanks: bool
    splits: dict[str, float]
    seed: int
    max_length: int

    @property
    def synthetic(self) -> bool:
        return not (self.path or self.url or self.hub)


@dataclass(frozen=True)
class Model:
    name: str
    revision: str | None
    hidden_size: int
    layers: int
    heads: int
    dropout: float | None


@dataclass(frozen=True)
class Train:
    epochs: int
    max_steps: int | None
    global_batch: int
    accumulation: int
    batching: str
    learning_rate: float
    weight_decay: float
    schedule: str
    warmup: float
    clip: float
    precision: str
    eval_every: int
    checkpoint: str
    seed: int

    @property
    def plan_name(self) -> str:
        """Names the plan by all of this that shapes it."""
        cut = f"-max{self.max_steps}" if self.max_steps else ""
        return f"{self.batching}-b{self.global_batch}-e{self.epochs}{cut}-s{self.seed}"


@dataclass(frozen=True)
class AskedHardware:
    device: str
    processes: int | str
    threads: int | str
    nodes: int
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
class Base:
    """What rows override: the configuration's own `train` and `hardware` sections."""

    train: Train
    hardware: AskedHardware


@dataclass(frozen=True)
class Row:
    """One line of the table: a strategy with its options, and what it trains with."""

    name: str
    strategy: str
    options: dict
    train: Train
    asked: AskedHardware
    base: Base
    kind: str = "runs"  # or "parity", a trial for the proof; or "profile". Each has its own folder of results
    # Of a trial: how the same processes train the same steps again, by name: what changes (training.py).
    variations: dict[str, dict] = field(default_factory=dict)
    excerpt: int = 0  # so many of the plan's steps only, which stand for all of it (Plan.excerpt); 0: the whole plan

    @property
    def plan_name(self) -> str:
        """Names the row's plan; rows that share it do the same work in the same order."""
        return self.train.plan_name + (f"-excerpt{self.excerpt}" if self.excerpt else "")

    @cached_property
    def hardware(self) -> Hardware:
        """What the row runs on. Raises BadInput where this machine does not have it.

        A process has as many threads in every row, also in one that asks for another number of devices, unless it asks
        for all.
        """
        asked = self.asked
        if asked.threads in ("auto", "all"):
            asked = replace(asked, threads=resolve(self.base.hardware).threads)
        found, literals = resolve(asked, self.name), strategies.literals(self.strategy)
        devices = 1 if found.device in literals["ONE_DEVICE_ON"] else found.devices
        processes = 1 if found.device in literals["ONE_PROCESS_ON"] else devices
        threads = max(1, cpu_cores() // processes) if self.asked.threads == "all" else found.threads
        return replace(found, devices=devices, processes=processes, threads=threads)

    @property
    def precision(self) -> str:
        """The precision with `amp` resolved. fp16 on a CPU is 10 to 17 times slower than fp32, so amp is bf16 there."""
        if self.train.precision != "amp":
            return self.train.precision
        return "fp16" if self.hardware.device == "cuda" else "bf16"

    @property
    def division(self) -> str:
        """closed: the same work as the table's default, to compare strategies. open: any recipe (MLPerf's terms)."""
        same = all(getattr(self.train, key) == getattr(self.base.train, key) for key in RECIPE)
        return strategies.literals(self.strategy)["DIVISION"] if same else "open"

    def folder(self, repeat: int) -> str:
        return f"{self.kind}/{self.name}/n{self.hardware.devices}/rep{repeat}"

    def settings(self) -> dict:
        """How this row trains, as plain JSON values."""
        return {
            "row": self.name,
            "strategy": self.strategy,
            "options": self.options,
            "division": self.division,
            "precision": self.precision,
            "plan": self.plan_name,
            "train": asdict(self.train),
            "hardware": asdict(self.hardware),
        } | ({"variations": self.variations} if self.variations else {})

    def deciding(self) -> dict:
        """Those settings that decide what a run comes to: one that was made with others is not of this row."""
        settings = self.settings()
        for label in ("row", "division"):  # what a row is called, and what it is beside the rest of the table
            del settings[label]
        for key in NOT_DECIDING:
            del settings["hardware"][key]
        return settings

    def refuse(self) -> None:
        """Raises BadInput where the row's settings contradict each other, or what its strategy can do."""
        for asked, reason in self._matches("REFUSED"):
            raise BadInput(f"rows.{self.name}: {asked}: {reason}.")
        if self.train.global_batch < self.hardware.devices * self.train.accumulation:
            raise BadInput(
                f"rows.{self.name}.global_batch: {self.train.global_batch} samples can't be shared by"
                f" {self.hardware.devices} devices in {self.train.accumulation} micro-batches each. Raise it, or"
                " lower accumulation."
            )
        # PyTorch's own builds have the one that their devices use.
        if self.hardware.backend not in ("gloo", "nccl") and not commands.backend_built(self.hardware.backend):
            raise BadInput(
                f"rows.{self.name}.backend: this PyTorch was built without {self.hardware.backend}. Set it to auto."
            )

    @property
    def unavailable(self) -> str:
        """Why the row's strategy can't run here, and what mends it; empty if it can."""
        for package, (version, command, *only) in strategies.literals(self.strategy)["NEEDS"].items():
            if not all(self.options[key] in allowed for values in only for key, allowed in values.items()):
                continue
            try:
                found = importlib.metadata.version(package).split("+")[0]
            except importlib.metadata.PackageNotFoundError:
                return f"{package} {version} is not installed; to install it: {command}"
            if found != version:
                return f"{package} is {found} here, and {version} is what Lockstep was tested with: {command}"
        if self.asked.threads == "all" and self.hardware.device == "cuda":
            return "threads: all gives a row all cores of a CPU, and here GPUs train"
        if self.options.get("controller") == "mpi" and not commands.horovod_has_mpi():
            return "Horovod is built without MPI; install it (Debian: libopenmpi-dev), then: make horovod"
        return ""

    @property
    def lossy(self) -> str:
        """Why the row can't train exactly the same model, by its nature; empty if it can."""
        return "; ".join(f"{reason} ({asked})" for asked, reason in self._matches("LOSSY"))

    @property
    def no_fp64(self) -> str:
        """Why the trial is not trained in float64 too, where only a mistake makes a difference; empty if it is."""
        if self.lossy:
            return "it trains another model by its nature"
        if self.precision != "fp32":
            return f"it trains in {self.precision}"
        return strategies.literals(self.strategy)["NO_FP64"]

    def _matches(self, literal: str) -> list[tuple[str, str]]:
        """Which of its strategy's REFUSED or LOSSY are true of this row: what was asked for, and the reason."""
        has = self.options | asdict(self.train) | asdict(self.hardware) | {"precision": self.precision}
        return [
            (", ".join(f"{key}: {has[key]}" for key in values), reason)
            for values, reason in strategies.literals(self.strategy)[literal]
            if all(has.get(key) in allowed for key, allowed in values.items())
        ]


@dataclass(frozen=True)
class Config:
    task: str
    data: Data
    model: Model
    train: Train
    hardware: AskedHardware
    predict: Predict
    profile: Profile
    tune: Tune
    containers: dict[str, str]  # the image of each family of strategies, or "auto"
    rows: dict[str, Row]
    repeats: int | str
    budget: float
    retries: int
    vary_seed: bool
    source: dict  # the validated configuration as plain values, defaults filled in

    @property
    def data_settings(self) -> dict:
        """All of the configuration that decides what `prepare` makes."""
        return {"data": self.source["data"], "model": self.source["model"], "train": {"seed": self.train.seed}}

    @property
    def data_key(self) -> str:
        """Names what `prepare` makes."""
        return hash_text(json.dumps(self.data_settings, sort_keys=True))[:16]

    @property
    def repetitions(self) -> range:
        """Every repetition of a row that there may be."""
        return range(1, (MOST_BLOCKS if self.repeats == "auto" else self.repeats) + 1)

    @property
    def first_repetitions(self) -> range:
        """Those that every row has; with `repeats: auto` some get more."""
        return range(1, FIRST_BLOCKS + 1) if self.repeats == "auto" else self.repetitions

    def repetition(self, row: Row, repeat: int) -> Row:
        """The row as its repetition `repeat` (from 1) trains it: with a seed of its own, where that is asked for."""
        if not self.vary_seed:
            return row
        train, base = (replace(one, seed=one.seed + repeat - 1) for one in (row.train, row.base.train))
        return replace(row, train=train, base=replace(row.base, train=base))

    @property
    def order(self) -> list[tuple[Row, int]]:
        """Every training, a row and its repetition, in the order in which they are run.

        Repetition k of all rows is a block, shuffled by the seed and k: whatever drifts on a machine meets every row
        alike, and more repetitions change nothing of the earlier blocks.
        """
        blocks = []
        for repeat in self.repetitions:
            names = sorted(self.rows)
            random.Random(f"{self.train.seed} {repeat}").shuffle(names)
            blocks += [(self.repetition(self.rows[name], repeat), repeat) for name in names]
        return blocks

    def references(self, row: Row) -> list[str]:
        """The precisions of the references that the row is held against: the first for rounding, fp64 for semantics."""
        if row.lossy or row.precision == "fp32":
            return ["fp32"] if row.no_fp64 else ["fp32", "fp64"]
        return [row.precision]

    def reference(self, precision: str) -> Row:
        """`single` in `precision`: the trial that those of all rows are held against."""
        train = replace(self.train, precision=precision, accumulation=1)
        row = Row(f"reference_{precision}", "single", {}, train, self.hardware, self.base)
        return replace(self._trial(row), variations={} if precision == "fp64" else OTHER_ORDERS | MISTAKES)

    def trial(self, row: Row) -> Row:
        """The row's run for the proof: few steps, on several devices where there are.

        Of `train`, a row's precision and accumulation stay, and all else falls away: it is the strategy that is proven.
        """
        return replace(self._trial(row), variations={} if row.no_fp64 else {"fp64": {"precision": "fp64"}})

    def _trial(self, row: Row) -> Row:
        most = min(TRIAL_PROCESSES, row.hardware.devices)
        if row.hardware.device == "cpu":
            most = max(2, most)  # on one core too: nothing is timed
        train = replace(
            self.train,
            precision=row.train.precision,
            accumulation=min(row.train.accumulation, TRIAL_BATCH // most),
            global_batch=TRIAL_BATCH,
            max_steps=TRIAL_STEPS,
            epochs=TRIAL_STEPS,  # an epoch has one step at least
            learning_rate=TRIAL_RATE,
            schedule="constant",
            warmup=0,
            eval_every=0,
            checkpoint="last",
        )
        asked = replace(row.asked, processes=most, threads=row.hardware.threads, oversubscribe=True)
        return replace(row, train=train, asked=asked, kind="parity")

    def profiled(self, row: Row) -> Row:
        """The row's run in which a step's time is taken apart: a few steps of its timed runs, without evaluation."""
        train = replace(row.train, eval_every=0, checkpoint="last")
        return replace(row, train=train, kind="profile", excerpt=self.profile.steps)

    def tried(self, name: str, recipe: dict) -> Row:
        """A row of the search for the fastest recipe: a few steps, without evaluation. `recipe` is as in `rows`."""
        steps = self.tune.steps  # in as many epochs as are needed
        base = replace(self.train, max_steps=steps, epochs=steps, eval_every=0, checkpoint="last")
        row = _row(name, recipe, Base(base, self.hardware), "tune")
        return replace(row, kind="tune")

    @property
    def base(self) -> Base:
        return Base(self.train, self.hardware)


@cache
def configuration_schema() -> dict:
    return yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))


def row_schema(strategy: str) -> dict:
    """What may stand in a row: the strategy, its own OPTIONS, and every train and hardware key."""
    sections = configuration_schema()["properties"]
    own = strategies.literals(strategy)["OPTIONS"]
    inherited = {**sections["train"]["properties"], **sections["hardware"]["properties"]}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {"strategy": {"type": "string"}, **inherited, **own},
    }


def read(files: list[Path], overrides: list[str] = ()) -> Config:
    """Read YAML files, each over the one before, then `section.key=value` overrides."""
    merged: dict = {}
    for file in files:
        _merge(merged, load_yaml(Path(file)))
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"--set {override}: expected key=value, as in --set data.limit=600")
        for key in reversed(path.split(".")):
            value = {key: value}
        _merge(merged, value)
    return parse(merged, " + ".join(str(file) for file in files))


def parse(raw: dict, where: str = "config") -> Config:
    """Check a merged configuration and build the dataclasses. Raises BadInput naming every wrong key."""
    values = schema.coerce(raw, configuration_schema())
    schema.check(values, configuration_schema(), where)
    values = _plain(schema.fill(values, configuration_schema()))
    data = values["data"]
    if abs(sum(data["splits"].values()) - 1) > 1e-6:
        raise BadInput(
            f"{where}: data.splits: train, dev and test must add up to 1, not {sum(data['splits'].values()):g}."
        )
    if data["url"] and not data["path"] and not data["sha256"]:
        raise BadInput(f"{where}: data.sha256: data.url needs it, so that everybody trains on the same bytes.")
    if data["hub"] and not data["path"] and not data["url"] and not data["revision"]:
        raise BadInput(
            f"{where}: data.revision: data.hub needs it (a commit hash), so that everybody trains on the same rows."
        )
    name = values["model"]["name"]
    if name != "scratch" and not Path(name).is_dir() and not values["model"]["revision"]:
        raise BadInput(
            f"{where}: model.revision: model.name {name} is no local folder, and a model of the hub needs a revision"
            " (a commit hash), so that everybody starts from the same weights."
        )
    if name == "scratch" and values["model"]["hidden_size"] % values["model"]["heads"]:
        raise BadInput(
            f"{where}: model.heads: {values['model']['heads']} heads can't share"
            f" model.hidden_size: {values['model']['hidden_size']} evenly. Make it a multiple of heads."
        )
    base = Base(Train(**values["train"]), AskedHardware(**values["hardware"]))
    return Config(
        task=values["task"],
        data=Data(**data),
        model=Model(**values["model"]),
        train=base.train,
        hardware=base.hardware,
        predict=Predict(**values["predict"]),
        profile=Profile(**values["profile"]),
        tune=Tune(**values["tune"]),
        containers=values["containers"],
        rows={name: _row(name, values["rows"][name], base, where) for name in _order(values["rows"])},
        repeats=values["repeats"],
        budget=values["budget"],
        retries=values["retries"],
        vary_seed=values["vary_seed"],
        source=values,
    )


def _plain(values: dict) -> dict:
    """The configuration with ~ as the user's home, and labels that are numbers as names."""
    plain = {section: dict(value) if isinstance(value, dict) else value for section, value in values.items()}
    for section, key in PATHS:
        if plain[section][key]:
            plain[section][key] = os.path.expanduser(plain[section][key])
    if plain["data"]["labels"]:
        plain["data"]["labels"] = list(map(str, plain["data"]["labels"]))
    if plain["predict"]["label"] is not None:
        plain["predict"]["label"] = str(plain["predict"]["label"])
    return plain


def _order(rows: dict) -> list[str]:
    """The names of the rows that are not dropped: the default ones first; Snakemake puts overrides first."""
    default = configuration_schema()["properties"]["rows"]["default"]
    return [name for name in [*default, *(name for name in rows if name not in default)] if rows.get(name)]


def _row(name: str, raw: dict, base: Base, where: str) -> Row:
    where = f"{where}: rows.{name}"
    if name in RESERVED or name.startswith(RESERVED_PREFIXES):
        raise BadInput(f"{where}: a rule of the workflow has this name; choose another.")
    strategy = raw.get("strategy")
    if strategy not in strategies.names():
        known = strategies.names()
        raise BadInput(
            f"{where}.strategy: {strategy!r} is not one of {', '.join(known)}.{schema.hint(strategy, known)}"
        )
    allowed = row_schema(strategy)
    for key in set(raw) - set(allowed["properties"]):
        if owners := [name for name in strategies.names() if key in strategies.literals(name)["OPTIONS"]]:
            raise BadInput(f"{where}.{key}: {strategy} has no such option; {', '.join(owners)} would have it.")
    given = schema.coerce(raw, allowed)
    schema.check(given, allowed, where)
    own = {key: option.get("default") for key, option in strategies.literals(strategy)["OPTIONS"].items()} | given
    train = _override(base.train, own)
    if train.checkpoint == "best" and not train.eval_every:
        raise BadInput(f"{where}: checkpoint: best needs eval_every above 0; set checkpoint to last, or eval_every.")
    inherited = {field.name for section in (Train, AskedHardware) for field in fields(section)}
    options = {key: value for key, value in own.items() if key not in inherited | {"strategy"}}
    return Row(name, strategy, options, train, _override(base.hardware, own), base)


def _override(section, given: dict):
    return replace(section, **{field.name: given[field.name] for field in fields(section) if field.name in given})


def load_yaml(file: Path) -> dict:
    """A configuration file's keys and values. Raises BadInput where it has none, or is a program."""
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}. Name an existing configuration file.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected keys and values, as in config/config.yaml.")
    if "__use_yte__" in value:
        raise BadInput(f"{file}: __use_yte__ would run Python from this file. Remove that line.")
    return value


def _merge(into: dict, update: dict) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
