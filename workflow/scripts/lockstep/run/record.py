"""The record of a run, and the summaries of its ranks that it is made from: their fields, declared once.

Ranks, supervisor and report use these types, so that a misspelt field is an error. Users' scripts read record.json by
these names: add freely, never rename. run/record_files.py reads and writes the files.
"""

from dataclasses import dataclass

from lockstep.run.facts import fact

SHA256 = "^[0-9a-f]{64}$"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Seconds; in a record each is the largest over ranks."""

    setup: dict[str, float] = fact("Seconds by part.", values={"minimum": 0})
    warm_up_seconds: float | None = fact(
        "Before the first window: forward and backward of one micro-batch of each size and width.", None, minimum=0
    )
    cold_seconds: float | None = fact(
        "The time by which the warm-up exceeded the same steps in the window: the cost of what happens only once.",
        None,
        minimum=0,
    )
    first_step_seconds: float = fact("From launching the processes to the end of the first step.", exclusiveMinimum=0)
    train_seconds: float = fact("All steps, without evaluation and saving.", exclusiveMinimum=0)
    stall_seconds: float = fact(
        "The time by which stalled steps exceeded the median step. A stall takes over ten times the upper quartile, for"
        " example to compile. It is part of train_seconds.",
        minimum=0,
    )
    step_seconds_median: float = fact("Of the steps after the first three.", exclusiveMinimum=0)
    step_seconds_quartiles: list[float] = fact("Of the slowest rank.", minItems=2, maxItems=2)
    evaluation_seconds: float | None = fact("All evaluations on the dev split, without saving.", None, minimum=0)
    total_seconds: float = fact("From launching to the last evaluation and checkpoint.", exclusiveMinimum=0)


@dataclass(frozen=True, kw_only=True)
class RankClock(Clock):
    window: list[float] = fact("When the timed part began and ended (perf_counter, seconds).", minItems=2, maxItems=2)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All evaluations on the dev split together."""

    seconds: float = fact("The time of the slowest rank.", exclusiveMinimum=0)
    samples: int = fact(minimum=1)
    samples_per_second: float = fact(exclusiveMinimum=0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work that the plan takes; operations by the formula in metrics.py. `padded_` counts padding, too."""

    samples: int
    tokens: int
    padded_tokens: int
    flops: float
    padded_flops: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """That work per second of train_seconds. A model may multiply no matrices, so operations may be 0."""

    samples_per_second: float = fact(minimum=0)
    tokens_per_second: float = fact(minimum=0)
    padded_tokens_per_second: float = fact(minimum=0)
    flops_per_second: float = fact(minimum=0)
    padded_flops_per_second: float = fact(minimum=0)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The peak memory of a rank while steps were timed, in MiB.

    Only GPUs have reserved_mb; only CPUs have proportional_mb, which is read when windows close.
    """

    before_mb: float | None = fact("In use when the first window opened.", None)
    peak_mb: float | None = fact("Allocated on its GPU, or resident on a CPU (with its workers).")
    reserved_mb: float | None
    proportional_mb: float | None


@dataclass(frozen=True, kw_only=True)
class Memory(RankMemory):
    """The same for all ranks together, and for each of them."""

    before_mb_per_rank: list[float] | None = None
    peak_mb_per_rank: list[float] | None
    reserved_mb_per_rank: list[float] | None
    proportional_mb_per_rank: list[float] | None


@dataclass(frozen=True, kw_only=True)
class RankEnergy:
    """The joules that a machine's devices counted in the timed window; null if a kind of device has no counter."""

    gpu: float | None = fact(minimum=0)
    cpu: float | None = fact(minimum=0)
    counters: list[str] = fact("The counters whose sum this is.", [])


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The same for all machines."""

    gpu_joules: float | None = fact(minimum=0)
    cpu_joules: float | None = fact(minimum=0)
    counters: list[str] = fact("The counters whose sum this is, of all machines.", [])


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that trained, as NVML reports it; null for figures that NVML does not report."""

    gpu: int = fact("Its number as nvidia-smi shows it.", minimum=0)
    utilisation: float | None = fact("The mean percentage of the time in which a kernel ran on it.")
    sm_mhz: float | None = fact("The mean clock of its multiprocessors.")
    sm_mhz_range: list[float] | None = fact("The lowest and the highest clock.", None)
    memory_mb: float | None = fact(
        "The peak of all memory in use on it, in MiB, including contexts and other programs."
    )
    throttled: list[str] = fact("What slowed it down.")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What else used the machine in the timed window, sampled by a separate process. Ranges are [lowest, highest]."""

    samples: int = fact(minimum=0)
    others_cores: float = fact("The CPU cores that other processes used, in the mean.")
    cpu_mhz: list[float] | None = None
    cpu_celsius: list[float] | None = None
    gpu_mhz: list[float] | None = None
    gpu_celsius: list[float] | None = None
    gpus: list[Gpu] = fact("Each GPU that trained.", [])
    disturbed: list[str] = fact("Why the times can't be trusted; empty if they can.")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The states that a run saved, from which it can be resumed."""

    count: int
    seconds: float = fact("What saving them took, outside the timed window.")
    bytes: int = fact("The size of the last one.")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A model that a run kept at the end of an epoch, in its folder snapshots/."""

    epoch: int = fact(minimum=1)
    step: int = fact("The number of steps done.", minimum=1)
    dev: dict | None = fact("The scores on the dev split, if it was evaluated after this step.")
    seconds: float = fact("The time that saving it took, outside the timed window.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """An attempt at a run that was made again, because others disturbed it."""

    started: str
    wall_seconds: float = 0
    train_seconds: float
    disturbed: list[str]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the proof compares besides weights. The variations of a trial write only this."""

    losses: list[float] = fact("Each step's mean loss over the global batch.")
    gradient_norm: float | None = fact(
        "The gradient's norm in the first step, before clipping; only trials of the proof record it.", None
    )


@dataclass(frozen=True, kw_only=True)
class Trained(Compared):
    """What a rank says of the whole run; a record has rank 0's."""

    settings: dict = fact(
        "The settings as read back from the live objects of rank 0. Its world_size is that of torch.distributed: the"
        " number of ranks."
    )
    rates: list[float] = fact(
        "The learning rate of each step, read from the live optimizer, if a framework steps the schedule in a way of"
        " its own. Otherwise empty: a run with another rate than the schedule's fails.",
        [],
    )
    terms: dict[str, list[float]] = fact(
        "If the loss is a sum of several terms: by the name of each term, its mean over the global batch of each step,"
        " before it is multiplied by its weight. Empty for a loss of one term.",
        {},
    )
    dev: list[dict] = fact("Evaluations on the dev split.")
    resumed: list[int] = fact(
        "The number of steps after which the run was resumed, once for each interruption. The times of a resumed run"
        " are not ranked.",
        [],
        items={"minimum": 1},
    )
    saved: Saved | None = fact("The states that the run saved.", None)
    snapshots: list[Snapshot] = fact("The models that the run kept at the end of epochs.", [])


@dataclass(frozen=True, kw_only=True)
class RankSummary(Trained):
    """What a rank writes when it has finished: ranks/<rank>.json."""

    clock: RankClock
    memory: RankMemory
    memory_by_gpu: list[float] = fact("Its peak memory on each visible GPU, in MiB.")
    reserved_by_gpu: list[float] = fact("The same for memory that PyTorch reserved.")
    local_rank: int
    node: int = 0
    bytes_read: int | None
    energy: RankEnergy | None = fact("Of its machine, if it is the first rank there.")
    seed: int = fact("The dropout seed.")
    hashes: dict[str, str] = fact("Of the initial `weights` and of the `plan`.")
    notes: list[str] = fact("Facts that a reader of the table must know.")
    events: list[dict] = fact("Lines of events.jsonl.", [])


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What is recorded of every run, also of one that failed (failed.json)."""

    row: str
    strategy: str
    division: str = fact("closed, open, or the name of a study.")
    status: str = fact(enum=["ok", "failed", "skipped", "unavailable"])
    reason: str = fact("Why the status is not ok.")
    notes: list[str] = fact("Facts that a reader of the table must know.", [])
    world_size: int = fact(
        "The number of devices, by a name that is kept: the world size of torch.distributed is settings.world_size. It"
        " is the number after n in the name of the run's folder: the number of ranks or, if one rank drives several"
        " GPUs, of those GPUs. If ranks share a GPU, asked.hardware.gpu_count has the number of GPUs of each node.",
        minimum=1,
    )
    replicas: int | None = fact(
        "The number of replicas of the model that shared each global batch. It is below the number of ranks if several"
        " ranks hold a replica together, such as the stages of a pipeline.",
        None,
        minimum=1,
    )
    repeat: int = fact(minimum=1)
    session: str | None = fact(
        "What started the run. Runs are paired with those of the same repetition and session.", None
    )
    disturbed_before: list[Disturbed] = fact("The attempts that this run was repeated after.", [])
    precision: str = fact("A name in config/precisions.py.")
    global_batch: int = fact(minimum=1)
    asked: dict = fact("The row's settings as the configuration has them.")
    started: str = fact("Date and time, ISO 8601.", format="date-time")
    log: str


@dataclass(frozen=True, kw_only=True)
class Record(Trained, Begun):
    """The record of a run that succeeded: record.json."""

    status: str = fact(enum=["ok"])
    nodes: list[dict] = fact(
        "The host, the network interface and the names of the GPUs of each node, if there are several.", []
    )
    steps: int = fact(minimum=1)
    departed: list[str] = fact(
        "How the run departed from its plan (by its ledger) and from its schedule (by its rates). Only rows that train"
        " another model by design may depart.",
        [],
    )
    seeds: list[int] = fact("The dropout seed of each rank.")
    command: list[str]
    wall_seconds: float = fact("From starting the first process to the end of the last.")
    clock: Clock
    evaluation: Evaluation | None = fact("All evaluations on the dev split together; null if there were none.", None)
    work: Work
    throughput: Throughput
    memory: Memory
    memory_by_gpu: list[float] = fact(
        "The peak memory of the tensors of all ranks on each GPU, in MiB; empty on a CPU.", []
    )
    reserved_by_gpu: list[float] = fact("The same for memory that PyTorch reserved.", [])
    bytes_read_per_rank: list[int | None] = fact("Bytes that the kernel fetched from storage for each rank.", [])
    energy: Energy
    watch: Watch
    hashes: dict[str, str] = fact(
        "sha256 of the data, the plan and the initial weights.",
        required=["data", "plan", "weights"],
        values={"pattern": SHA256},
    )


@dataclass(frozen=True, kw_only=True)
class Tested(Record):
    """A record as the report has it, with files that lie beside it."""

    test: dict = fact("The test of its model, with its `text`.", {})
    environment: dict = fact("Its env.json, without long parts.", {})
    peak: dict | None = fact(
        "Its `devices`, and the `flops_per_second` of each, the mean if they are unlike; None if unknown.", None
    )
    log_end: list[str] = fact("Empty, as only a run that failed has the last lines of its log.", [])
