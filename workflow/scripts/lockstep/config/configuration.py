"""The whole configuration, and the rows derived from it: repetitions, references, trials, profiles and tries.

It imports neither torch nor a framework, since the Snakefile imports it.
"""

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lockstep.config import schema
from lockstep.config.keys import keys
from lockstep.config.kinds import Kind
from lockstep.config.row import LORA, Row, read_row
from lockstep.config.sections import Asked, Shared, Train
from lockstep.errors import BadInput
from lockstep.files import hash_text
from lockstep.paths import QUICK, RESULTS

# The proof's trials. The shares of 31 samples differ between two, three and four ranks.
TRIAL_STEPS, TRIAL_BATCH, TRIAL_RATE = 12, 31, 5e-4
FP64_TOLERANCE = 1e-9  # the largest distance in float64 between two runs that compute the same
# Retrain the reference with reordered sums and a scaled loss: that is the rounding that ranks cause, since they average
# gradients. A factor that is not a power of two rounds every 16-bit number, and nothing else changes the norm of the
# first gradient.
IN_PARTS = {
    "in_2_parts": {"train": {"accumulation": 2}},
    "in_3_parts": {"train": {"accumulation": 3}, "loss_times": 3},
}
# For models with batch normalisation only these are used, since parts of a batch change what such a model computes. The
# factors are below one, as the gradient of a whole batch times 3 may overflow in fp16.
REORDERED = {
    "reversed": {"order": "reversed", "loss_times": 5 / 8},
    "rotated": {"order": "rotated", "loss_times": 7 / 8},
}
# Two deliberate mistakes that every proof must tell from an honest row: the mildest one of tests/proof/test_parity.py,
# and another one as mild.
MISTAKES = {
    "weights .1 % larger": {"weights_times": 1.001},
    "learning rate 5 % higher": {"train": {"learning_rate": 1.05 * TRIAL_RATE}},
}
DROPPED = "dropout"  # the variation of a trial with dropout
# The variation of a trial that takes one step of plain SGD in float64. Its update is the gradient, weight by weight:
# AdamW hides a factor, and after several steps all weights differ, wherever the mistake is.
ONE_STEP = "one_step"
OF_SGD = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
OF_SGD |= {"weight_decay": 0.0, "clip": 0.0}
BY_SGD = {ONE_STEP: {"precision": "fp64", "train": OF_SGD, "steps": 1}}
# For `repeats: auto`: the number of blocks with every row, the largest number of blocks, and the width of an interval
# (upper end / lower end - 1) at which blocks end (lockstep/analysis/blocks.py).
FIRST_BLOCKS, MOST_BLOCKS, PRECISE = 2, 20, 0.05
# Settings of `train` that switch off evaluation, saving and logging, for runs that only train steps.
NOTHING_BESIDES = {name: about.off for name, about in keys(Train).items() if about.off is not None}
# Settings of `train` about evaluation, which do not change how a row trains.
OF_EVALUATION = ("eval_samples", "best", "keep")


@dataclass(frozen=True)
class Config(Asked):
    """The validated configuration, with its rows resolved."""

    rows: dict[str, Row]
    source: dict  # the validated configuration as plain values, with defaults

    @property
    def results(self) -> Path:
        """The workflow's results folder; commands may use another one by --results."""
        return QUICK if self.quick else RESULTS

    @property
    def data_settings(self) -> dict:
        """The settings that decide what `prepare` makes."""
        asked = {name: self.source[name] for name in ("task", "data", "model")}
        return asked | {"train": {"seed": self.train.seed}}

    @property
    def data_key(self) -> str:
        """A hash of the settings that decide what `prepare` makes."""
        return hash_text(json.dumps(self.data_settings, sort_keys=True))[:16]

    @property
    def repetitions(self) -> range:
        """All possible repetitions of a row."""
        return range(1, (MOST_BLOCKS if self.repeats == "auto" else self.repeats) + 1)

    @property
    def first_repetitions(self) -> range:
        """The repetitions that every row has; with `repeats: auto` some rows get more."""
        return range(1, FIRST_BLOCKS + 1) if self.repeats == "auto" else self.repetitions

    def repetition(self, row: Row, repeat: int) -> Row:
        """The row of repetition `repeat` (from 1), which has a seed of its own if `vary_seed` is set."""
        if not self.vary_seed:
            return row
        own, of_all = (replace(train, seed=train.seed + repeat - 1) for train in (row.train, row.shared.train))
        return replace(row, train=own, shared=replace(row.shared, train=of_all))

    @property
    def order(self) -> list[tuple[Row, int]]:
        """All runs, each a row and its repetition, in the order in which they are trained.

        Repetition k of all rows is a block, shuffled by the seed and k. So drift of the machine affects all rows alike,
        and further repetitions do not change earlier blocks.
        """
        blocks = []
        for repeat in self.repetitions:
            names = sorted(self.rows)
            random.Random(f"{self.train.seed} {repeat}").shuffle(names)
            blocks += [(self.repetition(self.rows[name], repeat), repeat) for name in names]
        return blocks

    def references(self, row: Row) -> dict[str, Row]:
        """The references of a row by precision: in its own precision for rounding, and in fp64 for semantics."""
        precisions = [row.precision]
        if row.lossy or row.precision == "fp32":
            precisions = ["fp32"] if row.no_fp64 else ["fp32", "fp64"]
        return {precision: self.reference(precision, row) for precision in precisions}

    def reference(self, precision: str, row: Row | None = None) -> Row:
        """The trial of `single` in `precision`, with which the trials of rows are compared.

        If `row` has LoRA settings of its own, or settings that only its trial has, the reference has the same ones. Its
        name then contains them, such as b30 or linear.
        """
        train, own = replace(self.train, precision=precision, accumulation=1, activation_checkpointing=False), {}
        name = f"reference_{precision}"
        if row:
            own = self._own_of_trial(row)
            name += "".join(f"_b{value}" if key == "global_batch" else f"_{value}" for key, value in own.items())
            train = replace(train, **{key: getattr(row.train, key) for key in LORA})
            if (asked := updates(train)) != updates(self.train):
                name += f"_lora{train.lora}_{hash_text(asked)[:6]}" if train.lora else "_all_weights"
        row = Row(name, "single", {}, train, self.hardware, self.shared)
        # The reference has no warm-up, so that the proof finds a warm-up that changes a row's model.
        variations = BY_SGD if precision == "fp64" else IN_PARTS | REORDERED | MISTAKES
        return replace(self._trial(row, own), variations=variations, warm=False)

    def trial(self, row: Row) -> Row:
        """The row's run for the proof: few steps, on several devices if there are any.

        The trial keeps the row's precision, accumulation and LoRA settings. All other settings of `train` are the same
        for all rows, since it is the strategy that is proven, with the table's optimizer unless the row's optimizer is
        one that only its strategy has. There is no dropout. A row of a study also keeps the ratio of its batch to the
        table's, as published code may differ in that. If several ranks hold a replica, a variation with dropout shows
        whether they drop the same units.
        """
        variations = {} if row.no_fp64 else {"fp64": {"precision": "fp64"}} | ({} if row.own_optimizer else BY_SGD)
        if row.ranks_per_replica > 1:
            variations[DROPPED] = {"dropout": 0.1}
        return replace(self._trial(row, self._own_of_trial(row)), variations=variations)

    def _own_of_trial(self, row: Row) -> dict:
        """Settings of `train` that only this row's trial and its references have.

        Some strategies need shares of equal size. How often a framework steps a schedule shows only if rates change.
        """
        own = {}
        if row.needs_equal_shares:
            parts = self._replicas_of_trial(row) * self._accumulation_of_trial(row)
            own["global_batch"] = TRIAL_BATCH - TRIAL_BATCH % parts
        if row.steps_own_schedule and (row.train.schedule != "constant" or row.train.warmup):
            own["schedule"] = "linear"
        return own

    def _processes_of_trial(self, row: Row) -> int:
        most, together = min(self.trial_processes, row.hardware.devices), row.ranks_in_multiples_of
        most = max(2, most) if row.hardware.device == "cpu" else most  # even on one core, as nothing is timed
        return max(most - most % together, together)

    def _replicas_of_trial(self, row: Row) -> int:
        return self._processes_of_trial(row) // row.ranks_per_replica

    def _accumulation_of_trial(self, row: Row) -> int:
        most = TRIAL_BATCH // self._replicas_of_trial(row)
        if row.train.accumulation <= most:
            return row.train.accumulation
        return most - most % row.ranks_per_replica or most  # a pipeline's ranks may take micro-batches in rounds

    def _trial(self, row: Row, own: dict) -> Row:
        most = self._processes_of_trial(row)
        times = row.train.global_batch / self.train.global_batch if row.study else 1
        shared = schema.of_configuration()["properties"]["train"]["properties"]["optimizer"]["enum"]
        train = replace(
            self.train,
            precision=row.train.precision,
            **{key: getattr(row.train, key) for key in LORA if key != "lora_dropout"},
            lora_dropout=0.0,
            optimizer=self.train.optimizer if row.train.optimizer in shared else row.train.optimizer,
            accumulation=self._accumulation_of_trial(row),
            activation_checkpointing=row.train.activation_checkpointing,
            global_batch=round(TRIAL_BATCH * times),
            device_batch=None,
            max_steps=TRIAL_STEPS,
            epochs=TRIAL_STEPS,  # enough, as an epoch has at least one step
            learning_rate=TRIAL_RATE,
            schedule="constant",
            warmup=0,
            **NOTHING_BESIDES,
        )
        train = replace(train, **own)
        # One machine is enough to prove the strategy; the network is tested elsewhere.
        asked = replace(row.asked, nodes=1, processes=most, threads=row.hardware.threads, oversubscribe=True)
        return replace(row.unattended, train=train, asked=asked, kind=Kind.TRIAL)

    def not_in_trial(self, row: Row) -> list[str]:
        """Training settings that the row overrides, but its trial does not have: the row is proven without them."""
        asked, proven = asdict(row.train), asdict(self.trial(row).train)
        own = [name for name, value in asdict(self.train).items() if asked[name] not in (value, proven[name])]
        return [name for name in own if name not in NOTHING_BESIDES and name not in OF_EVALUATION]

    def profiled(self, row: Row) -> Row:
        """The row's profiled run: a few steps of its timed runs, without evaluation, divided into phases."""
        train = replace(row.train, **NOTHING_BESIDES)
        return replace(row.unattended, train=train, kind=Kind.PROFILE, excerpt=self.profile.steps)

    def tried(self, name: str, raw: dict) -> Row:
        """A try in the search for the fastest recipe: a few steps, without evaluation. `raw` is an entry of `rows`."""
        steps = self.tune.steps  # also the number of epochs, of which some may not be reached
        train = replace(self.train, device_batch=None, max_steps=steps, epochs=steps, **NOTHING_BESIDES)
        row = read_row(name, raw, Shared(self.task, train, replace(self.hardware, nodes=1)), "tune")
        return replace(row, kind=Kind.TRY)

    def require_row(self, name: str, where: str, besides: tuple[str, ...] = ()) -> None:
        """Raise BadInput if this is not a row's name. The message begins with `where` and also lists `besides`."""
        if name not in self.rows:
            choices = ", ".join([*besides, *self.rows])
            raise BadInput(f"{where}: no such row. The configuration has: {choices}.{schema.hint(name, self.rows)}")

    @property
    def shared(self) -> Shared:
        return Shared(self.task, self.train, self.hardware)


def updates(train: Train) -> str:
    """The LoRA settings of a trial as a text that is equal for equal adapters."""
    if not train.lora:
        return "none"
    return json.dumps([train.lora, float(train.lora_alpha or train.lora), sorted(train.lora_targets or [])])
