"""Commands in forks of one process that has imported PyTorch and transformers: for tests that do not test launching.

Each of a row's ranks imports for three seconds of CPU time, and each launcher for one. A test that trains thirty small
rows would do little else. `run` has a server call a script of any copy of the project in a fork, whose ranks are forks
of that (lockstep/run/forked.py). The project's own modules are imported anew in each fork, from that copy.

Libraries that read their variables when they are imported have read the server's: a test of such a variable starts a
process of its own.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

PRELOADED = (
    *("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama", "transformers.trainer"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("accelerate", "deepspeed"),  # transformers imports both when it saves a model
    *("datasets", "jsonschema", "pandas", "PIL.Image", "psutil", "safetensors.torch", "tokenizers", "tqdm", "yaml"),
)
KILLED_AFTER = 10  # seconds after SIGTERM that a command which ran out of time has to end what it started


def run(
    script: str, arguments: tuple[str, ...], folder: Path, variables: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Do as `python script arguments` in `folder` would. Raises TimeoutExpired as subprocess.run does."""
    command = [sys.executable, script, *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(_server()))
            except ConnectionRefusedError:  # a test that ends all descendants of this process has ended it, too
                _server.cache_clear()
                connection.connect(str(_server()))
            asked = {"script": script, "arguments": arguments, "folder": str(folder), "variables": variables}
            socket.send_fds(connection, [json.dumps(asked).encode()], [out.fileno(), errors.fileno()])
            connection.settimeout(timeout)
            try:
                code = connection.makefile().readline()
            except TimeoutError:
                raise subprocess.TimeoutExpired(command, timeout, _read(out), _read(errors)) from None
        if not code:
            raise RuntimeError(f"the server of forks ended: {_read(errors)}")
        return subprocess.CompletedProcess(command, int(code), _read(out), _read(errors))


def _read(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@functools.cache
def _server() -> Path:
    """The socket of this process's server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    address = Path(folder.name) / "socket"
    # What lockstep/cli.py sets before libraries are imported.
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    quiet |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DATASETS_VERBOSITY": "error", "PYTHONWARNINGS": ""}
    variables = os.environ | quiet | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(address)]
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    atexit.register(folder.cleanup)
    return address


def serve(address: str) -> None:
    """Fork a process for each connection, until the process that started this one has ended."""
    starter = os.getppid()
    for name in PRELOADED:
        # Images have what their rows need; and DeepSpeed says which device it takes.
        with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(name)
    gc.freeze()  # or each fork would copy the pages of all these objects, to count references to them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects those that have answered
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        listening.settimeout(1)
        while os.getppid() == starter:
            with contextlib.suppress(TimeoutError):
                connection, _ = listening.accept()
                with connection:
                    if os.fork() == 0:
                        listening.close()
                        _answer(connection)


def _answer(connection: socket.socket) -> None:
    """In a fork: call the script in another one, and send its exit code. If nobody waits any more, end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    asked, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _call(json.loads(asked), files)
    connection.settimeout(0.02)
    ended = 0
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(TimeoutError):
            if not ended and connection.recv(1) == b"":  # closed: its time is over
                os.kill(pid, signal.SIGTERM)
                signal.alarm(KILLED_AFTER)  # then this process ends, and that one with it
                os.waitpid(pid, 0)
                os._exit(1)
    connection.settimeout(None)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _call(asked: dict, files: list[int]) -> None:
    """In a fork: be the process of `python script arguments`."""
    code = 1
    try:
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["variables"])
        sys.argv = [asked["script"], *asked["arguments"]]
        sys.path[0] = str((Path(asked["folder"]) / asked["script"]).parent)
        from lockstep.run import forked, lifetime

        lifetime.die_with_parent()
        forked.wanted = forked.possible
        runpy.run_path(asked["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
