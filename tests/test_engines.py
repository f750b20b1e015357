"""The images, and the benchmark in them, by real engines. Skipped where an engine or its images are missing.

What is missing of an engine in LOCKSTEP_ENGINES ("docker apptainer" in CI) is a failure.
"""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from lockstep.config import containers
from tests.conftest import PROJECT, copy_project

IMAGES = (*containers.FAMILIES, "bench")
# Whoever is to own the results; root's own would prove nothing.
USER = os.getuid() or 1234
ROWS = ("single", "horovod")  # each in its image; the other rows are for `make test-slow`
IN_DOCKER = ("single", "ddp")  # in the image that holds all
DEFAULT_ROWS = yaml.safe_load((PROJECT / "config" / "config.yaml").read_text(encoding="utf-8"))["rows"]
LARGEST = 1.4e9  # bytes of the image `torch`
SMALL = ["data={limit: 1200}", "model={hidden_size: 64, layers: 1}", "train={epochs: 1, max_steps: 12, eval_every: 6}"]
SMALL += ["hardware={device: cpu, processes: 2, threads: 1, oversubscribe: true}", "profile={steps: 0}"]
SMALL += ["repeats=1", "retries=0"]
LONG = [*SMALL[:2], "train={epochs: 500}", *SMALL[3:]]  # for what is interrupted
COMPOSE = ("docker", "compose", "run", "--rm", "-T")
CANARY = "canary-of-the-host"


def answers(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def need(engine: str, there: bool, otherwise: str) -> None:
    if there:
        return
    if engine in os.environ.get("LOCKSTEP_ENGINES", "").split():
        pytest.fail(otherwise)
    pytest.skip(otherwise)


@pytest.fixture(scope="module")
def docker():
    need("docker", shutil.which("docker") is not None and answers("docker", "info"), "Docker does not answer here")
    need("docker", answers("docker", "compose", "version"), "Docker has no Compose here")
    for image in IMAGES:
        there = answers("docker", "image", "inspect", f"lockstep/{image}:cpu")
        need("docker", there, f"no image lockstep/{image}:cpu; make images")


def place(folder, owner: int | None = None):
    """A copy of the project, as a clone in which `make images` and `make sif` ran; owned by `owner`."""
    copy = copy_project(folder)
    for name in ("results", ".snakemake"):
        copy.path(name).mkdir()
    copy.path(".env").write_text(f"LOCKSTEP_UID={owner}\nLOCKSTEP_GID={owner}\nLOCKSTEP_BENCH_CPU={bench_digest()}\n")
    if (PROJECT / containers.SUMS).is_file():
        copy.path(str(containers.SIF)).mkdir()
        shutil.copy(PROJECT / containers.SUMS, copy.path(str(containers.SUMS)))
        for sif in (PROJECT / containers.SIF).glob("*.sif"):
            copy.path(str(containers.SIF / sif.name)).symlink_to(sif)
    if owner is not None and os.getuid() == 0:
        subprocess.run(["chown", "-R", f"{owner}:{owner}", str(folder)], check=True)
    return copy


def bench_digest() -> str:
    command = ["docker", "image", "inspect", "lockstep/bench:cpu", "--format", "{{.Id}}"]
    if not shutil.which("docker"):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def compose(docker, tmp_path_factory):
    return place(tmp_path_factory.mktemp("compose"), USER)


@pytest.fixture(scope="module")
def apptainer(tmp_path_factory):
    need("apptainer", shutil.which("apptainer") is not None, "Apptainer is not installed here")
    for name in containers.FAMILIES:
        there = (PROJECT / containers.SIF / f"{name}-cpu.sif").is_file()
        need("apptainer", there, f"no image of {name} in docker/sif; make sif")
    return place(tmp_path_factory.mktemp("apptainer"))


@pytest.fixture(scope="module")
def in_docker(compose):
    """After `docker compose run bench` over IN_DOCKER."""
    finished = in_compose(compose, "bench", *IN_DOCKER, "--config", *SMALL, timeout=1800, A_SECRET=CANARY)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return compose


@pytest.fixture(scope="module")
def in_apptainer(apptainer):
    """After `snakemake --cores all --use-singularity` over ROWS."""
    others = ", ".join(f"{row}: null" for row in DEFAULT_ROWS if row not in ROWS)  # `predict` asks for every row
    asked = ("--config", *SMALL, f"rows={{{others}}}")
    command = ("snakemake", "--cores", "all", "--use-singularity", *ROWS, "predict", *asked)
    finished = apptainer.run(*command, timeout=1800, A_SECRET=CANARY)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return apptainer


def in_compose(place, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """`docker compose run` with an input that stays open, as the tests' own may be empty."""
    into, ours = os.pipe()
    try:
        return place.run(*COMPOSE, *arguments, timeout=timeout, stdin=into, **environment)
    finally:
        os.close(into)
        os.close(ours)


def run_json(where, row: str, name: str) -> dict:
    (file,) = where.path("results/runs").glob(f"{row}/n*/rep1/{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def image_run(image: str, *command: str, variant: str = "cpu", timeout: float = 300) -> subprocess.CompletedProcess:
    hardened = (
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--hostname=localhost",
        "--tmpfs=/tmp:exec",
        "--env=HOME=/tmp",
    )
    docker_run = ("docker", "run", "--rm", *hardened, f"lockstep/{image}:{variant}", *command)
    return subprocess.run(docker_run, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_the_versions_of_the_table(docker, image):
    finished = image_run(image, "python", "/opt/lockstep/workflow/scripts/self_test.py", "--versions")
    assert finished.returncode == 0, finished.stderr
    environment = json.loads(finished.stdout)
    table = yaml.safe_load((PROJECT / "docker" / "images.yaml").read_text())["cpu"]
    assert environment["python"].startswith(table["python"] + ".")
    assert environment["packages"]["torch"] == table["torch"]
    for name in ("deepspeed", "horovod"):
        assert environment["packages"][name] == (table[name] if image in (name, "bench") else None)
    if image in ("horovod", "bench"):
        assert environment["mpi"] == f"mpirun ({table['mpi'].rpartition(' ')[0]}) {table['mpi'].rpartition(' ')[2]}"
    else:
        assert environment["mpi"] is None
    for name in ("cuda", "cudnn", "nccl"):
        assert environment[name] == table[name]
    assert environment["in_container"] == "docker"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_labelled_and_holds_no_more_than_it_needs(docker, image):
    said = subprocess.run(["docker", "image", "inspect", f"lockstep/{image}:cpu"], capture_output=True, check=True)
    (known,) = json.loads(said.stdout)
    assert known["Config"]["User"] == "10001"
    assert re.fullmatch(r"[0-9a-f]{40}", known["Config"]["Labels"]["org.opencontainers.image.revision"])
    assert known["Config"]["Labels"]["org.opencontainers.image.version"]
    assert known["Config"]["Labels"]["org.opencontainers.image.description"].startswith("Which PyTorch training")
    finished = image_run(image, "bash", "-c", "command -v gcc g++ cc nvcc make pip; id -u; cat /opt/venv/sbom.json")
    user, listed = finished.stdout.split("\n", 1)
    assert user != "0"  # and none of the programs before it
    packages = {component["name"] for component in json.loads(listed)["components"]}
    assert {"torch", "transformers"} <= packages
    assert ("snakemake" in packages) == (image == "bench")


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_an_image_tests_itself(docker, image, variant):
    """The images for GPUs too, where they are built: they need neither GPU nor compiler for it."""
    if variant == "cuda" and not answers("docker", "image", "inspect", f"lockstep/{image}:cuda"):
        pytest.skip(f"no image lockstep/{image}:cuda; make images VARIANT=cuda")
    finished = image_run(image, variant=variant, timeout=900)  # what it runs by default
    assert finished.returncode == 0, finished.stdout + finished.stderr
    trained = re.findall(r"^(\w+): 2 steps in", finished.stdout, re.MULTILINE)
    assert trained == ["single", "ddp", *(name for name in ("deepspeed", "horovod") if image in (name, "bench"))]


INSIDE = """
import json, os, socket
from pathlib import Path

def writable(path):
    try:
        Path(path, "probe").write_text("")
        return True
    except OSError:
        return False

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({
    "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "user": os.getuid(),
    "networks": [name for _, name in socket.if_nameindex()],
    "writable": list(filter(writable, ("/", "/opt", "/etc", "/bench", "/bench/workflow", "/bench/results", "/tmp"))),
    "shared_memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "environment": dict(os.environ),
    "first": Path("/proc/1/comm").read_text().strip(),
}))
"""


def test_compose_is_hardened_as_seen_from_inside(compose):
    finished = compose.run(*COMPOSE, "--entrypoint", "python", "bench", "-c", INSIDE, A_SECRET=CANARY)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout)
    assert seen["capabilities"] == [0] * 5
    assert seen["no_new_privileges"] == 1
    assert seen["seccomp"] == 2
    assert seen["user"] == USER
    assert [name for name in seen["networks"] if not name.startswith(("lo", "sit", "tunl", "ip6"))] == []
    assert seen["writable"] == ["/bench/results", "/tmp"]
    assert seen["shared_memory"] >= 2 * 10**9
    assert CANARY not in seen["environment"].values()
    assert seen["first"] in ("docker-init", "tini")  # which hands signals on, and buries the dead


def test_what_is_not_built_or_not_there_is_said_in_one_line(docker, compose, tmp_path):
    fresh = copy_project(tmp_path)
    said = fresh.run(*COMPOSE, "bench").stderr
    assert "make images comes first" in said
    gpu = compose.run("docker", "compose", "-f", "compose.yaml", "-f", "compose.gpu.yaml", "run", "--rm", "-T", "bench")
    assert "make images VARIANT=cuda comes first" in gpu.stderr
    said = in_compose(compose, "bench", "--configfile", "/etc/mine.yaml").stderr
    assert "error: /etc/mine.yaml is not there: a container sees only the project's folder." in said
    said = in_compose(compose, "bench", "-n", "--config", "data={path: /etc/rows.csv}").stderr
    assert "data.path: /etc/rows.csv does not exist." in said
    assert "A container sees only the project's folder: put it there" in said


def test_what_must_be_fetched_names_the_service_that_does(compose):
    model = "model={name: nobody/nothing, revision: 0000000000000000000000000000000000000000}"
    finished = in_compose(compose, "bench", "prepare", "--config", model, timeout=600)
    assert finished.returncode != 0
    log = compose.path("results/logs/prepare.log").read_text()
    assert "This container has no network; fetch it first: docker compose run --rm fetch" in log


def test_an_empty_input_is_refused_as_nothing_could_end_the_container(compose):
    finished = compose.run(*COMPOSE, "bench", "--version", stdin=subprocess.DEVNULL)
    assert finished.returncode == 2
    assert "error: the standard input is empty, as in cron or CI" in finished.stderr
    assert "docker compose run -d" in finished.stderr


def started_beside_what_is_owned_by_another(compose, path):
    """What `docker compose run bench` says where `path` belongs to somebody else; it is given back."""
    if os.getuid():
        pytest.skip("only root can give a file to somebody else")
    os.chown(path, 4321, 4321)
    try:
        return in_compose(compose, "bench", "--version")
    finally:
        os.chown(path, USER, USER)


def test_files_of_somebody_else_below_results_name_their_owner(compose):
    file = compose.path("results/left-by-root")
    file.write_text("")
    finished = started_beside_what_is_owned_by_another(compose, file)
    file.unlink()
    assert finished.returncode == 2
    assert f"results/left-by-root can't be written by user {USER}; its owner is 4321" in finished.stderr


def test_what_make_sif_lacks_is_named(docker):
    finished = subprocess.run(["make", "sif", "VARIANT=none"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert finished.returncode
    assert "error: there is no image lockstep/torch:none. Build it: make images VARIANT=none" in finished.stderr


def test_after_make_clean_compose_still_starts(docker, tmp_path):
    copy = place(tmp_path, USER)
    assert copy.run("make", "clean").returncode == 0
    if os.getuid() == 0:
        for name in ("results", ".snakemake"):
            os.chown(copy.path(name), USER, USER)
    finished = in_compose(copy, "bench", "--version")
    assert finished.returncode == 0, finished.stderr


def test_the_image_of_most_rows_is_small(docker):
    command = ["docker", "image", "inspect", "lockstep/torch:cpu", "--format", "{{.Size}}"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) <= LARGEST


def layers(image: str) -> list[str]:
    command = ["docker", "image", "inspect", f"lockstep/{image}:cpu", "--format", "{{json .RootFS.Layers}}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_horovod_is_stripped_and_all_images_share_the_environment(docker):
    look = "import importlib.util as u, pathlib; p = pathlib.Path(u.find_spec('horovod').origin).parent;"
    look += "print(sum(file.stat().st_size for file in p.rglob('*.so')))"
    assert int(image_run("horovod", "python", "-c", look).stdout) < 8e6
    shared = layers("torch")[:-1]  # the last one is Lockstep itself
    assert all(layers(image)[: len(shared)] == shared for image in IMAGES)


LOADERS = """
import torch

rows = torch.utils.data.TensorDataset(torch.ones(64, 2**20))  # 256 MiB through shared memory
loader = torch.utils.data.DataLoader(rows, batch_size=8, num_workers=4, prefetch_factor=2)
print(sum(float(batch.sum()) for batch, in loader))
"""


def test_the_tests_run_in_the_image(compose):
    """Which has fewer of pytest's plug-ins than `make setup` installs."""
    finished = in_compose(compose, "test", "tests/test_terminal.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_shared_memory_is_large_enough_for_several_workers(compose):
    finished = compose.run(*COMPOSE, "--entrypoint", "python", "bench", "-c", LOADERS)
    assert float(finished.stdout) == 64 * 2**20, finished.stderr


def test_results_of_somebody_else_are_refused_in_one_line(compose):
    finished = started_beside_what_is_owned_by_another(compose, compose.path("results"))
    assert finished.returncode == 2
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert f"results/ can't be written by user {USER}; its owner is 4321" in line


def made_in_docker(place, row: str) -> None:
    env = run_json(place, row, "env")
    assert (env["in_container"], env["image"]) == ("docker", "lockstep/bench:cpu")
    assert env["image_digest"] == bench_digest()


@pytest.mark.slow
@pytest.mark.ci
def test_compose_trains_tests_and_predicts(in_docker):
    for row in IN_DOCKER:
        made_in_docker(in_docker, row)
    said = in_compose(in_docker, "predict", "--text", "今天真开心")
    assert said.returncode == 0, said.stderr
    assert all(row in said.stdout for row in IN_DOCKER), said.stdout


@pytest.mark.slow
@pytest.mark.ci
def test_what_compose_leaves_belongs_to_the_user_and_tells_nothing_of_the_host(in_docker):
    files = list(in_docker.path("results").rglob("*"))
    assert {file.lstat().st_uid for file in files} == {USER}
    small = [file for file in files if file.is_file() and file.stat().st_size < 10**6]
    assert not [file for file in small if CANARY.encode() in file.read_bytes()]
    changed = [file for file in in_docker.folder.rglob("*") if file.lstat().st_uid != USER]
    assert not changed


@pytest.mark.slow
@pytest.mark.ci
def test_what_docker_made_plain_snakemake_knows(in_docker):
    """They share Snakemake's notes, so one sees what the other did, and what has changed since."""
    again = in_docker.snakemake("--cores", "all", "-n", *IN_DOCKER, "--config", *SMALL)
    assert "Nothing to be done" in again.stdout + again.stderr
    other = in_docker.snakemake(
        "--cores", "all", "-n", *IN_DOCKER, "--config", *SMALL, "model={hidden_size: 32, layers: 1}"
    )
    assert "prepare" in other.stdout


def made_in_apptainer(place, row: str) -> None:
    sums = place.path(str(containers.SUMS)).read_text().split()
    image = f"{row if row in containers.FAMILIES else 'torch'}-cpu.sif"  # rows are named like their strategies
    env = run_json(place, row, "env")
    assert env["in_container"] == "apptainer"
    assert env["image"].endswith(image)
    assert env["image_digest"] == f"sha256:{sums[sums.index(image) - 1]}"


@pytest.mark.slow
@pytest.mark.ci
def test_apptainer_trains_each_row_in_its_image(in_apptainer):
    for row in ROWS:
        made_in_apptainer(in_apptainer, row)
    assert in_apptainer.path("results/predict/predictions.csv").is_file()
    files = [file for file in in_apptainer.path("results").rglob("*") if file.is_file() and file.stat().st_size < 10**6]
    assert not [file for file in files if CANARY.encode() in file.read_bytes()]


@pytest.mark.slow
def test_every_row_trains_in_both_kinds_of_containers_to_the_same_losses_as_outside(in_docker, in_apptainer, tmp_path):
    finished = in_compose(in_docker, "bench", *DEFAULT_ROWS, "--config", *SMALL, timeout=1800)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    command = ("snakemake", "--cores", "all", *DEFAULT_ROWS, "--config", *SMALL)
    finished = in_apptainer.run(*command, "--use-singularity", timeout=1800)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    plain = copy_project(tmp_path)
    finished = plain.run(*command, timeout=1800)
    assert finished.returncode == 0, finished.stderr
    for row in DEFAULT_ROWS:
        made_in_docker(in_docker, row)
        made_in_apptainer(in_apptainer, row)
        losses = run_json(plain, row, "record")["losses"]
        assert len(losses) == 12
        for other in (in_docker, in_apptainer):
            assert run_json(other, row, "record")["losses"] == pytest.approx(losses, abs=1e-6, rel=0), row


@pytest.mark.slow
def test_horovod_over_mpi_is_proven_in_its_image(docker, tmp_path):
    """By the Open MPI of the image, whose ranks may not read each other's memory in a hardened container."""
    copy = place(tmp_path, USER)
    rows = "rows={horovod_mpi: {strategy: horovod, controller: mpi}}"
    finished = in_compose(copy, "bench", "parity_horovod_mpi", "--config", *SMALL, rows, timeout=1200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    folder = copy.path("results/parity/horovod_mpi/n2/rep1")
    verdict, made = (json.loads((folder / f"{name}.json").read_text()) for name in ("verdict", "record"))
    assert verdict["proof"] == "equal", verdict
    assert (made["settings"]["backend"], made["settings"]["options"]["controller"]) == ("mpi", "mpi")
    assert "--mpi" in made["command"]
    assert "Read -1" not in (folder / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.ci
def test_an_image_that_was_changed_trains_nothing(apptainer, tmp_path):
    copy = place(tmp_path)
    sif = copy.path(str(containers.SIF / "torch-cpu.sif"))
    sif.unlink()
    sif.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC another image")
    finished = copy.run("snakemake", "--cores", "all", "--use-singularity", "single", "--config", *SMALL)
    assert finished.returncode != 0
    assert "containers.torch: docker/sif/torch-cpu.sif is not the image that" in finished.stderr
    assert not copy.path("results").joinpath("runs").exists()


def left(project: str) -> str:
    """The containers of a Compose project, running or not."""
    command = [
        "docker",
        "ps",
        "-a",
        "--format",
        "{{.Names}}",
        "--filter",
        f"label=com.docker.compose.project={project}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [pytest.param(True, marks=pytest.mark.ci), False], ids=["terminal", "pipe"])
def test_ctrl_c_leaves_nothing(docker, tmp_path, terminal):
    copy = place(tmp_path, USER)
    project = f"lockstep-test-{os.getpid()}-{int(terminal)}"
    command = ["docker", "compose", "-p", project, "run", "--rm", "bench", "single", "--config", *LONG]
    if terminal:
        ours, theirs = pty.openpty()
        into = out = theirs
    else:
        into, ours = os.pipe()
        out = (tmp_path / "log").open("wb")
    environment = copy.environment() | {"BUILDKIT_PROGRESS": "plain"}
    client = subprocess.Popen(
        command, cwd=copy.folder, env=environment, stdin=into, stdout=out, stderr=out, start_new_session=True
    )
    os.close(into)
    if terminal:
        os.set_blocking(ours, False)
    try:
        wait(lambda: list(copy.path("results/runs").glob("single/n1/rep1/progress*")), "training has begun", drain=ours)
        if terminal:
            os.write(ours, b"\x03")
        else:
            os.killpg(client.pid, signal.SIGINT)
            os.close(ours)
        wait(lambda: client.poll() is not None, "Compose ended", drain=ours if terminal else None)
        wait(lambda: not left(project), "the container is gone")
    finally:
        for name in left(project).split():
            subprocess.run(["docker", "rm", "-f", name], check=False)
        client.kill()
        client.wait()
    assert client.returncode != 0
    (failed,) = copy.path("results/runs").glob("single/n1/rep1/failed.json")
    assert json.loads(failed.read_text())["reason"] == "interrupted"


def wait(until, what: str, drain: int | None = None, seconds: float = 90) -> None:
    """Wait until something holds, reading a terminal meanwhile, so that nobody waits for it to be read."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        if drain is not None:
            with contextlib.suppress(OSError):
                os.read(drain, 65536)
        time.sleep(0.2)
