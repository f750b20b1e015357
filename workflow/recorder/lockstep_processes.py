"""What the recorder and the timer have in common: ranks, and the files of a process of a user's script."""

import faulthandler
import functools
import importlib.metadata
import json
import os
import sys
import sysconfig
import threading
import time
import urllib.parse

FOLDER = os.environ.get("LOCKSTEP_RECORDING", "")
# The names of variables that were set before the script's launcher was started; their values are not recorded.
KNOWN = set(os.environ.get("LOCKSTEP_KNOWN", "").split(","))
ELSEWHERE = os.environ.get("LOCKSTEP_ELSEWHERE", "")  # a folder from which nothing may be imported
WAIT = 60  # seconds that a finished rank waits for the others
GRACE = 5  # seconds that a rank has after its last step, once another one has ended
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_NTASKS")
# Rank and world size of torch.distributed's group, kept for when a script has destroyed it.
_in_group = []
_begun_in = os.getcwd()  # a script may go elsewhere before it imports PyTorch


def rank_and_world():
    """This process's rank and world size, from torch.distributed, Horovod, or a launcher's variables."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        _in_group[:] = dist.get_rank(), dist.get_world_size()
    if _in_group:
        return tuple(_in_group)
    horovod = sys.modules.get("horovod.torch")
    initialised = getattr(horovod, "is_initialized", None)  # it is not there yet while horovod.torch imports torch
    if initialised and initialised():
        return horovod.rank(), horovod.size()
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)
    world = next((int(os.environ[name]) for name in WORLDS if os.environ.get(name, "").isdigit()), 1)
    return rank, world


def note_start():
    """Record how this process was started, since a replay starts rank 0 in the same way.

    At the signal LOCKSTEP_STACKS it writes where its threads are, even if they wait in code that is not Python.
    """
    about = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "command": sys.orig_argv,
        "folder": _begun_in,
        "torch": sys.modules["torch"].__version__,
        "variables": {name: value for name, value in os.environ.items() if name not in KNOWN},
    }
    if number := os.environ.get("LOCKSTEP_STACKS"):
        stacks = os.path.join(FOLDER, f"stacks.{os.getpid()}.txt")
        faulthandler.register(int(number), os.open(stacks, os.O_WRONLY | os.O_CREAT))  # open while this process lives
    _write(f"started.{os.getpid()}.json", about)


def write(about):
    """Write what is known of this process, so that a reader never sees half of a file."""
    _exits.clear()  # an exit before was caught
    rank, world = rank_and_world()
    about = {
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "read": sorted(_opened),
        **imported(),
        **about,
    }
    _write(f"process.{os.getpid()}.json", about)


def _write(name, about):
    file = os.path.join(FOLDER, name)
    with open(f"{file}.tmp", "w") as stream:
        json.dump(about, stream)
    os.replace(f"{file}.tmp", file)


def imported():
    """The files of imported modules, by name: those of the folder LOCKSTEP_ELSEWHERE, and others, maybe its copies.

    An environment in that folder does not count as the folder's, unless a package in it was installed from that folder.
    Python's own modules and the recorder's are in neither.
    """
    elsewhere, others = {}, {}
    for name, module in list(sys.modules.items()) if ELSEWHERE else ():
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        if name == "__main__" and getattr(module, "__spec__", None):
            name = module.__spec__.name  # of python -m
        real = _real_path(file)
        installed = "site-packages" in real or "dist-packages" in real
        in_environment = installed or (
            sys.prefix != ELSEWHERE and real.startswith(os.path.realpath(sys.prefix) + os.sep)
        )
        if in_environment:
            from_elsewhere = name.partition(".")[0] in _installed_from_elsewhere()
        else:
            from_elsewhere = real.startswith(ELSEWHERE + os.sep)
        if from_elsewhere:
            elsewhere[name] = real
        elif installed or not real.startswith(_NO_COPIES):
            others[name] = real
    return {"elsewhere": elsewhere, "others": others}


@functools.cache
def _installed_from_elsewhere():
    """The top-level modules of packages that pip installed from LOCKSTEP_ELSEWHERE, as a copy (PEP 610)."""
    names = set()
    for distribution in importlib.metadata.distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urllib.parse.urlparse(origin.get("url", ""))
        folder = os.path.realpath(urllib.parse.unquote(url.path))
        inside = folder == ELSEWHERE or folder.startswith(ELSEWHERE + os.sep)
        if url.scheme == "file" and inside and not origin.get("dir_info", {}).get("editable"):
            names |= {str(file).partition("/")[0].removesuffix(".py") for file in distribution.files or ()}
    return names


_opened = set()  # files in LOCKSTEP_ELSEWHERE


def watch_files():
    """Note the files in LOCKSTEP_ELSEWHERE that this process opens from now on."""

    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(arguments[0]))
            if real.startswith(ELSEWHERE + os.sep) and not real.startswith(os.path.realpath(sys.prefix) + os.sep):
                _opened.add(real)

    if ELSEWHERE:
        sys.addaudithook(note)


_real_path = functools.cache(os.path.realpath)  # asked for each module again at each writing
# Folders of Python's own modules, and of the recorder's.
_NO_COPIES = tuple(
    os.path.realpath(folder) + os.sep for folder in (sysconfig.get_path("stdlib"), os.path.dirname(__file__))
)

_exits = []  # what sys.exit was last called with


def watch_exits():
    """Note the exit code that this process asks for from now on, since it is no longer known when the process ends."""
    usual = sys.exit

    def noted(code=None, /):
        _exits[:] = [code]
        usual(code)

    sys.exit = noted


def failure():
    """The error or exit code with which this process ends; empty if there is none. Call it at the process's end.

    An exception that a script catches does not count. `raise SystemExit(1)` is not seen.
    """
    error = getattr(sys, "last_value", None)
    if error is not None:
        return words_of(error)
    return f"exit code {_exits[0]}" if _exits and _exits[0] not in (None, 0) else ""


def words_of(error):
    """The kind of an error, and the first line of what it says."""
    lines = [text.strip() for text in str(error).splitlines() if any(map(str.isalnum, text))]
    return ": ".join([type(error).__name__, *lines[:1]])


def write_parts(rank_pid, number, about):
    """Write what the samples of a data set consist of; a DataLoader's worker does it for its rank's process."""
    _write(f"parts.{rank_pid}.{os.getpid()}.{number}.json", {"pid": rank_pid, **about})


def write_failure(about):
    """Write that this process fails, whether it trained or only started the processes that train."""
    rank, _ = rank_and_world()
    _write(f"failed.{os.getpid()}.json", {"rank": rank, "pid": os.getpid(), **about})


def follow_engine(module, state, done, begin=None):
    """Call begin(engine) before and done(engine) after each step of DeepSpeed's engine.

    PyTorch's hooks may not be called once for each of the engine's steps. While it steps, state.engine is True.
    """
    engine = module.DeepSpeedEngine
    step = engine.step

    def noted(self, *args, **kwargs):
        taken = self.global_steps
        if begin and self.is_gradient_accumulation_boundary():
            begin(self)
        state.engine = True
        try:
            return step(self, *args, **kwargs)
        finally:
            state.engine = False
            if self.global_steps > taken:
                done(self)

    engine.step = noted


def end_with_others():
    """From now on let this process end with the other ranks, also while it waits for them, as in a barrier."""

    def follow():
        while not _done():
            time.sleep(0.1)
        time.sleep(GRACE)
        end_together()

    threading.Thread(target=follow, daemon=True).start()


def _done():
    """The number of ranks that have done their steps, and end."""
    return len([name for name in os.listdir(FOLDER) if name.startswith("done.")])


def end_together():
    """End this process when all ranks have done their steps; leaving earlier would make the others fail."""
    _, world = rank_and_world()
    open(os.path.join(FOLDER, f"done.{os.getpid()}"), "w").close()
    until = time.monotonic() + WAIT
    while time.monotonic() < until and _done() < world:
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.terminate()
    os._exit(0)
