"""Launchers: the programs that start a run's ranks, as torchrun or DeepSpeed's own. A row's option `launcher` names it.

Each is a function that returns its command on one node, of the row's settings, the training script, the run's folder,
on which the script works, and where the ranks of all nodes meet (coordination.py); a strategy without that option is
started as plain Python. What starts the launcher, and watches all below it, is the node's supervisor (processes.py). It
needs neither PyTorch nor a framework, which take long to import.
"""

import sys
from pathlib import Path

import yaml

from lockstep.config.hardware import training_gpus
from lockstep.config.settings import Settings
from lockstep.files import write_text
from lockstep.paths import ACCELERATE, HOSTS, RENDEZVOUS, node_folder
from lockstep.run.coordination import Rendezvous

FROM_ONE_NODE = ("horovodrun",)  # these start the ranks on all nodes, by ssh


def command(settings: Settings, script: Path, folder: Path, rendezvous: Rendezvous) -> list[str]:
    """The command of the launcher that a row asks for."""
    return LAUNCHERS[settings.options.get("launcher", "python")](settings, script, folder, rendezvous)


def meets_in_a_file(options: dict) -> bool:
    """Whether ranks of a row with these options find each other through a file in the run's folder."""
    return options.get("rendezvous") == "file"


def python(settings, script, folder, rendezvous):
    return [sys.executable, str(script), str(folder)]


def torchrun(settings, script, folder, rendezvous, module="torch.distributed.run"):
    hardware, port = settings.hardware, str(rendezvous.port)
    shape = ["--nproc-per-node", str(hardware.processes_per_node), "--max-restarts", "0"]
    if hardware.nodes > 1:
        shape += ["--nnodes", str(hardware.nodes)]
    if settings.options.get("rendezvous") == "c10d":  # which numbers the nodes as they come
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{rendezvous.address}:{port}"]
        meeting += ["--rdzv-id", rendezvous.name or "lockstep", "--local-addr", rendezvous.own]
    else:
        number = ["--node-rank", str(rendezvous.node)] if hardware.nodes > 1 else []
        meeting = [*number, "--master-addr", rendezvous.address, "--master-port", port]
    return [sys.executable, "-m", module, *shape, *meeting, str(script), str(folder)]


def launch(settings, script, folder, rendezvous):
    """What torchrun replaced; deprecated since PyTorch 1.9."""
    return torchrun(settings, script, folder, rendezvous, "torch.distributed.launch")


def spawn(settings, script, folder, rendezvous):
    """torch.multiprocessing.spawn, called by strategies/ddp_spawn.py itself."""
    hardware = settings.hardware
    file = (folder / RENDEZVOUS).absolute()
    if rendezvous.node == 0:
        file.unlink(missing_ok=True)  # one left by a killed run would make this one fail
    address = f"file://{file}" if meets_in_a_file(settings.options) else f"tcp://{rendezvous.address}:{rendezvous.port}"
    ranks = [rendezvous.node * hardware.processes_per_node, hardware.processes_per_node, hardware.processes]
    return [
        *(sys.executable, "-m", "lockstep.strategies.ddp_spawn", str(script), str(folder)),
        *(address, *map(str, ranks)),
    ]


def accelerate(settings, script, folder, rendezvous):
    hardware, own = settings.hardware, settings.options.get("config_file")
    program = [sys.executable, "-m", "accelerate.commands.launch"]
    file = node_folder(folder, rendezvous.node) / ACCELERATE
    if own:
        # A copy, which tells later what the run was started with.
        file = file.with_suffix(Path(own).suffix)
        write_text(file, Path(own).read_text(encoding="utf-8"))
        shape = ["--num_processes", str(hardware.processes), "--main_process_port", str(rendezvous.port)]
        if hardware.nodes > 1:
            shape += ["--num_machines", str(hardware.nodes), "--machine_rank", str(rendezvous.node)]
            shape += ["--main_process_ip", rendezvous.address]
        return [*program, "--config_file", str(file), *shape, str(script), str(folder)]
    about = {
        "compute_environment": "LOCAL_MACHINE",
        # On a CPU too: with use_cpu it would start one process only, and say nothing. The Accelerator is told.
        "distributed_type": "MULTI_GPU",
        "num_processes": hardware.processes,
        "num_machines": hardware.nodes,
        "machine_rank": rendezvous.node,
        "main_process_ip": rendezvous.address,
        "main_process_port": rendezvous.port,
        "rdzv_backend": "static",
        "mixed_precision": "no" if settings.precision == "fp32" else settings.precision,
        "dynamo_config": {"dynamo_backend": "NO"},
        "use_cpu": False,
    }
    write_text(file, yaml.safe_dump(about))
    return [*program, "--config_file", str(file), str(script), str(folder)]


def deepspeed(settings, script, folder, rendezvous):
    hardware = settings.hardware
    # By their numbers: told how many, it takes the first of the machine, whatever CUDA_VISIBLE_DEVICES leaves.
    gpus = training_gpus(hardware)
    if hardware.nodes > 1:
        file = node_folder(folder, rendezvous.node) / HOSTS
        slots = max(gpus) + 1 if gpus else hardware.processes_per_node
        write_text(file, "".join(f"{host} slots={slots}\n" for host in rendezvous.hosts))
        devices = ["--hostfile", str(file), "--no_ssh", "--node_rank", str(rendezvous.node)]
        if gpus:
            numbers = ",".join(map(str, gpus))
            devices += ["--include", "@".join(f"{host}:{numbers}" for host in rendezvous.hosts)]
    elif gpus:
        devices = ["--include", "localhost:" + ",".join(map(str, gpus))]
    else:
        devices = ["--num_accelerators", str(hardware.processes)]
    address = ["--master_addr", rendezvous.address, "--master_port", str(rendezvous.port)]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *devices, *address, str(script), str(folder)]


def horovodrun(settings, script, folder, rendezvous):
    hardware, controller = settings.hardware, settings.options["controller"]
    program = Path(sys.executable).with_name("horovodrun")
    hosts = ",".join(f"{host}:{hardware.processes_per_node}" for host in rendezvous.hosts)
    shape = [f"--{controller}", "-np", str(hardware.processes), "-H", hosts]
    shape += ["--network-interface", rendezvous.interface]
    # Its cache of what it found out about the hosts would be a file in the user's home.
    return [str(program), "--disable-cache", *shape, sys.executable, str(script), str(folder)]


def hand(settings, script, folder, rendezvous):
    """Somebody starts the ranks, in terminals; this waits for them (run/hand.py)."""
    return [sys.executable, "-m", "lockstep.run.hand", str(folder)]


LAUNCHERS = {
    launcher.__name__: launcher
    for launcher in (python, torchrun, launch, spawn, accelerate, deepspeed, horovodrun, hand)
}


def rank_variables(rank: int, count: int, address: str, port: int | str) -> dict[str, str]:
    """What torchrun tells a rank of one machine, of so many, by its environment (PyTorch's `env://`)."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        **{"GROUP_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)},
        "TORCHELASTIC_RUN_ID": "none",  # by which frameworks know torchrun
    }
