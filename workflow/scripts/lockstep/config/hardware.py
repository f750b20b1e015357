"""What this machine offers, found without importing torch, so that the Snakefile can ask too."""

import importlib.util
import os
import platform
import re
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import nvml
from lockstep.errors import BadInput

CPU = Path("/sys/devices/system/cpu")
DMI = Path("/sys/class/dmi/id")  # what the firmware, or the virtual machine, says that this machine is
UNKNOWN_KIND = "of unknown kind"  # a virtual machine that does not tell
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # Linux's driver of AMD's GPUs: a folder for each CPU and GPU
# Environment variables that change speed or numbers. A list of what is kept, so that no secret can slip in.
VARIABLES = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "LD_PRELOAD",
]


@dataclass(frozen=True)
class Hardware:
    """What one row runs on, with every `auto` resolved.

    `devices` is how many train, on all `nodes` together, each of which has as many: GPUs, or on a CPU shares of its
    cores of `threads` threads each. `processes` is how many ranks there are for them: one for each, unless the strategy
    drives all from one (ONE_PROCESS_ON of its file). With `oversubscribe` several of them may be on one GPU.
    `gpu_count` is how many GPUs a node has, 0 on a CPU.
    """

    device: str
    devices: int
    processes: int
    gpu_count: int
    gpus: list[int] | None  # by the numbers of nvidia-smi, one for each device; None: the first that are visible
    threads: int
    workers: int  # processes of each rank that put its batches together; 0: it does so itself
    pin_memory: bool
    nodes: int
    interface: str | None
    backend: str
    port: int | str
    timeout: float
    oversubscribe: bool

    def gpu_of(self, local_rank: int) -> int:
        """Which of a node's GPUs a rank takes, from 0. Where ranks share GPUs they go round."""
        return local_rank % self.gpu_count

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes


def busy_cores(hardware: dict) -> int:
    """How many cores of a machine a run on `hardware` (a Hardware as a dict) keeps busy.

    On a GPU each process has one thread that launches kernels, whatever it may use besides. A worker has one core, too.
    """
    processes = hardware["processes"] // hardware["nodes"]
    return processes * ((hardware["threads"] if hardware["device"] == "cpu" else 1) + hardware.get("workers", 0))


def device_count(hardware: dict) -> int:
    """The number of devices, over all nodes, that a run on `hardware` (a Hardware as a dict) trains on.

    These are GPUs, which several ranks may share, or on a CPU shares of its cores.
    """
    return hardware.get("gpu_count", 0) * hardware.get("nodes", 1) or hardware["devices"]


def shares_gpus(hardware: dict) -> bool:
    """Whether several ranks of a run on `hardware` (a Hardware as a dict) were on one GPU.

    Results of earlier versions do not say `gpu_count`, and had none so.
    """
    return 0 < hardware.get("gpu_count", 0) < hardware["processes"] // hardware.get("nodes", 1)


def training_gpus(hardware: Hardware) -> list[int]:
    """The GPUs that a run on `hardware` trains on, by the numbers of nvidia-smi; none on a CPU."""
    return (hardware.gpus or gpu_numbers())[: hardware.gpu_count] if hardware.device == "cuda" else []


@dataclass(frozen=True)
class World:
    """This process's place among those that train together, as its strategy's `start` found it.

    Ranks hold replicas of the model, and each replica trains its share of every global batch. A replica may be held by
    one rank, which is so unless a strategy says otherwise, or by several: tensor parallel ranks, the stages of a
    pipeline. These see the same samples.
    """

    rank: int
    local_rank: int
    size: int  # the number of processes
    device: "torch.device"  # noqa: F821 - named only; this module does not import torch
    backend: str | None
    replica: int | None = None  # which replica this rank holds, or holds a part of, from 0; None: it has one of its own
    replicas: int | None = None  # of how many; None: as many as there are ranks
    # Whether this rank speaks for its replica: its ledger and its results in evaluation count. One rank of each replica
    # does; it has a loss, and the outputs of the model.
    counts: bool = True
    # Into how many parts the loss of a replica is divided: 1 where this rank has it whole; n where n ranks have the sum
    # over a part of the samples' terms each, as over a part of each sequence; 0 where this rank has none.
    loss_parts: int = 1

    def __post_init__(self):
        if self.replicas is None:
            object.__setattr__(self, "replica", self.rank)
            object.__setattr__(self, "replicas", self.size)

    def in_replicas(self, ranks: int) -> "World":
        """The same place, where so many neighbouring ranks hold a replica together, of which the first one counts."""
        first = self.rank % ranks == 0
        return replace(self, replica=self.rank // ranks, replicas=self.size // ranks, counts=first)

    @property
    def tells(self) -> bool:
        """Whether this is the rank whose losses and pictures are shown while it trains: the first that counts."""
        return self.counts and self.replica == 0


def cpu_cores() -> int:
    """Cores this process may use: its affinity, and its control group's quota where one is set (as in Docker)."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")  # Linux cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def cpu_info(key: str) -> str | None:
    """What /proc/cpuinfo says of the first core; None where it has no such line."""
    match = re.search(rf"^{key}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else None


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def governor(cpu: Path = CPU) -> str | None:
    """What sets the first core's clock, as `performance`; None where none does, as in most virtual machines."""
    return _line(cpu / "cpu0" / "cpufreq" / "scaling_governor")


def virtual_machine() -> str | None:
    """Which kind of virtual machine this is, as far as it tells; None on a machine that is none, or says nothing."""
    if "hypervisor" not in (cpu_info("flags") or "").split():
        return None
    return " ".join(filter(None, (_line(DMI / name) for name in ("sys_vendor", "product_name")))) or UNKNOWN_KIND


def _line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def visible_gpus() -> int:
    """GPUs that a process started here would see: NVIDIA's, or AMD's where PyTorch is its build for those (ROCm)."""
    chosen = _named_in("CUDA_VISIBLE_DEVICES")
    if chosen in ([], ["-1"], ["NoDevFiles"]):  # the last is Slurm's
        return 0
    if not built_for_gpus():
        return 0
    if built_for_amd():
        return _amd_gpus()
    if any(name.startswith("MIG-") for name in chosen or ()):
        return 1  # CUDA shows a process one part of a GPU, however many are named
    return min(nvml.count(), len(chosen)) if chosen else nvml.count()


def _named_in(variable: str) -> list[str] | None:
    """The GPUs that an environment variable names, as CUDA_VISIBLE_DEVICES does; None where it is not set."""
    value = os.environ.get(variable)
    if value is None:
        return None
    return [name.strip() for name in value.split(",")] if value.strip() else []


def _amd_gpus() -> int:
    """How many AMD GPUs the kernel has and the variables leave; HIP reads CUDA_VISIBLE_DEVICES too."""
    properties = [node / "properties" for node in KFD.glob("*")]
    # CPUs are nodes as well, and have no SIMD units.
    there = sum(bool(re.search(r"^simd_count [1-9]", file.read_text(), re.MULTILINE)) for file in properties)
    chosen = map(_named_in, ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    return min([there, *(sum(name not in ("", "-1") for name in names) for names in chosen if names is not None)])


def gpu_numbers() -> list[int]:
    """The numbers of the visible GPUs, as the environment names them; none where it names parts of GPUs (MIG)."""
    own = built_for_amd() and "HIP_VISIBLE_DEVICES" in os.environ  # which ROCm heeds first
    chosen = _named_in("HIP_VISIBLE_DEVICES" if own else "CUDA_VISIBLE_DEVICES") or []
    if any(name.startswith("MIG-") for name in chosen):
        return []
    numbers = [int(name) for name in chosen if name.isdigit()]
    if chosen and len(numbers) == len(chosen):
        return numbers
    return nvml.numbers(chosen) or list(range(visible_gpus()))


def refuse_misnamed_gpus() -> None:
    """Raises BadInput where CUDA_VISIBLE_DEVICES names a GPU that is not there, or one twice.

    CUDA says nothing of that: it leaves out the first such GPU and all that are named after it, or takes none at all.
    """
    names, there = _named_in("CUDA_VISIBLE_DEVICES"), nvml.count()
    # Without NVML there is nothing to hold it against, and a part of a GPU (MIG) has no number.
    if not names or not there or any(name.startswith("MIG-") for name in names):
        return
    chosen, numbers = ",".join(names), []
    for name in names:
        named = [int(name)] if name.isdecimal() else nvml.numbers([name])
        if len(named) != 1 or named[0] >= there:
            known = ", ".join(map(str, range(there)))
            raise BadInput(f"CUDA_VISIBLE_DEVICES={chosen}: {name!r} is no GPU here, where the GPUs are {known}.")
        if named[0] in numbers:
            raise BadInput(f"CUDA_VISIBLE_DEVICES={chosen}: {name!r} is named twice. Name each GPU once.")
        numbers += named


def gpu_kinds(numbers: list[int]) -> list[str]:
    """The names of these GPUs, each once; none where the driver does not tell."""
    names = {nvml.name(nvml.gpu(number)) for number in numbers}
    return [] if None in names else sorted(names)


def selection(gpus: list[int] | None) -> dict[str, str]:
    """The environment variables that leave a process these GPUs only, or all that it has, in nvidia-smi's order."""
    # CUDA's own order puts the fastest first, nvidia-smi's goes by the bus: what NVML tells would be of other GPUs.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # ROCm heeds CUDA's variable too, but not beside one of its own (torch/cuda/__init__.py, _parse_visible_devices).
    variable = "HIP_VISIBLE_DEVICES" if built_for_amd() else "CUDA_VISIBLE_DEVICES"
    return order if gpus is None else order | {variable: ",".join(map(str, gpus))}


def built_for_gpus() -> bool:
    """Whether the installed PyTorch is built for GPUs, asked of its files; True where none is, as beside containers."""
    return not importlib.util.find_spec("torch") or _built("cuda") or built_for_amd()


def built_for_amd() -> bool:
    """Whether the installed PyTorch is the build for AMD's GPUs (ROCm), which calls them cuda."""
    return _built("hip")


def _built(kind: str) -> bool:
    torch = importlib.util.find_spec("torch")
    version = (Path(torch.origin).parent / "version.py").read_text() if torch else ""
    said = re.search(rf"^{kind}\b.*= (.*)$", version, re.MULTILINE)
    return bool(said) and said[1] != "None"


def resolve(asked, row: str = "") -> Hardware:
    """Replace every `auto` in the configuration's `hardware` section by what this machine has, as each node has it.

    `devices` and `processes` are those of one node here; only a row knows whether it takes several.
    Raises BadInput where more is asked for than there is.
    """
    where = f"rows.{row}" if row else "hardware"
    if sys.platform != "linux":
        raise BadInput(
            f"Lockstep runs on Linux, and this is {sys.platform}. It measures CPUs and GPUs that PyTorch calls cuda;"
            " Apple's (mps) are one device without process groups. Docker on a Mac runs it on the CPU: make images."
        )
    here = asked.node_gpus is None  # GPUs elsewhere are not looked at
    cores, gpus = asked.node_cores or cpu_cores(), visible_gpus() if here else asked.node_gpus
    device = ("cuda" if gpus else "cpu") if asked.device == "auto" else asked.device
    if device == "cuda" and not gpus:
        why, otherwise = "no GPU or driver is visible" if here else "node_gpus is 0", ""
        if here and not built_for_gpus():
            why, otherwise = "PyTorch is its CPU build", ", or install its build for CUDA: make setup TORCH=cuda"
            if _amd_gpus():
                otherwise = ", or install its build for AMD's GPUs (ROCm), which make setup then keeps"
        raise BadInput(
            f"{where}.device: cuda is asked for, but no GPU can be used here ({why}). Set it to cpu or auto{otherwise}."
        )
    if device == "cuda" and here:
        refuse_misnamed_gpus()
    if asked.gpus is not None:
        if device == "cpu":
            raise BadInput(f"{where}.gpus: {asked.gpus} are asked for, and this runs on the CPU. Set device to cuda.")
        there = gpu_numbers() if here else list(range(gpus))
        if gone := sorted(set(asked.gpus) - set(there)):
            names = ", ".join(map(str, there))
            raise BadInput(f"{where}.gpus: {gone} can't be used here, where the GPUs are {names}. Choose among those.")
        gpus = len(asked.gpus)
    chosen = None if asked.gpus is None else sorted(asked.gpus)
    most, kind = (gpus, "GPU") if device == "cuda" else (cores, "CPU core")
    devices = (gpus if device == "cuda" else min(2, cores)) if asked.processes == "auto" else asked.processes
    if devices > most and not asked.oversubscribe:
        there = f"is 1 {kind}" if most == 1 else f"are {most} {kind}s"
        raise BadInput(
            f"{where}.processes: {devices}, but there {there} here. Ask for at most {most}, or set oversubscribe: true,"
            " to let several share one."
        )
    if device == "cuda" and here:
        used = (chosen or gpu_numbers())[:devices]
        refuse_divided(used, where)
        refuse_mixed(asked, used, where)
    threads = max(1, cores // devices) if asked.threads in ("auto", "all") else asked.threads
    if devices > cores and asked.threads in ("auto", "all") and not asked.oversubscribe:
        there = "hardware.node_cores says that there are" if asked.node_cores else "there are"
        raise BadInput(
            f"{where}.processes: {devices}, and {there} {cores} CPU cores, one for each process at least. Ask for"
            " fewer, or, where other machines train, set node_cores to what a job has there."
        )
    if devices * threads > cores and not asked.oversubscribe:
        raise BadInput(
            f"{where}.threads: {devices} processes of {threads} threads need more than the {cores} CPU cores here."
            f" Ask for at most {max(1, cores // devices)}."
        )
    if asked.pin_memory is True and device == "cpu":
        raise BadInput(
            f"{where}.pin_memory: it is for the way from the host to a GPU, and this runs on the CPU. Set it to auto."
        )
    shared = device == "cuda" and devices > gpus  # by several ranks each, which NCCL refuses
    backend = asked.backend
    if backend == "auto":
        backend = "nccl" if device == "cuda" and not shared else "gloo"
    if backend == "nccl" and shared:
        raise BadInput(
            f"{where}.backend: NCCL refuses two ranks on one GPU, and {devices} are to share {gpus}. Set it to gloo or"
            " auto."
        )
    if backend == "nccl" and device == "cpu":
        raise BadInput(
            f"{where}.backend: nccl works between GPUs only, and this runs on the CPU. Set it to gloo or auto."
        )
    return Hardware(
        device=device,
        devices=devices,
        processes=devices,
        gpu_count=min(devices, gpus) if device == "cuda" else 0,
        gpus=chosen[:devices] if chosen else None,
        threads=threads,
        workers=asked.workers,
        pin_memory=device == "cuda" if asked.pin_memory == "auto" else asked.pin_memory,
        nodes=asked.nodes,
        interface=asked.interface,
        backend=backend,
        port=asked.port,
        timeout=asked.timeout,
        oversubscribe=asked.oversubscribe,
    )


def refuse_mixed(asked, numbers: list[int], where: str) -> None:
    """Raises BadInput where these GPUs, numbered as by nvidia-smi, are of unlike kinds, and that was not asked for."""
    kinds = [] if asked.mixed_gpus else gpu_kinds(numbers)
    if len(kinds) > 1:
        raise BadInput(
            f"{where}.gpus: GPUs of unlike kinds would train together ({', '.join(kinds)}), and the slowest would set"
            " the pace. Choose like ones by their numbers, or set mixed_gpus: true."
        )


def refuse_divided(numbers: list[int], where: str) -> None:
    """Raises BadInput where one of these GPUs, numbered as by nvidia-smi, is divided into parts (MIG).

    A process sees one part of one GPU then, whatever number it asks for.
    """
    for number in numbers:
        if nvml.divided(nvml.gpu(number)):
            raise BadInput(
                f"{where}.gpus: GPU {number} is divided into parts (MIG), of which a process sees one. Name a part, as"
                " nvidia-smi -L lists them: CUDA_VISIBLE_DEVICES=MIG-...; or choose GPUs that are whole."
            )


def refuse_less(asked, hardware: Hardware) -> None:
    """Raises BadInput where this machine, which is to train, has less than was `asked`, or other GPUs."""
    for key, wanted, there, what in (
        ("node_cores", asked.node_cores, cpu_cores(), "CPU cores"),
        ("node_gpus", asked.node_gpus, visible_gpus(), "GPUs"),
    ):
        if wanted and there < wanted:
            raise BadInput(
                f"hardware.{key}: {wanted}, but on {platform.node()} this job may use {there} {what}. Set it to what a"
                " job is given there, or ask for more."
            )
    if asked.node_gpus and hardware.device == "cuda":  # else they were looked at when it was resolved
        refuse_misnamed_gpus()
        refuse_divided(training_gpus(hardware), "hardware")
        refuse_mixed(asked, training_gpus(hardware), "hardware")


def free_port(wanted: int | str) -> int:
    """`wanted` if it is a number and nobody listens there, else a free port of the system's choice."""
    for candidate in (wanted, 0) if wanted != "auto" else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                print(f"port {candidate} is in use; another is taken", file=sys.stderr)
                continue
            return probe.getsockname()[1]
    raise BadInput("hardware.port: no free TCP port on this machine.")
