"""A row of the table: its settings, how they resolve on this machine, and why it may be refused or unavailable."""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from lockstep import paths, provenance
from lockstep.config import launchers, optimizers, own_files, precisions, registry, schema, tracking
from lockstep.config.fixed import LAST_RATE, factors
from lockstep.config.hardware import Hardware
from lockstep.config.keys import MODEL, keys, names
from lockstep.config.kinds import Kind
from lockstep.config.machine import cpu_cores, not_compiling
from lockstep.config.resolving import resolve
from lockstep.config.sections import AskedHardware, Shared, Train
from lockstep.config.settings import Settings, deciding, in_one
from lockstep.errors import BadInput

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
    "network",
)
RESERVED_PREFIXES = ("train_", "parity_", "prove_", "profile_", "reference_")
# Literals of a strategy whose product must divide the number of ranks, and what a message says of that many ranks.
WITH_RANKS = {
    "RANKS_PER_REPLICA": "ranks hold one replica of the model together",
    "DIVIDES_RANKS": "groups are to share the ranks evenly",
}
# The keys of `train` about LoRA, and the package that it needs with any strategy.
LORA = ("lora", "lora_alpha", "lora_targets", "lora_dropout")
PEFT = registry.Need("peft", "0.21.2", "make setup", only={})


@dataclass(frozen=True)
class Row:
    """One row of the table: a strategy with its options and settings."""

    name: str
    strategy: str
    options: dict
    train: Train
    asked: AskedHardware
    shared: Shared
    kind: Kind = Kind.TIMED
    # For a trial: variations in which the same processes train the same steps again, by name, with changed settings.
    variations: dict[str, dict] = field(default_factory=dict)
    in_forks: bool = False  # whether its ranks are forks of a process with all imports, which can't be timed
    warm: bool = True  # whether one batch of each shape is computed before the timed window
    excerpt: int = 0  # the number of the plan's steps that represent it (Plan.excerpt); 0: the whole plan

    @property
    def plan_name(self) -> str:
        """The name of the row's plan; rows with the same plan do the same work in the same order."""
        return self.train.plan_name + (f"-excerpt{self.excerpt}" if self.excerpt else "")

    @cached_property
    def hardware(self) -> Hardware:
        """The row's resolved hardware. Raises BadInput if this machine does not have it.

        Processes of all rows have the same number of threads, even if a row has another number of devices, unless the
        row sets threads: all.
        """
        asked = self.asked
        if asked.threads in ("auto", "all"):
            asked = replace(asked, threads=resolve(self.shared.hardware).threads)
        resolved, literals = resolve(asked, self.name), registry.literals(self.strategy)
        devices = 1 if resolved.device in literals["ONE_DEVICE_ON"] else resolved.devices
        processes = devices
        if resolved.device in literals["ONE_PROCESS_ON"]:
            processes, devices = 1, min(devices, resolved.gpu_count or devices)  # a process can't use a GPU twice
        gpu_count = min(devices, resolved.gpu_count)
        nodes = 1 if registry.on_one_machine(self.strategy, resolved.device) else resolved.nodes
        cores = asked.node_cores or cpu_cores()
        threads = max(1, cores // processes) if self.asked.threads == "all" else resolved.threads
        gpus = resolved.gpus[:gpu_count] if resolved.gpus else None
        return replace(
            resolved,
            devices=devices * nodes,
            processes=processes * nodes,
            gpu_count=gpu_count,
            gpus=gpus,
            threads=threads,
            nodes=nodes,
            interface=resolved.interface if nodes > 1 else None,
        )

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks that hold one replica of the model together, and see the same samples."""
        return registry.ranks_per_replica(self.strategy, self.options)

    @property
    def replicas(self) -> int:
        """The number of replicas that share a global batch; a process with several devices has one on each."""
        return self.hardware.devices // self.ranks_per_replica

    def product(self, literal: str) -> tuple[int, str]:
        """The product of the options that a literal of its strategy names, and these options as text."""
        named = ", ".join(f"{key}: {self.options[key]}" for key in registry.literals(self.strategy)[literal])
        return registry.product(self.strategy, literal, self.options), named

    @property
    def ranks_in_multiples_of(self) -> int:
        """The number of the row's ranks must be a multiple of this."""
        return math.lcm(*(self.product(literal)[0] for literal in WITH_RANKS))

    @property
    def needs_equal_shares(self) -> bool:
        """Whether all replicas must train the same number of samples of a micro-batch."""
        return bool(self._matches("EQUAL_SHARES"))

    @property
    def uncounted(self) -> str:
        """Why the row's memory can't be counted without its devices; empty if it can."""
        if self.study:
            return "it is somebody's published code, which prepares its own data"
        return self._reason("UNCOUNTED")

    @property
    def precision(self) -> str:
        """The name of the precision, with `amp` resolved."""
        asked = self.train.precision
        return precisions.AMP[self.hardware.device] if asked == "amp" else asked

    @property
    def division(self) -> str:
        """closed: the same work as the table's default, to compare strategies. open: any recipe (MLPerf's terms).

        In both rows are compared with each other. A row of a study (report/studies.py) is in a division of the study's
        name, which is never ranked.
        """
        same = all(getattr(self.train, key) == getattr(self.shared.train, key) for key in names(Train, MODEL))
        return self.study or (registry.literals(self.strategy)["DIVISION"] if same else "open")

    @property
    def study(self) -> str:
        """The study that the row is of, since its strategy reproduces what was published; empty if it is of none."""
        division = registry.literals(self.strategy)["DIVISION"]
        return "" if division in registry.DIVISIONS else division

    def folder(self, repeat: int) -> str:
        return f"{self.kind}/{paths.run_name(self.name, self.hardware.devices, repeat)}"

    def settings(self) -> Settings:
        """The settings of the row's runs; fields that differ between its runs are not set."""
        return Settings(
            row=self.name,
            task=self.shared.task,
            strategy=self.strategy,
            options=self.options,
            division=self.division,
            precision=self.precision,
            plan=self.plan_name,
            train=self.train,
            hardware=self.hardware,
            variations=self.variations,
            kind=self.kind,
            warm=self.warm,
        )

    def deciding(self) -> dict:
        """The settings that decide a run's result; a run with other settings does not belong to this row."""
        settings = deciding(self.settings().of_row())
        for label in ("row", "division"):  # the row's name and its relation to other rows decide nothing
            del settings[label]
        return settings

    def refuse(self) -> None:
        """Raise BadInput if the row's settings contradict each other, or its strategy does not support them."""
        self._refuse_lora()
        for asked, reason in self._matches("REFUSED"):
            raise BadInput(f"rows.{self.name}: {asked}: {reason}.")
        self.launcher.refuse(self.options, self.hardware, f"rows.{self.name}")
        self._refuse_batch()
        for key in registry.literals(self.strategy)["NUMBERS_DEVICE"]:
            if self.options[key] >= self.hardware.devices:
                raise BadInput(
                    f"rows.{self.name}.{key}: {self.options[key]}: the row has {self.hardware.devices} devices,"
                    " numbered from 0. Name one of them; on a CPU leave it out."
                )
        if self.train.snapshot_every > self.train.epochs:
            raise BadInput(
                f"rows.{self.name}.snapshot_every: {self.train.snapshot_every}, but epochs is {self.train.epochs}, so"
                " no snapshot would be taken. Lower it, or raise epochs; 0 takes none."
            )
        if self.train.attention in ("efficient", "cudnn") and self.hardware.device == "cpu":
            raise BadInput(
                f"rows.{self.name}.attention: {self.train.attention}: only GPUs have it. Set it to auto, flash or math."
            )
        if self.train.log_to and not self.train.log_every:
            raise BadInput(
                f"rows.{self.name}.log_to: nothing is logged while log_every is 0. Set log_every, for example to 20."
            )
        tracking.refuse(self.train.log_to, f"rows.{self.name}.log_to")
        self._refuse_files()

    def _refuse_files(self) -> None:
        """Raise BadInput if a file that an option names is not there, or what an option says contradicts the row."""
        for key in registry.literals(self.strategy)["FILES"]:
            file = self.options.get(key)
            if file and not self.options[f"{key}_sha256"]:
                raise BadInput(
                    f"rows.{self.name}.{key}: {file} does not exist. Name an existing file; a container sees only this"
                    " folder's."
                )
        if self.kind.measured:  # in a trial the row's settings take the place of the file's
            train = replace(self.train, precision=self.precision)
            for key, check in registry.checks(self.strategy).items():
                if said := self.options.get(key):
                    check(said, self.options, train, self.hardware, f"rows.{self.name}.{key}")

    def _refuse_batch(self) -> None:
        """Raise BadInput if the ranks can't be divided into replicas, or the batch can't be divided among those."""
        together, batch, where = self.ranks_per_replica, self.train.global_batch, f"rows.{self.name}"
        for literal, what in WITH_RANKS.items():
            number, named = self.product(literal)
            if self.hardware.processes % number:
                raise BadInput(
                    f"{where}: {named}: {number} {what}, but there are {self.hardware.processes} ranks. Set processes"
                    f" to a multiple of {number}, or change {named}."
                )
        self._refuse_micro_batches()
        parts = self.replicas * self.train.accumulation
        one = "device" if together == 1 else "replica"
        sharing = f"{self.replicas} {one}{'s' if self.replicas > 1 else ''}"
        if batch < parts:
            raise BadInput(
                f"{where}.global_batch: {batch} samples can't be shared by {sharing} in {self.train.accumulation}"
                " micro-batches each. Raise it, or lower accumulation."
            )
        if batch % parts and (equal := self._matches("EQUAL_SHARES")):
            asked, reason = equal[0]
            asked = f" ({asked})" if asked else ""
            micro = f" in {self.train.accumulation} micro-batches each" if self.train.accumulation > 1 else ""
            raise BadInput(
                f"{where}.global_batch: {batch} samples can't be shared evenly by {sharing}{micro}: {reason}{asked}."
                f" Set it to a multiple of {parts}."
            )

    def _refuse_micro_batches(self) -> None:
        """Raise BadInput if the ranks that hold a replica together can't work with this number of micro-batches."""
        together, given = self.ranks_per_replica, self.train.accumulation
        wrong = [
            (f"at least {together}", self._matches("A_MICRO_BATCH_EACH") if given < together else []),
            (f"a multiple of {together}", self._matches("ROUNDS_OF_MICRO_BATCHES") if given % together else []),
        ]
        for needed, pairs in wrong:
            for settings, reason in pairs:
                raise BadInput(
                    f"rows.{self.name}.accumulation: {given}, but {settings} on {together} ranks needs {needed}:"
                    f" {reason}. Set accumulation to that, or change stages."
                )

    def _refuse_lora(self) -> None:
        """Raise BadInput if the row uses LoRA and another setting contradicts it."""
        if not self.train.lora:
            return
        where = f"rows.{self.name}: lora: {self.train.lora}"
        if self.study:
            raise BadInput(f"{where}: the published code trained all weights. Set lora to 0 in this row.")
        if why := optimizers.OPTIMIZERS[self.train.optimizer].not_with_lora:
            raise BadInput(f"{where}, optimizer: {self.train.optimizer}: use one of them; {why}.")

    @property
    def launcher(self) -> launchers.Launcher:
        return launchers.of(self.options)

    def command(self, folder: Path, rendezvous, script: Path | None = None) -> list[str]:
        """The command that starts the ranks of one node: `script folder`, once for each of them.

        folder: the run's; rendezvous: where the ranks of all nodes meet (run/addresses.py: Rendezvous); script: None is
        the one that trains.
        """
        return self.launcher.command(self.settings(), script or paths.TRAIN, folder, rendezvous)

    @property
    def unattended(self) -> "Row":
        """The row with torchrun in place of a launcher by hand; torchrun sets the same environment variables."""
        return replace(self, options=self.options | {"launcher": "torchrun"}) if self.launcher.by_hand else self

    @property
    def unavailable(self) -> str:
        """Why the row can't run on this machine, and what would help; empty if it can."""
        has = asdict(self.train) | self.options
        needs = [*registry.needs(self.strategy), *self.launcher.needs, *([PEFT] if self.train.lora else [])]
        for need in needs:
            if not all(has[key] in allowed for key, allowed in need.only.items()):
                continue
            if need.installed is None:
                return f"{need.package} {need.version} is not installed; to install it: {need.command}"
            if need.installed != need.version:
                tested = f"{need.version} is what Lockstep was tested with: {need.command}"
                return f"{need.package} is {need.installed} here, and {tested}"
        if self.asked.threads == "all" and self.hardware.device == "cuda":
            return "threads: all gives a row all cores of a CPU, but here GPUs train"
        if why := self.launcher.unavailable(self.options, self.hardware):
            return why
        if compiling := self._reason("COMPILES"):
            if not provenance.has_compiler(self.hardware.device):
                return f"{compiling} needs a compiler; to install one (Debian): apt install g++"
            if variables := not_compiling():
                names = " ".join(variable.partition("=")[0] for variable in variables)
                return (
                    f"{compiling} leaves the model as it is, wholly or where it fails, with {', '.join(variables)} in"
                    f" the environment; to compile it: unset {names}"
                )
        return ""

    @property
    def lossy(self) -> str:
        """Why the row can't train exactly the same model by design; empty if it can."""
        return "; ".join(f"{reason} ({asked})" if asked else reason for asked, reason in self._matches("LOSSY"))

    @property
    def other_model(self) -> str:
        """Why the row trains another model than `single` by design rather than by mistake; empty if it does not."""
        reasons = [reason for _, reason in self._matches("OTHER_MODEL")]
        batch, table = self.train.global_batch, self.shared.train.global_batch
        if self.study and batch != table:
            reasons.append(f"it trains {batch} samples a step, where the others train {table}")
        return "; ".join(reasons)

    @property
    def splits_batch_statistics(self) -> str:
        """Why batch normalisation would make the row train another model than one process; empty if it would not."""
        if self.train.accumulation > 1:
            return "batch normalisation takes its statistics over a micro-batch"
        together = registry.literals(self.strategy)["SYNCS_BATCH_NORM"]
        if self.replicas > 1 and not any(self.options[key] for key in together):
            remedy = "".join(f"; {key}: true takes them over all" for key in together)
            return f"batch normalisation takes its statistics over each device's share of the batch{remedy}"
        return ""

    @property
    def may_depart(self) -> str:
        """Why its runs may depart from the plan or the schedule, and only report it; empty if they then fail."""
        by_framework = self._matches("OWN_BATCHES") or self.steps_own_schedule
        return self.other_model if by_framework else ""

    @property
    def steps_own_schedule(self) -> bool:
        """Whether a framework steps the learning rate in a way of its own."""
        return bool(self._matches("OWN_SCHEDULE"))

    @property
    def no_fp64(self) -> str:
        """Why the trial is not also trained in float64, where only a mistake makes a difference; empty if it is."""
        if self.lossy:
            return "one of its options can't give single's numbers, so only wide limits apply"
        if self.precision != "fp32":
            return f"it trains in {self.precision}"
        return registry.literals(self.strategy)["NO_FP64"]

    @property
    def awaits_gradients(self) -> str:
        """What to do if weights get no gradient, since its ranks would wait for it; empty if they would not."""
        return self._reason("AWAITS_GRADIENTS")

    @property
    def own_optimizer(self) -> str:
        """Why the proof can't give it another optimizer; empty if it can."""
        return self._reason("OWN_OPTIMIZER")

    def _reason(self, literal: str) -> str:
        """The first reason in a literal of its strategy that applies to this row; empty if none does."""
        return next((reason for _, reason in self._matches(literal)), "")

    def _matches(self, literal: str) -> list[tuple[str, str]]:
        """The pairs in a literal of its strategy that apply to this row: the settings, and the reason."""
        settings = in_one(self.options, self.train, self.hardware, self.precision, self.shared.task)
        return registry.matches(self.strategy, literal, settings)


def times_trained(strategy: str, options: dict, processes: int) -> int:
    """How often each sample of the plan is trained: once, or once per rank if each rank trains the whole batch."""
    return processes if registry.matches(strategy, "WHOLE_BATCH", options) else 1


def read_row(name: str, raw: dict, shared: Shared, where: str) -> Row:
    """Read the row `name` of the configuration, which is called `where` in messages.

    Raises BadInput if it has a setting that no row, or no row of its strategy, may have.
    """
    where = f"{where}: rows.{name}"
    if not isinstance(name, str):
        raise BadInput(f"{where}: YAML does not read this name as text. Put it in quotes.")
    if name in RESERVED or name.startswith(RESERVED_PREFIXES):
        raise BadInput(f"{where}: a rule of the workflow has this name; choose another.")
    strategy = raw.get("strategy")
    if strategy not in registry.names():
        known = registry.names()
        raise BadInput(
            f"{where}.strategy: {strategy!r} is not one of {', '.join(known)}.{schema.hint(strategy, known)}"
        )
    allowed = schema.of_row(strategy)
    for key in set(raw) - set(allowed["properties"]):
        if owners := [name for name in registry.ours() if key in registry.literals(name)["OPTIONS"]]:
            raise BadInput(f"{where}.{key}: {strategy} has no such option; {', '.join(owners)} would have it.")
    given = schema.coerce(raw, allowed)
    schema.check(given, allowed, where)
    known = registry.literals(strategy)["OPTIONS"].items()
    own = {key: option["default"] for key, option in known if "default" in option} | given
    train = _override(shared.train, own)
    refuse_foreign(train, given, where)
    if train.checkpoint == "best" and not train.eval_every:
        raise BadInput(f"{where}: checkpoint: best needs eval_every above 0; set checkpoint to last, or eval_every.")
    figures = (*registry.task_literals(shared.task)["QUALITY"], "loss")
    if train.checkpoint == "best" and train.best not in figures:
        raise BadInput(
            f"{where}: train.best: {shared.task} has no {train.best}. Set it to one of: {', '.join(figures)}."
        )
    refuse_of_other_tasks(train, shared.task, where)
    inherited = {field.name for section in (Train, AskedHardware) for field in fields(section)}
    options = {key: value for key, value in own.items() if key not in inherited | {"strategy"}}
    for key in registry.literals(strategy)["FILES"]:
        if options.get(key):  # by the hash, a run with another content of the file does not belong to this row
            options[key] = os.path.expanduser(options[key])
            options[f"{key}_sha256"] = own_files.digest(options[key])
    row = Row(name, strategy, options, train, _override(shared.hardware, own), shared)
    return replace(row, train=with_batch(train, given, lambda: row.replicas, where))


def refuse_foreign(train: Train, given: dict, where: str) -> None:
    """Raise BadInput if `given`, the keys that were set, contain one that belongs to another optimizer or schedule."""
    for key, about in keys(Train).items():
        chooser, takers = about.of or ("", ())
        if chooser and key in given and getattr(train, chooser) not in takers:
            raise BadInput(
                f"{where}.{key}: {given[key]} is for {chooser}: {' or '.join(takers)}, but the {chooser} is"
                f" {getattr(train, chooser)}. Leave {key} out, or change {chooser}."
            )
    for key in LORA[1:]:
        if not train.lora and given.get(key):
            raise BadInput(f"{where}.{key}: {given[key]} is for LoRA, but lora is 0. Leave {key} out, or set lora.")
    if train.nesterov and not train.momentum and {"nesterov", "momentum"} & given.keys():
        raise BadInput(
            f"{where}.nesterov: Nesterov's momentum needs a momentum above 0; set momentum, to 0.9 for example."
        )
    if train.schedule == "constant_then_linear" and train.constant_epochs >= train.epochs:
        raise BadInput(
            f"{where}.constant_epochs: {train.constant_epochs} of {train.epochs} epochs would be constant, and none is"
            " left in which the rate falls. Lower it, raise epochs, or set schedule: constant."
        )
    if train.schedule == "polynomial" and train.learning_rate <= LAST_RATE:
        raise BadInput(
            f"{where}.learning_rate: {train.learning_rate:g} is not above {LAST_RATE:g}, to which schedule: polynomial"
            " falls. Raise it, or choose another schedule."
        )


def refuse_of_other_tasks(train: Train, task: str, where: str) -> None:
    """Raise BadInput if `train` sets a key that this task does not accept."""
    literals = registry.task_literals(task)
    for key, about in keys(Train).items():
        if about.of_some_tasks and getattr(train, key) != about.default and key not in literals["TAKES"]:
            takers = ", ".join(name for name in registry.tasks() if key in registry.task_literals(name)["TAKES"])
            raise BadInput(f"{where}: train.{key}: {task} does not accept it, only {takers} does. Leave it out.")
    if unknown := sorted((train.loss_weights or {}).keys() - set(literals["TERMS"])):
        raise BadInput(
            f"{where}: train.loss_weights: the loss of {task} has no term {unknown[0]}; it is the sum of"
            f" {', '.join(literals['TERMS'])}.{schema.hint(unknown[0], literals['TERMS'])}"
        )
    if train.loss_weights and not any(factors(train.loss_weights, literals["TERMS"])):
        raise BadInput(f"{where}: train.loss_weights: all weights are 0, so nothing is trained. Raise one of them.")


def with_batch(train: Train, given: dict, replicas: Callable[[], int], where: str) -> Train:
    """`train` with its global batch computed from `device_batch`, if that one is `given`.

    replicas: returns the number of replicas; called only if it is needed. Raises BadInput if both keys are given, or
    both are null.
    """
    asked = [key for key in ("global_batch", "device_batch") if given.get(key) is not None]
    if len(asked) == 2:
        raise BadInput(
            f"{where}.device_batch: {train.device_batch}, but global_batch is also set, to {train.global_batch}: one"
            " follows from the other. Set global_batch to null, or leave device_batch out."
        )
    if asked == ["global_batch"]:
        return replace(train, device_batch=None)
    if train.device_batch:
        return replace(train, global_batch=train.device_batch * replicas() * train.accumulation)
    if train.global_batch is None:
        raise BadInput(f"{where}.global_batch: it is null, and so is device_batch. Set one of them.")
    return train


def _override(section, given: dict):
    return replace(section, **{field.name: given[field.name] for field in fields(section) if field.name in given})
