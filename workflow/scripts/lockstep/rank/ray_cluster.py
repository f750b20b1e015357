"""Ray Train's TorchTrainer, on a Ray cluster that lasts as long as the run (a row's `launcher: ray`).

The first node starts the head of the cluster, and the others join it, each with as many CPUs and GPUs as it has ranks.
Then the first one hands a function (ray_worker.py) to a TorchTrainer, which calls it in a worker process for each rank,
after these have joined PyTorch's process group. All of Ray's processes end with this one. They listen on all
interfaces, and no option changes that; so they ask for a token that only this run's nodes know.

    python -m lockstep.rank.ray_cluster FOLDER NODE ADDRESS PORT OWN   (as config/launchers.py: Ray has it)
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from lockstep import paths
from lockstep.config.settings import Settings
from lockstep.errors import RunFailed
from lockstep.files import read_json
from lockstep.rank import ray_worker

POLL = 0.2  # seconds
OBJECTS = 100 * 2**20  # bytes of shared memory for Ray's objects, of which a run has only small ones
LOOPBACK = "127.0.0.2"  # also this machine; Ray would replace 127.0.0.1 by the machine's address in its network


def main(folder: Path, node: int, address: str, port: int, own: str) -> int:
    """Keep this node's part of the cluster until the run has ended; returns the exit code."""
    _guard()
    settings = Settings.from_json(read_json(folder / paths.SETTINGS))
    if settings.hardware.nodes == 1:
        address = own = LOOPBACK
    rays = folder / paths.RAY  # Ray's own files about the run
    token = rays / "token"
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}
    os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}  # it would print each line twice
    if node:
        _await_token(token, settings.hardware.timeout)
        with _Node(settings, own, ["--address", f"{address}:{port}"]) as cluster:
            while token.is_file():  # node 0 removes it at the end
                cluster.require()
                time.sleep(POLL)
        return 0
    try:
        _write_token(token)
        scratch = Path(os.environ.get("TMPDIR", "/tmp"))  # the run's own, which is removed with it
        head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(scratch / "ray")]
        with _Node(settings, own, head) as cluster:
            _fit(folder, settings, f"{address}:{port}", cluster)
    finally:
        shutil.rmtree(rays, ignore_errors=True)
    return 0


def _guard() -> None:
    """Have all processes of this session killed as soon as this one ends, however it does.

    Ray's daemons outlive the process that started them, and would outlive a supervisor that is killed.
    """
    session = os.getsid(0)
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return
    os.setsid()
    os.close(writing)
    os.read(reading, 1)  # until the other end is closed
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session:
                process.kill()
    os._exit(0)


def _write_token(file: Path) -> None:
    file.parent.mkdir()
    unfinished = file.with_suffix(".unfinished")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    unfinished.replace(file)


def _await_token(file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not file.is_file():
        if time.monotonic() > deadline:
            raise RunFailed(f"node 0 has not started a Ray cluster within {timeout:g} s (hardware.timeout)")
        time.sleep(POLL)


class _Node:
    """Ray's processes on this node, until the block ends."""

    def __init__(self, settings: Settings, own: str, role: list[str]):
        hardware = settings.hardware
        self.command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        self.command += ["--node-ip-address", own, "--object-store-memory", str(OBJECTS)]
        self.command += ["--num-cpus", str(hardware.processes_per_node), "--num-gpus", str(hardware.gpu_count), *role]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_):
        # Told to end, it would wait half a minute for Ray's tasks. What it started, the guard ends.
        self.process.kill()
        self.process.wait()

    def require(self) -> None:
        """Raises RunFailed if Ray has ended on this node."""
        if self.process.poll() is not None:
            raise RunFailed(f"Ray ended with exit code {self.process.returncode}; the log above says why")


def _fit(folder: Path, settings: Settings, address: str, cluster: _Node) -> None:
    """Train on all nodes, once they are there. Called on the first one. Raises what a rank raised."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    hardware = settings.hardware
    _await_nodes(address, hardware.nodes, hardware.timeout, cluster)
    each = {"CPU": 1} | ({"GPU": hardware.gpu_count / hardware.processes_per_node} if hardware.gpu_count else {})
    trainer = TorchTrainer(
        ray_worker.train,
        train_loop_config={"folder": str(folder.absolute()), "beside": os.getcwd()},
        scaling_config=ScalingConfig(
            num_workers=hardware.processes, use_gpu=bool(hardware.gpu_count), resources_per_worker=each
        ),
        torch_config=TorchConfig(backend=hardware.backend, timeout_s=int(hardware.timeout)),
        run_config=RunConfig(
            name=paths.RAY, storage_path=str(folder.absolute()), failure_config=FailureConfig(max_failures=0)
        ),
    )
    try:
        trainer.fit()
    finally:
        ray.shutdown()


def _await_nodes(address: str, nodes: int, timeout: float, cluster: _Node) -> None:
    """Connect with the head, which takes some seconds to start, and wait for all nodes."""
    import ray

    deadline = time.monotonic() + timeout
    there = 0
    while there < nodes:
        cluster.require()
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{there} of {nodes} nodes were in the Ray cluster at {address} after {timeout:g} s (hardware.timeout)"
            )
        time.sleep(POLL)
        if not ray.is_initialized():
            try:
                ray.init(address=address, logging_level="warning", log_to_driver=False)
            except ConnectionError:
                continue
        there = sum(node["Alive"] for node in ray.nodes())


if __name__ == "__main__":
    folder, node, address, port, own = sys.argv[1:]
    sys.exit(main(Path(folder), int(node), address, int(port), own))
