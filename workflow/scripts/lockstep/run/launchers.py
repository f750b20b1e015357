"""Launchers: the programs that start a run's ranks, as torchrun or DeepSpeed's own. A row's option `launcher` names it.

Each is a function that returns its command, of the row's settings, the training script, and the run's folder, on which
the script works; a strategy without that option is started as plain Python. What starts the launcher, and watches all
below it, is the run's supervisor (processes.py). It needs neither PyTorch nor a framework, which take long to import.
"""

import sys
from pathlib import Path

import yaml

from lockstep.config.hardware import free_port, training_gpus
from lockstep.config.settings import Settings
from lockstep.files import write_text
from lockstep.paths import ACCELERATE, RENDEZVOUS


def command(settings: Settings, script: Path, folder: Path) -> list[str]:
    """The command of the launcher that a row asks for."""
    return LAUNCHERS[settings.options.get("launcher", "python")](settings, script, folder)


def python(settings, script, folder):
    return [sys.executable, str(script), str(folder)]


def torchrun(settings, script, folder, module="torch.distributed.run"):
    hardware = settings.hardware
    processes = ["--nproc-per-node", str(hardware.processes), "--max-restarts", "0"]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port(hardware.port))]
    return [sys.executable, "-m", module, *processes, *address, str(script), str(folder)]


def launch(settings, script, folder):
    """What torchrun replaced; deprecated since PyTorch 1.9."""
    return torchrun(settings, script, folder, "torch.distributed.launch")


def spawn(settings, script, folder):
    """torch.multiprocessing.spawn, called by strategies/ddp_spawn.py itself."""
    meeting = (folder / RENDEZVOUS).absolute()
    meeting.unlink(missing_ok=True)  # one left by a killed run would make this one fail
    address = f"tcp://127.0.0.1:{free_port(settings.hardware.port)}"
    if settings.options["rendezvous"] == "file":
        address = f"file://{meeting}"
    processes = str(settings.hardware.processes)
    return [sys.executable, "-m", "lockstep.strategies.ddp_spawn", str(script), str(folder), address, processes]


def accelerate(settings, script, folder):
    hardware, own = settings.hardware, settings.options.get("config_file")
    port = str(free_port(hardware.port))
    program = [sys.executable, "-m", "accelerate.commands.launch"]
    if own:
        # A copy, which tells later what the run was started with.
        file = (folder / ACCELERATE).with_suffix(Path(own).suffix)
        write_text(file, Path(own).read_text(encoding="utf-8"))
        shape = ["--num_processes", str(hardware.processes), "--main_process_port", port]
        return [*program, "--config_file", str(file), *shape, str(script), str(folder)]
    file = folder / ACCELERATE
    about = {
        "compute_environment": "LOCAL_MACHINE",
        # On a CPU too: with use_cpu it would start one process only, and say nothing. The Accelerator is told.
        "distributed_type": "MULTI_GPU",
        "num_processes": hardware.processes,
        "num_machines": 1,
        "main_process_ip": "127.0.0.1",
        "main_process_port": int(port),
        "mixed_precision": "no" if settings.precision == "fp32" else settings.precision,
        "dynamo_config": {"dynamo_backend": "NO"},
        "use_cpu": False,
    }
    write_text(file, yaml.safe_dump(about))
    return [*program, "--config_file", str(file), str(script), str(folder)]


def deepspeed(settings, script, folder):
    hardware = settings.hardware
    # By their numbers: told how many, it takes the first of the machine, whatever CUDA_VISIBLE_DEVICES leaves.
    gpus = training_gpus(hardware)
    devices = ["--include", "localhost:" + ",".join(map(str, gpus))]
    if not gpus:
        devices = ["--num_accelerators", str(hardware.processes)]
    address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port(hardware.port))]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *devices, *address, str(script), str(folder)]


def horovodrun(settings, script, folder):
    controller, processes = settings.options["controller"], str(settings.hardware.processes)
    program = Path(sys.executable).with_name("horovodrun")
    shape = [f"--{controller}", "-np", processes, "-H", f"localhost:{processes}", "--network-interface", "lo"]
    # Its cache of what it found out about the hosts would be a file in the user's home.
    return [str(program), "--disable-cache", *shape, sys.executable, str(script), str(folder)]


LAUNCHERS = {
    launcher.__name__: launcher for launcher in (python, torchrun, launch, spawn, accelerate, deepspeed, horovodrun)
}
