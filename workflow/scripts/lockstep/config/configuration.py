"""The whole configuration, and the rows that follow from it: repetitions, references, trials, profiled and tried ones.

Needs neither torch nor a framework: the Snakefile imports it.
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

# The proof's trials. An odd batch, so that the shares of two ranks differ, as do those of three and of four.
TRIAL_STEPS, TRIAL_BATCH, TRIAL_RATE, TRIAL_PROCESSES = 12, 31, 5e-4, 4
FP64_TOLERANCE = 1e-9  # how far apart any two may be that compute the same in float64
# The reference, trained again as every trial of a row may be: with its sums in another order, and with a loss that is
# multiplied and a gradient that is divided again. Ranks that average their gradients do both. A factor that is no power
# of two rounds anew whatever has 16 bits, and the first gradient's norm has no other reason to differ.
IN_PARTS = {
    "in_2_parts": {"train": {"accumulation": 2}},
    "in_3_parts": {"train": {"accumulation": 3}, "loss_times": 3},
}
# Models with batch normalisation have these alone, as parts of a batch change what they compute. The factors are below
# one: with that of 3 the gradient of a whole batch may be more than fp16 can hold.
REORDERED = {
    "reversed": {"order": "reversed", "loss_times": 5 / 8},
    "rotated": {"order": "rotated", "loss_times": 7 / 8},
}
# And as no trial may be: with the mildest of the mistakes that tests/proof/test_parity.py makes, and one as mild.
MISTAKES = {
    "weights .1 % larger": {"weights_times": 1.001},
    "learning rate 5 % higher": {"train": {"learning_rate": 1.05 * TRIAL_RATE}},
}
DROPPED = "dropout"  # the variation of a trial in which units are dropped at random
# With `repeats: auto`: the blocks that hold every row, how many there may be, and the width of an interval (its upper
# end over its lower one, less 1) at which they end (lockstep/run/blocks.py).
FIRST_BLOCKS, MOST_BLOCKS, PRECISE = 2, 20, 0.05
# Of `train`, for runs that are not the timed ones: steps, and nothing that is done beside them.
NOTHING_BESIDES = {name: about.off for name, about in keys(Train).items() if about.off is not None}
# Settings of `train` that say what is looked at, and not how it trains.
OF_EVALUATION = ("eval_samples", "best", "keep")


@dataclass(frozen=True)
class Config(Asked):
    """The same, checked, and with what its rows come to."""

    rows: dict[str, Row]
    source: dict  # the validated configuration as plain values, defaults filled in

    @property
    def results(self) -> Path:
        """Where the workflow trains; commands take another folder by --results."""
        return QUICK if self.quick else RESULTS

    @property
    def data_settings(self) -> dict:
        """All of the configuration that decides what `prepare` makes."""
        asked = {name: self.source[name] for name in ("task", "data", "model")}
        return asked | {"train": {"seed": self.train.seed}}

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
        """The repetitions that every row has; with `repeats: auto` some get more."""
        return range(1, FIRST_BLOCKS + 1) if self.repeats == "auto" else self.repetitions

    def repetition(self, row: Row, repeat: int) -> Row:
        """The row as its repetition `repeat` (from 1) trains it: with a seed of its own, where that is asked for."""
        if not self.vary_seed:
            return row
        own, of_all = (replace(train, seed=train.seed + repeat - 1) for train in (row.train, row.shared.train))
        return replace(row, train=own, shared=replace(row.shared, train=of_all))

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

    def references(self, row: Row) -> dict[str, Row]:
        """What the row is compared with, by precision: the row's own, for rounding; and fp64, for semantics."""
        precisions = [row.precision]
        if row.lossy or row.precision == "fp32":
            precisions = ["fp32"] if row.no_fp64 else ["fp32", "fp64"]
        return {precision: self.reference(precision, row) for precision in precisions}

    def reference(self, precision: str, row: Row | None = None) -> Row:
        """`single` in `precision`: the trial that those of all rows are compared with.

        A `row` that trains low-rank updates of its own is compared with `single` that trains the same, and one whose
        trial has other settings than every trial with `single` of those: its name says which, as b30 or linear.
        """
        train, own = replace(self.train, precision=precision, accumulation=1), {}
        name = f"reference_{precision}"
        if row:
            own = self._own_of_trial(row)
            name += "".join(f"_b{value}" if key == "global_batch" else f"_{value}" for key, value in own.items())
            train = replace(train, **{key: getattr(row.train, key) for key in LORA})
            if (asked := updates(train)) != updates(self.train):
                name += f"_lora{train.lora}_{hash_text(asked)[:6]}" if train.lora else "_all_weights"
        row = Row(name, "single", {}, train, self.hardware, self.shared)
        # Without a warm-up, so that one which leaves a trace in the model of a row is seen.
        variations = {} if precision == "fp64" else IN_PARTS | REORDERED | MISTAKES
        return replace(self._trial(row, own), variations=variations, warm=False)

    def trial(self, row: Row) -> Row:
        """The row's run for the proof: few steps, on several devices where there are.

        Of `train`, a row's precision, accumulation and LoRA stay, and all else falls away: it is the strategy that is
        proven, and by the table's optimizer, unless the row's is the strategy's own. Nothing is dropped at random. One
        of the published division keeps also how many times the table's batch it trains, as that was one of the flaws.
        Where several ranks hold a replica, a variation shows whether they drop the same units.
        """
        variations = {} if row.no_fp64 else {"fp64": {"precision": "fp64"}}
        if row.ranks_per_replica > 1:
            variations[DROPPED] = {"dropout": 0.1}
        return replace(self._trial(row, self._own_of_trial(row)), variations=variations)

    def _own_of_trial(self, row: Row) -> dict:
        """Settings of `train` that this row's trial, and its references, have of their own.

        Some strategies need shares of one size. How often Accelerate steps a schedule shows where the rate changes.
        """
        own = {}
        if row.needs_equal_shares:
            parts = self._replicas_of_trial(row) * self._accumulation_of_trial(row)
            own["global_batch"] = TRIAL_BATCH - TRIAL_BATCH % parts
        if row.options.get("prepared_scheduler") and (row.train.schedule != "constant" or row.train.warmup):
            own["schedule"] = "linear"
        return own

    @staticmethod
    def _processes_of_trial(row: Row) -> int:
        most, together = min(TRIAL_PROCESSES, row.hardware.devices), row.ranks_per_replica
        most = max(2, most) if row.hardware.device == "cpu" else most  # on one core too: nothing is timed
        return max(most - most % together, together)

    def _replicas_of_trial(self, row: Row) -> int:
        return self._processes_of_trial(row) // row.ranks_per_replica

    def _accumulation_of_trial(self, row: Row) -> int:
        return min(row.train.accumulation, TRIAL_BATCH // self._replicas_of_trial(row))

    def _trial(self, row: Row, own: dict) -> Row:
        most = self._processes_of_trial(row)
        times = row.train.global_batch / self.train.global_batch if row.division == "published" else 1
        shared = schema.of_configuration()["properties"]["train"]["properties"]["optimizer"]["enum"]
        train = replace(
            self.train,
            precision=row.train.precision,
            **{key: getattr(row.train, key) for key in LORA if key != "lora_dropout"},
            lora_dropout=0.0,
            optimizer=self.train.optimizer if row.train.optimizer in shared else row.train.optimizer,
            accumulation=self._accumulation_of_trial(row),
            global_batch=round(TRIAL_BATCH * times),
            device_batch=None,
            max_steps=TRIAL_STEPS,
            epochs=TRIAL_STEPS,  # an epoch has one step at least
            learning_rate=TRIAL_RATE,
            schedule="constant",
            warmup=0,
            **NOTHING_BESIDES,
        )
        train = replace(train, **own)
        # On one machine: it is the strategy that is proven, and what a network changes is shown elsewhere.
        asked = replace(row.asked, nodes=1, processes=most, threads=row.hardware.threads, oversubscribe=True)
        return replace(row.unattended, train=train, asked=asked, kind=Kind.TRIAL)

    def not_in_trial(self, row: Row) -> list[str]:
        """Settings of training that the row has of its own, and its trial does not: it is proven without them."""
        asked, proven = asdict(row.train), asdict(self.trial(row).train)
        own = [name for name, value in asdict(self.train).items() if asked[name] not in (value, proven[name])]
        return [name for name in own if name not in NOTHING_BESIDES and name not in OF_EVALUATION]

    def profiled(self, row: Row) -> Row:
        """The row's run in which a step's time is taken apart: a few steps of its timed runs, without evaluation."""
        train = replace(row.train, **NOTHING_BESIDES)
        return replace(row.unattended, train=train, kind=Kind.PROFILE, excerpt=self.profile.steps)

    def tried(self, name: str, raw: dict) -> Row:
        """A row of the search for the fastest recipe: a few steps, without evaluation. `raw` is as in `rows`."""
        steps = self.tune.steps  # in as many epochs as are needed
        train = replace(self.train, device_batch=None, max_steps=steps, epochs=steps, **NOTHING_BESIDES)
        row = read_row(name, raw, Shared(self.task, train, replace(self.hardware, nodes=1)), "tune")
        return replace(row, kind=Kind.TRY)

    def require_row(self, name: str, where: str, besides: tuple[str, ...] = ()) -> None:
        """Raises BadInput if this is not a row's name. The message begins with `where`, and names `besides` too."""
        if name not in self.rows:
            choices = ", ".join([*besides, *self.rows])
            raise BadInput(f"{where}: no such row. The configuration has: {choices}.{schema.hint(name, self.rows)}")

    @property
    def shared(self) -> Shared:
        return Shared(self.task, self.train, self.hardware)


def updates(train: Train) -> str:
    """What decides which low-rank updates a trial trains, as text that is the same where they are."""
    if not train.lora:
        return "none"
    return json.dumps([train.lora, float(train.lora_alpha or train.lora), sorted(train.lora_targets or [])])
