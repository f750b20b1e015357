"""The hardware of a run, and a process's place in it. It imports no torch, so that the Snakefile can use it."""

from dataclasses import dataclass, replace

from lockstep.config import machine


@dataclass(frozen=True)
class Hardware:
    """The hardware of one row, with every `auto` resolved.

    `devices` is the number of devices that train, over all `nodes`, which have the same number each. A device is a GPU,
    or on a CPU a share of the cores with `threads` threads. `processes` is the number of ranks: one for each device,
    unless the strategy drives all devices from one process (ONE_PROCESS_ON in its file). With `oversubscribe` several
    ranks may share a GPU. `gpu_count` is the number of GPUs per node, 0 on a CPU. `interface` is the network interface
    between machines that was asked for; None on one machine, whose ranks communicate over loopback.
    """

    device: str
    devices: int
    processes: int
    gpu_count: int
    gpus: list[int] | None  # numbers of nvidia-smi, one for each device; None: the first visible ones
    threads: int
    workers: int  # worker processes of each rank that make its batches; 0: the rank makes them itself
    pin_memory: bool
    nodes: int
    interface: str | None
    backend: str
    port: int | str
    timeout: float
    oversubscribe: bool

    def gpu_of(self, local_rank: int) -> int:
        """The index of a rank's GPU on its node, from 0; ranks that share GPUs are assigned round-robin."""
        return local_rank % self.gpu_count

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes


@dataclass(frozen=True)
class World:
    """This process's place among the processes that train together, as returned by its strategy's `start`.

    Ranks hold replicas of the model, and each replica trains its share of every global batch. By default each rank
    holds a replica of its own. Several ranks may hold one together, for example tensor parallel ranks or the stages of
    a pipeline; they then see the same samples.
    """

    rank: int
    local_rank: int
    size: int  # the number of processes
    device: "torch.device"  # noqa: F821 - named only; this module does not import torch
    backend: str | None
    replica: int | None = None  # the number, from 0, of the replica that this rank holds or shares; None: its own
    replicas: int | None = None  # the number of replicas; None: the number of ranks
    # Whether this rank represents its replica: its ledger and its results in evaluation count. This is one rank of each
    # replica, which has a loss and the outputs of the model.
    counts: bool = True
    # The number of parts into which a replica's loss is divided: 1 if this rank has all of it; n if each of n ranks has
    # the sum over a part of the samples' terms, such as a part of each sequence; 0 if this rank has no loss.
    loss_parts: int = 1

    def __post_init__(self):
        if self.replicas is None:
            object.__setattr__(self, "replica", self.rank)
            object.__setattr__(self, "replicas", self.size)

    def in_replicas(self, ranks: int) -> "World":
        """The same place if groups of `ranks` neighbouring ranks hold a replica; the first rank of each counts."""
        first = self.rank % ranks == 0
        return replace(self, replica=self.rank // ranks, replicas=self.size // ranks, counts=first)

    @property
    def tells(self) -> bool:
        """Whether losses and pictures of this rank are shown during training: it is the first rank that counts."""
        return self.counts and self.replica == 0


def busy_cores(hardware: dict) -> int:
    """The number of cores of a machine that a run on `hardware` (a Hardware as a dict) keeps busy.

    On a GPU each process has one busy thread, which launches kernels. A worker process uses one core, too.
    """
    processes = hardware["processes"] // hardware["nodes"]
    return processes * ((hardware["threads"] if hardware["device"] == "cpu" else 1) + hardware.get("workers", 0))


def device_count(hardware: dict) -> int:
    """The number of devices, over all nodes, that a run on `hardware` (a Hardware as a dict) trains on.

    Devices are GPUs, which several ranks may share, or shares of a CPU's cores.
    """
    return hardware.get("gpu_count", 0) * hardware.get("nodes", 1) or hardware["devices"]


def shares_gpus(hardware: dict) -> bool:
    """Whether several ranks of a run on `hardware` (a Hardware as a dict) were on one GPU.

    Records of earlier versions lack `gpu_count`; in those, ranks never shared a GPU.
    """
    return 0 < hardware.get("gpu_count", 0) < hardware["processes"] // hardware.get("nodes", 1)


def cores_of(hardware: dict, cores: int) -> int:
    """The number of cores, over all nodes, that a run on `hardware` (a Hardware as a dict) computes on.

    cores: the number of one node's cores. Ranks share cores if they have more threads than that (`oversubscribe`).
    """
    return min(hardware["devices"] * hardware["threads"], cores * hardware.get("nodes", 1))


def shares_cores(hardware: dict, cores: int) -> bool:
    """Whether ranks of a run on `hardware` (a Hardware as a dict) shared the cores of a node, which has `cores`."""
    return hardware["device"] == "cpu" and cores_of(hardware, cores) < hardware["devices"] * hardware["threads"]


def training_gpus(hardware: Hardware) -> list[int]:
    """The GPUs that a run on `hardware` trains on, by their numbers in nvidia-smi; empty on a CPU."""
    return (hardware.gpus or machine.gpu_numbers())[: hardware.gpu_count] if hardware.device == "cuda" else []
