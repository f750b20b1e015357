"""Resolve the configuration's section `hardware` on this machine, and refuse what the machine does not have."""

import platform
import sys

from lockstep import nvml
from lockstep.config import machine
from lockstep.config.hardware import Hardware, training_gpus
from lockstep.errors import BadInput


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
    cores, gpus = asked.node_cores or machine.cpu_cores(), machine.visible_gpus() if here else asked.node_gpus
    device = _device(asked, gpus, where)
    if asked.gpus is not None:
        _refuse_absent_gpus(asked, device, gpus, where)
        gpus = len(asked.gpus)
    chosen = None if asked.gpus is None else sorted(asked.gpus)
    devices = _devices(asked, device, gpus, cores, where)
    if device == "cuda" and here:
        used = (chosen or machine.gpu_numbers())[:devices]
        refuse_divided(used, where)
        refuse_mixed(asked, used, where)
    threads = _threads(asked, devices, cores, where)
    if asked.pin_memory is True and device == "cpu":
        raise BadInput(
            f"{where}.pin_memory: it is for copies from the host to a GPU, but this runs on the CPU. Set it to auto."
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
        backend=_backend(asked, device, devices, gpus, where),
        port=asked.port,
        timeout=asked.timeout,
        oversubscribe=asked.oversubscribe,
    )


def _device(asked, gpus: int, where: str) -> str:
    """The type of the devices that train, cpu or cuda. gpus: the number of GPUs that may be used."""
    here, device = asked.node_gpus is None, asked.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        why, otherwise = "no GPU or driver is visible" if here else "node_gpus is 0", ""
        if here and not machine.built_for_gpus():
            why, otherwise = "PyTorch is its CPU build", ", or install its build for CUDA: make setup TORCH=cuda"
            if machine._amd_gpus():
                otherwise = ", or install its build for AMD's GPUs (ROCm), which make setup then keeps"
        raise BadInput(
            f"{where}.device: cuda is asked for, but no GPU can be used here ({why}). Set it to cpu or auto{otherwise}."
        )
    if device == "cuda" and here:
        machine.refuse_misnamed_gpus()
    return device


def _refuse_absent_gpus(asked, device: str, gpus: int, where: str) -> None:
    """Raise BadInput if the GPUs that are asked for by their numbers are not there."""
    if device == "cpu":
        raise BadInput(f"{where}.gpus: {asked.gpus} are asked for, but this runs on the CPU. Set device to cuda.")
    there = machine.gpu_numbers() if asked.node_gpus is None else list(range(gpus))
    if gone := sorted(set(asked.gpus) - set(there)):
        names = ", ".join(map(str, there))
        raise BadInput(f"{where}.gpus: {gone} can't be used here; the GPUs here are {names}. Choose among those.")


def _devices(asked, device: str, gpus: int, cores: int, where: str) -> int:
    """The number of devices, each with a process, on a machine with these numbers of GPUs and CPU cores."""
    most, kind = (gpus, "GPU") if device == "cuda" else (cores, "CPU core")
    devices = (gpus if device == "cuda" else min(2, cores)) if asked.processes == "auto" else asked.processes
    if devices > most and not asked.oversubscribe:
        there = f"is 1 {kind}" if most == 1 else f"are {most} {kind}s"
        raise BadInput(
            f"{where}.processes: {devices}, but there {there} here. Ask for at most {most}, or set oversubscribe: true,"
            " to let several processes share one."
        )
    return devices


def _threads(asked, devices: int, cores: int, where: str) -> int:
    """The threads of each process."""
    shared_out = asked.threads in ("auto", "all")
    threads = max(1, cores // devices) if shared_out else asked.threads
    if devices > cores and shared_out and not asked.oversubscribe:
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
    return threads


def _backend(asked, device: str, devices: int, gpus: int, where: str) -> str:
    """The backend of the process group: nccl between GPUs, unless ranks share one, which NCCL refuses; else gloo."""
    shared = device == "cuda" and devices > gpus
    if asked.backend == "auto":
        return "nccl" if device == "cuda" and not shared else "gloo"
    if asked.backend == "nccl" and shared:
        raise BadInput(
            f"{where}.backend: NCCL refuses two ranks on one GPU, but {devices} would share {gpus}. Set it to gloo or"
            " auto."
        )
    if asked.backend == "nccl" and device == "cpu":
        raise BadInput(
            f"{where}.backend: nccl works between GPUs only, but this runs on the CPU. Set it to gloo or auto."
        )
    return asked.backend


def refuse_mixed(asked, numbers: list[int], where: str) -> None:
    """Raise BadInput if these GPUs (numbers of nvidia-smi) are of different models, unless mixed_gpus is set."""
    kinds = [] if asked.mixed_gpus else machine.gpu_kinds(numbers)
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
        ("node_cores", asked.node_cores, machine.cpu_cores(), "CPU cores"),
        ("node_gpus", asked.node_gpus, machine.visible_gpus(), "GPUs"),
    ):
        if wanted and there < wanted:
            raise BadInput(
                f"hardware.{key}: {wanted}, but on {platform.node()} this job may use {there} {what}. Set it to what a"
                " job gets there, or request more."
            )
    if asked.node_gpus and hardware.device == "cuda":  # otherwise `resolve` has checked the GPUs already
        machine.refuse_misnamed_gpus()
        refuse_divided(training_gpus(hardware), "hardware")
        refuse_mixed(asked, training_gpus(hardware), "hardware")
