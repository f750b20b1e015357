"""This machine's hardware, detected without importing torch, so that the Snakefile can use it, too."""

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
DMI = Path("/sys/class/dmi/id")  # the machine's vendor and model, from its firmware or virtual machine
UNKNOWN_KIND = "of unknown kind"  # for a virtual machine without a vendor name
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # Linux's driver of AMD's GPUs: a folder for each CPU and GPU
# Environment variables that change speed or numbers. Only these are recorded, so that no secret is.
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
    """The hardware of one row, with every `auto` resolved.

    `devices` is the number of devices that train, over all `nodes`, which have the same number each. A device is a GPU,
    or on a CPU a share of the cores with `threads` threads. `processes` is the number of ranks: one for each device,
    unless the strategy drives all devices from one process (ONE_PROCESS_ON in its file). With `oversubscribe` several
    ranks may share a GPU. `gpu_count` is the number of GPUs per node, 0 on a CPU.
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


def training_gpus(hardware: Hardware) -> list[int]:
    """The GPUs that a run on `hardware` trains on, by their numbers in nvidia-smi; empty on a CPU."""
    return (hardware.gpus or gpu_numbers())[: hardware.gpu_count] if hardware.device == "cuda" else []


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


def cpu_cores() -> int:
    """The number of cores that this process may use, by its affinity and its cgroup's quota (as in Docker)."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")  # Linux cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def cpu_info(key: str) -> str | None:
    """The value of a key for the first core in /proc/cpuinfo; None if there is no such line."""
    match = re.search(rf"^{key}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else None


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def governor(cpu: Path = CPU) -> str | None:
    """The first core's frequency governor, such as `performance`; None if there is none, as in most VMs."""
    return _line(cpu / "cpu0" / "cpufreq" / "scaling_governor")


def virtual_machine() -> str | None:
    """The kind of virtual machine that this is; None if it is a physical machine, or hides that it is virtual."""
    if "hypervisor" not in (cpu_info("flags") or "").split():
        return None
    return " ".join(filter(None, (_line(DMI / name) for name in ("sys_vendor", "product_name")))) or UNKNOWN_KIND


def _line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def visible_gpus() -> int:
    """The number of GPUs that a process started here would see: NVIDIA's, or AMD's if PyTorch is built for ROCm."""
    chosen = _named_in("CUDA_VISIBLE_DEVICES")
    if chosen in ([], ["-1"], ["NoDevFiles"]):  # Slurm sets NoDevFiles
        return 0
    if not built_for_gpus():
        return 0
    if built_for_amd():
        return _amd_gpus()
    if any(name.startswith("MIG-") for name in chosen or ()):
        return 1  # CUDA shows a process only one part of a GPU (MIG), even if several are named
    return min(nvml.count(), len(chosen)) if chosen else nvml.count()


def _named_in(variable: str) -> list[str] | None:
    """The GPUs that a variable such as CUDA_VISIBLE_DEVICES names; None if it is not set."""
    value = os.environ.get(variable)
    if value is None:
        return None
    return [name.strip() for name in value.split(",")] if value.strip() else []


def _amd_gpus() -> int:
    """The number of AMD GPUs that the kernel has and the variables allow; HIP reads CUDA_VISIBLE_DEVICES too."""
    properties = [node / "properties" for node in KFD.glob("*")]
    # CPUs are nodes as well, but have no SIMD units.
    there = sum(bool(re.search(r"^simd_count [1-9]", file.read_text(), re.MULTILINE)) for file in properties)
    chosen = map(_named_in, ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    return min([there, *(sum(name not in ("", "-1") for name in names) for names in chosen if names is not None)])


def gpu_numbers() -> list[int]:
    """The numbers of the visible GPUs, as environment variables name them; empty if those name parts of GPUs (MIG)."""
    own = built_for_amd() and "HIP_VISIBLE_DEVICES" in os.environ  # takes precedence on ROCm
    chosen = _named_in("HIP_VISIBLE_DEVICES" if own else "CUDA_VISIBLE_DEVICES") or []
    if any(name.startswith("MIG-") for name in chosen):
        return []
    numbers = [int(name) for name in chosen if name.isdigit()]
    if chosen and len(numbers) == len(chosen):
        return numbers
    return nvml.numbers(chosen) or list(range(visible_gpus()))


def refuse_misnamed_gpus() -> None:
    """Raise BadInput if CUDA_VISIBLE_DEVICES names a GPU that does not exist, or one twice.

    CUDA reports no error: it drops the first such GPU and all after it, or all GPUs.
    """
    names, there = _named_in("CUDA_VISIBLE_DEVICES"), nvml.count()
    # Without NVML the GPUs are unknown, and a part of a GPU (MIG) has no number.
    if not names or not there or any(name.startswith("MIG-") for name in names):
        return
    chosen, numbers = ",".join(names), []
    for name in names:
        named = [int(name)] if name.isdecimal() else nvml.numbers([name])
        if len(named) != 1 or named[0] >= there:
            known = ", ".join(map(str, range(there)))
            raise BadInput(f"CUDA_VISIBLE_DEVICES={chosen}: {name!r} is not a GPU of this machine, which has {known}.")
        if named[0] in numbers:
            raise BadInput(f"CUDA_VISIBLE_DEVICES={chosen}: {name!r} is named twice. Name each GPU once.")
        numbers += named


def gpu_kinds(numbers: list[int]) -> list[str]:
    """The distinct names of these GPUs; empty if the driver does not report them."""
    names = {nvml.name(nvml.gpu(number)) for number in numbers}
    return [] if None in names else sorted(names)


def selection(gpus: list[int] | None) -> dict[str, str]:
    """Environment variables that restrict a process to these GPUs, or to none if None, in nvidia-smi's order."""
    # CUDA's default order is fastest first, but NVML's numbers follow the PCI bus; they must name the same GPUs.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # ROCm reads CUDA's variable, too, but not together with its own (torch/cuda/__init__.py, _parse_visible_devices).
    variable = "HIP_VISIBLE_DEVICES" if built_for_amd() else "CUDA_VISIBLE_DEVICES"
    return order if gpus is None else order | {variable: ",".join(map(str, gpus))}


def built_for_gpus() -> bool:
    """Whether the installed PyTorch is built for GPUs, by its files; True if only container images have PyTorch."""
    return not importlib.util.find_spec("torch") or _built("cuda") or built_for_amd()


def built_for_amd() -> bool:
    """Whether the installed PyTorch is built for AMD's GPUs (ROCm), which it calls cuda."""
    return _built("hip")


def _built(kind: str) -> bool:
    torch = importlib.util.find_spec("torch")
    version = (Path(torch.origin).parent / "version.py").read_text() if torch else ""
    said = re.search(rf"^{kind}\b.*= (.*)$", version, re.MULTILINE)
    return bool(said) and said[1] != "None"


def resolve(asked, row: str = "") -> Hardware:
    """Resolve every `auto` in the configuration's section `hardware` for this machine, which stands for each node.

    `devices` and `processes` of the result are those of one node; only a row knows whether it uses several nodes.
    Raises BadInput if more is asked for than the machine has.
    """
    where = f"rows.{row}" if row else "hardware"
    if sys.platform != "linux":
        raise BadInput(
            f"Lockstep runs on Linux, and this is {sys.platform}. It measures CPUs and GPUs that PyTorch calls cuda;"
            " Apple's GPU (mps) is a single device without process groups. Docker on a Mac runs it on the CPU: make"
            " images."
        )
    here = asked.node_gpus is None  # otherwise other machines train, whose GPUs can't be examined here
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
            raise BadInput(f"{where}.gpus: {asked.gpus} are asked for, but this runs on the CPU. Set device to cuda.")
        there = gpu_numbers() if here else list(range(gpus))
        if gone := sorted(set(asked.gpus) - set(there)):
            names = ", ".join(map(str, there))
            raise BadInput(f"{where}.gpus: {gone} can't be used here; the GPUs here are {names}. Choose among those.")
        gpus = len(asked.gpus)
    chosen = None if asked.gpus is None else sorted(asked.gpus)
    most, kind = (gpus, "GPU") if device == "cuda" else (cores, "CPU core")
    devices = (gpus if device == "cuda" else min(2, cores)) if asked.processes == "auto" else asked.processes
    if devices > most and not asked.oversubscribe:
        there = f"is 1 {kind}" if most == 1 else f"are {most} {kind}s"
        raise BadInput(
            f"{where}.processes: {devices}, but there {there} here. Ask for at most {most}, or set oversubscribe: true,"
            " to let several processes share one."
        )
    if device == "cuda" and here:
        used = (chosen or gpu_numbers())[:devices]
        refuse_divided(used, where)
        refuse_mixed(asked, used, where)
    threads = max(1, cores // devices) if asked.threads in ("auto", "all") else asked.threads
    if devices > cores and asked.threads in ("auto", "all") and not asked.oversubscribe:
        there = "hardware.node_cores says that there are" if asked.node_cores else "there are"
        raise BadInput(
            f"{where}.processes: {devices}, but {there} {cores} CPU cores, and each process needs at least one. Ask for"
            " fewer processes; if other machines train, set node_cores to the cores of a job there."
        )
    if devices * threads > cores and not asked.oversubscribe:
        raise BadInput(
            f"{where}.threads: {devices} processes of {threads} threads need more than the {cores} CPU cores here."
            f" Ask for at most {max(1, cores // devices)}."
        )
    if asked.pin_memory is True and device == "cpu":
        raise BadInput(
            f"{where}.pin_memory: it is for copies from the host to a GPU, but this runs on the CPU. Set it to auto."
        )
    shared = device == "cuda" and devices > gpus  # several ranks share a GPU, which NCCL refuses
    backend = asked.backend
    if backend == "auto":
        backend = "nccl" if device == "cuda" and not shared else "gloo"
    if backend == "nccl" and shared:
        raise BadInput(
            f"{where}.backend: NCCL refuses two ranks on one GPU, but {devices} would share {gpus}. Set it to gloo or"
            " auto."
        )
    if backend == "nccl" and device == "cpu":
        raise BadInput(
            f"{where}.backend: nccl works between GPUs only, but this runs on the CPU. Set it to gloo or auto."
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
    """Raise BadInput if these GPUs (numbers of nvidia-smi) are of different models, unless mixed_gpus is set."""
    kinds = [] if asked.mixed_gpus else gpu_kinds(numbers)
    if len(kinds) > 1:
        raise BadInput(
            f"{where}.gpus: GPUs of different models would train together ({', '.join(kinds)}), and the slowest would"
            " set the pace. Choose equal ones by their numbers, or set mixed_gpus: true."
        )


def refuse_divided(numbers: list[int], where: str) -> None:
    """Raise BadInput if one of these GPUs (numbers of nvidia-smi) is divided into parts (MIG).

    A process would then see one part of one GPU, whatever number it asks for.
    """
    for number in numbers:
        if nvml.divided(nvml.gpu(number)):
            raise BadInput(
                f"{where}.gpus: GPU {number} is divided into parts (MIG), of which a process sees only one. Name a part"
                " that nvidia-smi -L lists, as CUDA_VISIBLE_DEVICES=MIG-...; or choose undivided GPUs."
            )


def refuse_less(asked, hardware: Hardware) -> None:
    """Raise BadInput if this machine, which is about to train, has less than was `asked`, or unsuitable GPUs."""
    for key, wanted, there, what in (
        ("node_cores", asked.node_cores, cpu_cores(), "CPU cores"),
        ("node_gpus", asked.node_gpus, visible_gpus(), "GPUs"),
    ):
        if wanted and there < wanted:
            raise BadInput(
                f"hardware.{key}: {wanted}, but on {platform.node()} this job may use {there} {what}. Set it to what a"
                " job gets there, or request more."
            )
    if asked.node_gpus and hardware.device == "cuda":  # otherwise `resolve` has checked the GPUs already
        refuse_misnamed_gpus()
        refuse_divided(training_gpus(hardware), "hardware")
        refuse_mixed(asked, training_gpus(hardware), "hardware")


def free_port(wanted: int | str) -> int:
    """`wanted` if it is a number and the port is free, otherwise a free port chosen by the system."""
    for candidate in (wanted, 0) if wanted != "auto" else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                print(f"port {candidate} is in use; another is taken", file=sys.stderr)
                continue
            return probe.getsockname()[1]
    raise BadInput("hardware.port: no free TCP port on this machine.")
