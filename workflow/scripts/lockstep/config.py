"""The configuration: read, merged, checked against its schema, and turned into frozen dataclasses.

Needs neither torch nor a framework: the Snakefile imports it.
"""

import difflib
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from lockstep import strategies
from lockstep.errors import BadInput
from lockstep.hardware import Hardware, resolve

SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "config.schema.yaml"
# Rules of the Snakefile: a row's name is a target too (`snakemake ddp`), so it can't be one of these.
RESERVED = ("all", "prepare", "plan", "predict", "report", "convert", "test")


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
        """Names the plan by all that shapes it; rows that share it do the same work in the same order."""
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

    @cached_property
    def hardware(self) -> Hardware:
        """What the row runs on. Raises BadInput where this machine does not have it.

        A process has as many threads in every row, also in one that asks for another number of processes.
        """
        asked = self.asked
        if asked.threads == "auto":
            asked = replace(asked, threads=resolve(self.base.hardware).threads)
        found = resolve(asked, self.name)
        one_device = found.device in strategies.literals(self.strategy)["ONE_DEVICE_ON"]
        return replace(found, processes=1 if one_device else found.processes)

    @property
    def precision(self) -> str:
        """The precision with `amp` resolved. fp16 on a CPU is 10 to 17 times slower than fp32, so amp is bf16 there."""
        if self.train.precision != "amp":
            return self.train.precision
        return "fp16" if self.hardware.device == "cuda" else "bf16"

    @property
    def division(self) -> str:
        """closed: the same plan as the table's default. open: any recipe (MLPerf's terms)."""
        return "closed" if self.train.plan_name == self.base.train.plan_name else "open"

    def folder(self, repeat: int) -> str:
        return f"runs/{self.name}/n{self.hardware.processes}/rep{repeat}"

    def settings(self) -> dict:
        """All that decides how this row trains, as plain JSON values."""
        return {
            "row": self.name,
            "strategy": self.strategy,
            "options": self.options,
            "division": self.division,
            "precision": self.precision,
            "plan": self.train.plan_name,
            "train": asdict(self.train),
            "hardware": asdict(self.hardware),
        }


@dataclass(frozen=True)
class Config:
    task: str
    data: Data
    model: Model
    train: Train
    hardware: AskedHardware
    predict: Predict
    rows: dict[str, Row]
    repeats: int
    source: dict  # the validated configuration as plain values, defaults filled in

    @property
    def repetitions(self) -> range:
        return range(1, self.repeats + 1)

    def runs(self) -> list[tuple[Row, int]]:
        return [(row, repeat) for repeat in self.repetitions for row in self.rows.values()]


@cache
def schema() -> dict:
    return yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))


def row_schema(strategy: str) -> dict:
    """What may stand in a row: the strategy, its own OPTIONS, and every train and hardware key."""
    sections = schema()["properties"]
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
        _merge(merged, _load_yaml(Path(file)))
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
    if "__use_yte__" in raw:
        raise BadInput(f"{where}: __use_yte__ would run Python code from the configuration; remove it.")
    values = _coerce(raw, schema())
    _check(values, schema(), where)
    values = _fill(values, schema())
    data = values["data"]
    if abs(sum(data["splits"].values()) - 1) > 1e-6:
        raise BadInput(f"{where}: data.splits: train, dev and test must add up to 1, not {sum(data['splits'].values()):g}.")
    if data["url"] and not data["path"] and not data["sha256"]:
        raise BadInput(f"{where}: data.sha256: data.url needs it, so that everybody trains on the same bytes.")
    if data["hub"] and not data["path"] and not data["url"] and not data["revision"]:
        raise BadInput(f"{where}: data.revision: data.hub needs it (a commit hash), so that everybody trains on the same rows.")
    base = Base(Train(**values["train"]), AskedHardware(**values["hardware"]))
    return Config(
        task=values["task"],
        data=Data(**data),
        model=Model(**values["model"]),
        train=base.train,
        hardware=base.hardware,
        predict=Predict(**values["predict"]),
        rows={name: _row(name, row, base, where) for name, row in values["rows"].items()},
        repeats=values["repeats"],
        source=values,
    )


def _row(name: str, raw: dict, base: Base, where: str) -> Row:
    where = f"{where}: rows.{name}"
    if name in RESERVED or name.startswith("train_"):
        raise BadInput(f"{where}: a rule of the workflow has this name; choose another.")
    strategy = raw.get("strategy")
    if strategy not in strategies.names():
        known = strategies.names()
        raise BadInput(f"{where}.strategy: {strategy!r} is not one of {', '.join(known)}.{_hint(strategy, known)}")
    allowed = row_schema(strategy)
    given = _coerce(raw, allowed)
    _check(given, allowed, where)
    own = {key: option.get("default") for key, option in strategies.literals(strategy)["OPTIONS"].items()} | given
    train = _override(base.train, own)
    if train.checkpoint == "best" and not train.eval_every:
        raise BadInput(f"{where}: checkpoint: best needs eval_every above 0; set checkpoint to last, or eval_every.")
    inherited = {field.name for section in (Train, AskedHardware) for field in fields(section)}
    options = {key: value for key, value in own.items() if key not in inherited | {"strategy"}}
    return Row(name, strategy, options, train, _override(base.hardware, own), base)


def _override(section, given: dict):
    return replace(section, **{field.name: given[field.name] for field in fields(section) if field.name in given})


def _load_yaml(file: Path) -> dict:
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}. Name an existing configuration file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected keys and values, as in config/config.yaml.")
    return value


def _merge(into: dict, update: dict) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _coerce(value, schema: dict):
    """Turn strings into the schema's type: nested values of `snakemake --config` arrive as strings."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: _coerce(item, properties.get(key, {})) for key, item in value.items()}
    if isinstance(value, list):
        return [_coerce(item, schema.get("items", {})) for item in value]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(value, str) or not kinds:
        return value
    if "null" in kinds and value in ("null", "None", "~"):
        return None
    if "boolean" in kinds:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        if "integer" in kinds and value.lstrip("-").isdecimal():
            return int(value)
        if "number" in kinds:
            return float(value)
        if "array" in kinds or "object" in kinds:
            return yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        pass  # the schema check says what was expected
    return value


def _fill(value, schema: dict):
    """Add every default that the schema knows."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for key, inner in schema["properties"].items():
        if key in filled:
            filled[key] = _fill(filled[key], inner)
        elif "default" in inner:
            filled[key] = inner["default"]
        elif "properties" in inner:
            filled[key] = _fill({}, inner)
    return filled


def _check(value: dict, schema: dict, where: str) -> None:
    problems = [_explain(error) for error in Draft202012Validator(schema).iter_errors(value)]
    if problems:
        raise BadInput("\n  ".join([f"{where}:", *problems]) if len(problems) > 1 else f"{where}: {problems[0]}")


def _explain(error) -> str:
    """One jsonschema error in one line: key, what is wrong, what is expected."""
    key = ".".join(str(part) for part in error.absolute_path)
    match error.validator:
        case "additionalProperties":
            known = list(error.schema["properties"])
            unknown = [name for name in error.instance if name not in known]
            dotted = ".".join([key, str(unknown[0])] if key else [str(unknown[0])])
            return f"{dotted}: unknown key.{_hint(unknown[0], known) or ' Known here: ' + ', '.join(known) + '.'}"
        case "enum":
            return f"{key}: {error.instance!r} is not one of {', '.join(map(str, error.validator_value))}."
        case "type":
            kinds = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
            return f"{key}: expected {' or '.join(kinds)}, not {error.instance!r}."
        case "pattern" if error.validator_value == "^auto$":
            return f"{key}: expected auto or a whole number, not {error.instance!r}."
        case _:
            return f"{key or 'configuration'}: {error.message}."


def _hint(word, known) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
