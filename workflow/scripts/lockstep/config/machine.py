"""This machine: its cores, its GPUs and its PyTorch, found without importing torch: the Snakefile uses it, too."""

import importlib.util
import os
import platform
import re
import socket
import sys
from pathlib import Path

from lockstep import nvml
from lockstep.errors import BadInput

CPU = Path("/sys/devices/system/cpu")
PROCESS = Path("/proc/self")
DMI = Path("/sys/class/dmi/id")  # the machine's vendor and model, from its firmware or virtual machine
UNKNOWN_KIND = "of unknown kind"  # for a virtual machine without a vendor name
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # Linux's driver of AMD's GPUs: a folder for each CPU and GPU
# Environment variables for finding errors, which make rows slower, with the values that do not.
SLOWING = {"TORCH_DISTRIBUTED_DEBUG": ("", "OFF")}
SLOWING_ON_GPUS = SLOWING | dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"), ("", "0"))
# Environment variables by which torch.compile compiles nothing, if they are 1; and one by which it leaves what it fails
# to compile as it is, whatever its value. PyTorch says nothing of either.
NOT_COMPILING, NOT_WHERE_IT_FAILS = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"), "TORCHDYNAMO_SUPPRESS_ERRORS"
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
    "PYTORCH_CUDA_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE",
    *SLOWING_ON_GPUS,
    *NOT_COMPILING,
    NOT_WHERE_IT_FAILS,
    "LD_PRELOAD",
]


def slowing(device: str) -> list[str]:
    """The variables that are set here to slow down rows on `device` (cpu or cuda), as NAME=VALUE."""
    harmless = SLOWING_ON_GPUS if device == "cuda" else SLOWING
    given = {name: os.environ.get(name, "") for name in harmless}
    return [f"{name}={value}" for name, value in given.items() if value.upper() not in harmless[name]]


def not_compiling() -> list[str]:
    """The variables that are set here by which torch.compile would compile nothing, or not all, as NAME=VALUE."""
    names = [name for name in NOT_COMPILING if os.environ.get(name) == "1"]
    names += [NOT_WHERE_IT_FAILS] if os.environ.get(NOT_WHERE_IT_FAILS) else []
    return [f"{name}={os.environ[name]}" for name in names]


def cpu_cores() -> int:
    """The number of cores that this process may use, by its affinity and the quotas of its cgroups (as in Docker).

    The smallest quota counts, be it of its own group or of one around it, such as a slice of systemd or a pod.
    """
    quotas = filter(None, map(_cpu_quota, _cgroups()))
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def _cgroups() -> list[Path]:
    """The folders of the cgroups that may limit this process's CPU time: its own ones, and all those around them.

    Linux has one hierarchy of groups (version 2), or one for each kind of limit (version 1), or both.
    """
    try:
        lines = (PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (PROCESS / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = {}  # this process's group by kind of limit, "" for version 2: lines such as 4:cpu,cpuacct:/docker/1234
    for line in lines:
        _, kinds, group = line.split(":", 2)
        own |= dict.fromkeys(kinds.split(","), group)
    folders = []
    for mount in mounts:  # such as: 36 25 0:31 /docker/1234 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
        before, _, after = mount.partition(" - ")
        root, top = before.split()[3:5]
        system, *_, options = after.split()
        kind = {"cgroup2": "", "cgroup": "cpu"}.get(system)
        if kind not in own or (kind and kind not in options.split(",")):
            continue
        # What is mounted may be the group `root` of the hierarchy, as in a container. A group outside it is not seen.
        below = os.path.relpath(own[kind], root)
        folder = Path(top) if below.startswith("..") else Path(top, below)
        folders += [each for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return folders


def _cpu_quota(folder: Path) -> float | None:
    """The number of cores whose time the processes of a cgroup may use together; None if it has no such limit."""
    try:
        if (folder / "cpu.max").is_file():  # version 2: microseconds in each period, or max, and the period
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
    except OSError:  # the outermost group has no such file
        return None
    return int(limit) / int(period) if limit.strip() not in ("max", "-1") else None


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
