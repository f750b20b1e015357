"""Launchers start a run's ranks, like torchrun or DeepSpeed's own. A row's option `launcher` names one.

Each launcher is a class with its command, its requirements of the machine, and what it refuses of a row. A strategy
without that option is started as plain Python. The node's supervisor (run/processes.py) starts the launcher and watches
all processes below it. Nothing here imports PyTorch or a framework, which would take long.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from lockstep import provenance
from lockstep.config import precisions, registry
from lockstep.config.hardware import Hardware, shares_gpus, training_gpus
from lockstep.config.settings import Settings
from lockstep.errors import BadInput
from lockstep.files import write_text
from lockstep.paths import ACCELERATE, HOSTS, RENDEZVOUS, node_folder


class Launcher:
    """The base class of launchers, with the properties that most of them have."""

    from_one_node = False  # whether the ranks of all nodes are started from the first node, by ssh
    by_hand = False  # whether a person starts the ranks, and the run waits for them
    forkable = True  # whether untimed ranks may be forks with the variables of `rank_variables` instead
    tells_ranks = True  # whether ranks get their rank and world size from environment variables
    needs: tuple[registry.Need, ...] = ()  # optional packages, without which its rows are unavailable

    def command(self, settings: Settings, script: Path, folder: Path, rendezvous) -> list[str]:
        """The command that starts `script folder` once for each rank of this node.

        folder: the run's; rendezvous: where the ranks of all nodes meet (run/addresses.py: Rendezvous).
        """
        raise NotImplementedError

    def refuse(self, options: dict, hardware: Hardware, where: str) -> None:
        """Raise BadInput if a row with these options on this hardware contradicts the launcher."""

    def unavailable(self, options: dict, hardware: Hardware) -> str:
        """Why this launcher can't start such a row on this machine, and what would help; empty if it can."""
        return ""


def of(options: dict) -> Launcher:
    """The launcher of a row with these options."""
    return LAUNCHERS[options.get("launcher", "python")]


def meets_in_a_file(options: dict) -> bool:
    """Whether the rendezvous of a row with these options is a file in the run's folder."""
    return options.get("rendezvous") == "file"


class Python(Launcher):
    tells_ranks = False

    def command(self, settings, script, folder, rendezvous):
        return [sys.executable, str(script), str(folder)]


class Torchrun(Launcher):
    module = "torch.distributed.run"

    def command(self, settings, script, folder, rendezvous):
        hardware, port = settings.hardware, str(rendezvous.port)
        shape = ["--nproc-per-node", str(hardware.processes_per_node), "--max-restarts", "0"]
        if hardware.nodes > 1:
            shape += ["--nnodes", str(hardware.nodes)]
        if settings.options.get("rendezvous") == "c10d":  # numbers the nodes in order of arrival
            place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{rendezvous.address}:{port}"]
            place += ["--rdzv-id", rendezvous.name or "lockstep", "--local-addr", rendezvous.own]
        else:
            number = ["--node-rank", str(rendezvous.node)] if hardware.nodes > 1 else []
            place = [*number, "--master-addr", rendezvous.address, "--master-port", port]
        return [sys.executable, "-m", self.module, *shape, *place, str(script), str(folder)]


class Launch(Torchrun):
    """torchrun's predecessor, deprecated since PyTorch 1.9."""

    module = "torch.distributed.launch"


class Spawn(Launcher):
    """torch.multiprocessing.spawn, called by strategies/ddp_spawn.py itself."""

    forkable = False

    def command(self, settings, script, folder, rendezvous):
        hardware = settings.hardware
        file = (folder / RENDEZVOUS).absolute()
        if rendezvous.node == 0:
            file.unlink(missing_ok=True)  # a file of an earlier, killed run would make this run fail
        address = f"tcp://{rendezvous.address}:{rendezvous.port}"
        if meets_in_a_file(settings.options):
            address = f"file://{file}"
        ranks = [rendezvous.node * hardware.processes_per_node, hardware.processes_per_node, hardware.processes]
        program = [sys.executable, "-m", "lockstep.strategies.ddp_spawn", str(script), str(folder)]
        return [*program, address, *map(str, ranks)]


class Accelerate(Launcher):
    def command(self, settings, script, folder, rendezvous):
        hardware, own = settings.hardware, settings.options.get("config_file")
        program = [sys.executable, "-m", "accelerate.commands.launch"]
        file = node_folder(folder, rendezvous.node) / ACCELERATE
        if own:
            # Copied into the run's folder, as a record of what it was started with.
            file = file.with_suffix(Path(own).suffix)
            write_text(file, Path(own).read_text(encoding="utf-8"))
            shape = ["--num_processes", str(hardware.processes), "--main_process_port", str(rendezvous.port)]
            if hardware.nodes > 1:
                shape += ["--num_machines", str(hardware.nodes), "--machine_rank", str(rendezvous.node)]
                shape += ["--main_process_ip", rendezvous.address]
            return [*program, "--config_file", str(file), *shape, str(script), str(folder)]
        about = {
            "compute_environment": "LOCAL_MACHINE",
            # Also on a CPU: with use_cpu it would silently start only one process. The Accelerator gets the device.
            "distributed_type": "MULTI_GPU",
            "num_processes": hardware.processes,
            "num_machines": hardware.nodes,
            "machine_rank": rendezvous.node,
            "main_process_ip": rendezvous.address,
            "main_process_port": rendezvous.port,
            "rdzv_backend": "static",
            "mixed_precision": precisions.of(settings.precision).frameworks,
            "dynamo_config": {"dynamo_backend": "NO"},
            "use_cpu": False,
        }
        write_text(file, yaml.safe_dump(about))
        return [*program, "--config_file", str(file), str(script), str(folder)]


class DeepSpeed(Launcher):
    def command(self, settings, script, folder, rendezvous):
        hardware = settings.hardware
        # GPUs are passed by number. By count, DeepSpeed takes the machine's first ones despite CUDA_VISIBLE_DEVICES.
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

    def unavailable(self, options, hardware):
        if hardware.device == "cuda" and shares_gpus(asdict(hardware)):
            return "DeepSpeed's launcher starts one process for each GPU; set launcher: torchrun"
        if hardware.device == "cuda" and not training_gpus(hardware):
            return "DeepSpeed's launcher can't choose a part of a GPU (MIG); set launcher: torchrun"
        return ""


class HorovodRun(Launcher):
    from_one_node = True
    forkable = False

    def command(self, settings, script, folder, rendezvous):
        hardware, controller = settings.hardware, settings.options["controller"]
        program = Path(sys.executable).with_name("horovodrun")
        hosts = ",".join(f"{host}:{hardware.processes_per_node}" for host in rendezvous.hosts)
        shape = [f"--{controller}", "-np", str(hardware.processes), "-H", hosts]
        shape += ["--network-interface", rendezvous.interface]
        # Horovod's cache of facts about hosts would be a file in the user's home.
        return [str(program), "--disable-cache", *shape, sys.executable, str(script), str(folder)]

    def unavailable(self, options, hardware):
        if shares_gpus(asdict(hardware)) and provenance.horovod_has("nccl"):
            return "Horovod is built with NCCL here, which refuses two ranks on one GPU"
        if options["controller"] == "mpi" and not provenance.horovod_has("mpi"):
            return "Horovod is built without MPI; install it (Debian: libopenmpi-dev), then: make horovod"
        return ""


class Hand(Launcher):
    """A person starts the ranks in terminals, and the run waits for them (run/hand.py)."""

    by_hand = True
    forkable = False

    def command(self, settings, script, folder, rendezvous):
        return [sys.executable, "-m", "lockstep.run.hand", str(folder)]

    def refuse(self, options, hardware, where):
        if hardware.nodes > 1:
            raise BadInput(
                f"{where}.launcher: hand: ranks are started by hand on one machine, but hardware.nodes is"
                f" {hardware.nodes}. Choose another launcher, or set nodes to 1."
            )


class Ray(Launcher):
    """Ray Train's TorchTrainer, on a Ray cluster that lasts as long as the run (rank/ray_cluster.py)."""

    needs = (registry.Need("ray", "2.60.0", "pip install ray==2.60.0", only={}),)

    def command(self, settings, script, folder, rendezvous):
        place = [str(rendezvous.node), rendezvous.address, str(rendezvous.port), rendezvous.own]
        return [sys.executable, "-m", "lockstep.rank.ray_cluster", str(folder), *place]


LAUNCHERS = {
    "python": Python(),
    "torchrun": Torchrun(),
    "launch": Launch(),
    "spawn": Spawn(),
    "accelerate": Accelerate(),
    "deepspeed": DeepSpeed(),
    "horovodrun": HorovodRun(),
    "hand": Hand(),
    "ray": Ray(),
}


def rank_variables(rank: int, count: int, address: str, port: int | str) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank on one machine (PyTorch's `env://`)."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        **{"GROUP_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)},
        "TORCHELASTIC_RUN_ID": "none",  # frameworks recognise torchrun by it
    }
