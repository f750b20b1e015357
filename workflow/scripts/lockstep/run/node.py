"""What each node does in a run: it starts the launcher of its own ranks, and watches them and the machine."""

import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep import paths
from lockstep.config.hardware import training_gpus
from lockstep.config.machine import selection
from lockstep.config.row import Row
from lockstep.files import named_when_full
from lockstep.paths import SCRIPTS
from lockstep.run import addresses, hand, watcher
from lockstep.run.addresses import Rendezvous
from lockstep.run.processes import Outcome, Supervised, supervise
from lockstep.run.progress import NODE

# Variables by which schedulers, or launchers around this process, tell a program its rank, the number of ranks, its job
# and how to train. They are removed, because frameworks obey them besides their own launcher's. MPI's own configuration
# is kept.
OF_OUTSIDE = re.compile(
    r"""
    ((LOCAL|GROUP|ROLE|NODE|CROSS)_)?RANK | ((LOCAL|GROUP|ROLE)_)?WORLD_SIZE | (LOCAL|CROSS)_SIZE | ROLE_NAME
    | MASTER_(ADDR|PORT)
    | (PET|TORCHELASTIC)_.*                                 # torchrun
    | (ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_.*   # accelerate launch
    | LT_.*                                                 # Lightning's
    | HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|CONTROLLER|CPU_OPERATIONS|GLOO_(IFACE|RENDEZVOUS_.*)|ELASTIC)
    | OMPI_(?!MCA_|ALLOW_).* | PMIX_(?!MCA_|PREFIX).*       # Open MPI
    | OMPI_MCA_(ess(_.*)?|initial_wdir|num_procs)
    | OMPI_MCA_orte_(app_num|bound_at_launch|ess_.*|hnp_uri|jobfam_session_dir|launch|local_daemon_uri|num_nodes
                     |precondition_transports|top_session_dir)
    | PMI_.* | MPI_LOCAL(RANKID|NRANKS) | (MV2|MVP)_COMM_WORLD_.*   # MPICH, Intel MPI, MVAPICH
    | (SLURM|FLUX|LSB|JSM|PALS|PBS)_.* | CSM_ALLOCATION_ID
    | (DLTS|DLWS)_JOB_ID | AZUREML_EXPERIMENT_ID | SM_(FRAMEWORK_PARAMS|HP_MP_PARAMETERS|TRAINING_ENV)
    """,
    re.VERBOSE,
)


def train(
    row: Row,
    folder: Path,
    command: list[str] | Callable[[], None],
    rendezvous: Rendezvous,
    steps: int,
    others: list[int] = (),
    meanwhile: Callable = lambda log: contextlib.nullcontext(lambda request: None),
) -> Outcome:
    """Run `command`, this node's launcher, until it ends; its output goes to this node's run.log.

    others: the ids of other processes that were on its GPUs before. `meanwhile(log)` is a context whose value is called
    repeatedly, with a processes.StopRequest.
    """
    node_folder = paths.node_folder(folder, rendezvous.node)
    log = node_folder / paths.LOG
    log.unlink(missing_ok=True)
    # Launchers leave files in the temporary folder, so they get one that is removed when they have ended.
    with (
        named_when_full(log),
        log.open("a", encoding="utf-8") as stream,  # appending, as ranks that were started by hand do too
        tempfile.TemporaryDirectory(prefix="lockstep-") as scratch,
    ):
        said = f"in forks of process {os.getpid()}" if callable(command) else f"$ {' '.join(command)}"
        stream.write(f"{said}\n")
        stream.flush()
        environment = _variables(row, rendezvous) | {"TMPDIR": scratch}
        run = Supervised(
            folder,
            row.hardware.processes_per_node,
            steps,
            row.hardware.timeout,
            saves=bool(row.train.checkpoint_every),
            node=rendezvous.node,
            nodes=row.hardware.nodes,
        )
        with (
            hand.called(row, folder, rendezvous, _own_variables(row, rendezvous), stream) as by_hand,
            watcher.beside(node_folder, training_gpus(row.hardware), others, by_hand),
            meanwhile(stream) as called,
        ):
            return supervise(run, command, environment, stream, called)


def show(row: Row, results: Path, repeat: int, rank: int) -> str:
    """The shell command that node `rank` starts, with the variables that it sets.

    Values that are known only when the nodes meet are in capitals.
    """
    hardware, folder = row.hardware, results / row.folder(repeat)
    address, port = addresses.endpoint(row.asked.endpoint or "HOST0")
    port = port or ("PORT" if hardware.port == "auto" else hardware.port)
    rendezvous = Rendezvous(port)
    if hardware.nodes > 1:
        names = [{"host": f"HOST{number}"} for number in range(hardware.nodes)]
        own, interface = (address if rank == 0 else f"HOST{rank}"), row.asked.interface or "INTERFACE"
        rendezvous = Rendezvous(port, address, rank, own, interface, addresses.host_names(row, names), "RUN")
    if rank and row.launcher.from_one_node:
        return "# nothing: its ranks are started from node 0, by ssh"
    if row.launcher.by_hand:
        return "\n".join(hand.lines(hardware.processes, folder, rendezvous))
    with tempfile.TemporaryDirectory() as elsewhere:  # for the files that some launchers need
        command = row.command(Path(elsewhere), rendezvous)
    command = [word.replace(elsewhere, str(folder)) for word in command]
    given = {name: value for name, value in _variables(row, rendezvous).items() if os.environ.get(name) != value}
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(given.items()) if name != "PATH"]
    return " \\\n  ".join([*variables, shlex.join(command)])


def _variables(row: Row, rendezvous: Rendezvous) -> dict[str, str]:
    """The environment of every process of a run."""
    environment = os.environ | _own_variables(row, rendezvous)
    return {name: value for name, value in environment.items() if not OF_OUTSIDE.fullmatch(name)}


def _own_variables(row: Row, rendezvous: Rendezvous) -> dict[str, str]:
    """The variables that a run sets itself, threads included, which each launcher would set in its own way."""
    threads = str(row.hardware.threads)
    environment = {
        # For programs that frameworks call: with another `ninja`, DeepSpeed would compile again what set-up compiled.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(SCRIPTS),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # What frameworks compile, in a folder of this environment: two that share a folder recompile for each other.
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    environment["TORCH_EXTENSIONS_DIR"] = compiled
    # Only the GPUs that it trains on, so that what is read of a process's GPUs, such as energy, is of these only.
    environment |= selection(training_gpus(row.hardware) or None)
    environment |= {"GLOO_SOCKET_IFNAME": rendezvous.interface, "NCCL_SOCKET_IFNAME": rendezvous.interface}
    if not row.launcher.from_one_node:  # such a launcher's ranks find their node by their number
        environment[NODE] = str(rendezvous.node)
    return environment
