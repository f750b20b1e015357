"""What the recorder and the timer have in common: ranks, and the files of a process of a user's script."""

import json
import os
import sys
import time

FOLDER = os.environ.get("LOCKSTEP_RECORDING", "")
# The names of variables that were set before the script's launcher was started; their values are not recorded.
KNOWN = set(os.environ.get("LOCKSTEP_KNOWN", "").split(","))
ELSEWHERE = os.environ.get("LOCKSTEP_ELSEWHERE", "")  # a folder from which nothing may be imported
WAIT = 60  # seconds that a finished rank waits for the others
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_NTASKS")


def rank_and_world():
    """This process's rank and world size, from torch.distributed, Horovod, or a launcher's variables."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)
    world = next((int(os.environ[name]) for name in WORLDS if os.environ.get(name, "").isdigit()), 1)
    return rank, world


def note_start():
    """Record how this process was started, since a replay starts rank 0 in the same way."""
    about = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "torch": sys.modules["torch"].__version__,
        "variables": {name: value for name, value in os.environ.items() if name not in KNOWN},
    }
    with open(os.path.join(FOLDER, f"started.{os.getpid()}.json"), "w") as stream:
        json.dump(about, stream)


def write(about):
    """Write what is known of this process; a reader never sees half of the file."""
    rank, world = rank_and_world()
    about = {
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "elsewhere": imported_from_elsewhere(),
        **about,
    }
    file = os.path.join(FOLDER, f"process.{os.getpid()}.json")
    with open(f"{file}.tmp", "w") as stream:
        json.dump(about, stream)
    os.replace(f"{file}.tmp", file)


def imported_from_elsewhere():
    """The modules that were imported from the folder LOCKSTEP_ELSEWHERE, with their files; not an environment's."""
    if not ELSEWHERE:
        return {}
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {
        name: file
        for name, file in files.items()
        if isinstance(file, str)
        and os.path.abspath(file).startswith(ELSEWHERE + os.sep)
        and "site-packages" not in file
        and not os.path.abspath(file).startswith(sys.prefix + os.sep)
    }


def end_together(world):
    """End this process when all ranks have done their steps; leaving earlier would make the others fail."""
    open(os.path.join(FOLDER, f"done.{os.getpid()}"), "w").close()
    until = time.monotonic() + WAIT
    while time.monotonic() < until and len([1 for name in os.listdir(FOLDER) if name.startswith("done.")]) < world:
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.terminate()
    os._exit(0)
