"""A configuration file of the user's own for `accelerate launch`, as `accelerate config` writes them.

Much of what such a file may say would start programs elsewhere (SageMaker, TPU pods, mpirun), or let other devices
train than the row's: that is refused before anything starts. How the ranks then train is checked against the row by
strategies/accelerate.py.
"""

from lockstep.config import own_files, precisions
from lockstep.config.hardware import Hardware
from lockstep.errors import BadInput

# Keys that may be anything. Of others Accelerate takes whatever they hold for its own arguments, the script among them.
FREE = ("debug", "use_cpu", "rdzv_backend", "same_network", "main_process_ip", "main_process_port", "downcast_bf16")
FREE += ("machine_rank", "main_training_function", "enable_cpu_affinity", "dynamo_config", "dynamo_backend")


def refuse(file: str, hardware: Hardware, precision: str, where: str) -> None:
    """Raises BadInput where there is no such file, or it says something else than the row `where`."""
    said = own_files.read(file, where)
    held = _wanted(hardware, precision)
    own_files.refuse_foreign(said, (*FREE, *held), file, where)
    for key, (wanted, why) in held.items():
        if said.get(key) not in (None, wanted):
            raise own_files.contradiction(file, where, key, said[key], wanted, why)
    if not said.get("distributed_type"):
        raise BadInput(f"{where}: {file} does not say distributed_type, which Accelerate needs. Set it to MULTI_GPU.")


def _wanted(hardware: Hardware, precision: str) -> dict[str, tuple]:
    """What keys have to be where they are there, and why."""
    return {
        "compute_environment": ("LOCAL_MACHINE", "the row trains on this machine"),
        "distributed_type": (
            "MULTI_GPU",
            "the row trains with DistributedDataParallel, for which Accelerate starts processes by that name only, on a"
            " CPU too",
        ),
        "num_processes": (hardware.processes, f"the row has {hardware.processes}"),
        "num_machines": (hardware.nodes, f"the row has {hardware.nodes}"),
        "gpu_ids": ("all", "the row's GPUs are chosen by hardware.gpus"),
        "mixed_precision": (precisions.of(precision).frameworks, f"the row trains in {precision}"),
    }
