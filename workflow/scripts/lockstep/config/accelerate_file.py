"""A user's configuration file for `accelerate launch`, as written by `accelerate config`.

Such a file could start programs elsewhere (SageMaker, TPU pods, mpirun) or train on other devices than the row's. This
is refused before anything starts. strategies/accelerate.py checks how the ranks then train.
"""

from lockstep.config import own_files, precisions
from lockstep.config.hardware import Hardware
from lockstep.config.sections import Train
from lockstep.errors import BadInput

# Keys with any value. Accelerate takes every other key for one of its own arguments, even for the script.
FREE = ("debug", "use_cpu", "rdzv_backend", "same_network", "main_process_ip", "main_process_port", "downcast_bf16")
FREE += ("machine_rank", "main_training_function", "enable_cpu_affinity", "dynamo_config", "dynamo_backend")


def refuse(file: str, options: dict, train: Train, hardware: Hardware, where: str) -> None:
    """Raise BadInput if the file does not exist or contradicts the row `where`."""
    said = own_files.read(file, where)
    held = _wanted(hardware, train.precision)
    own_files.refuse_foreign(said, (*FREE, *held), file, where)
    for key, (wanted, why) in held.items():
        if said.get(key) not in (None, wanted):
            raise own_files.contradiction(file, where, key, said[key], wanted, why)
    if not said.get("distributed_type"):
        raise BadInput(f"{where}: {file} does not say distributed_type, which Accelerate needs. Set it to MULTI_GPU.")


def _wanted(hardware: Hardware, precision: str) -> dict[str, tuple]:
    """The required values of keys that the file may set, each with a reason."""
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
