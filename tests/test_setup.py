"""Set-up: what it says of a machine that lacks something, and that a row trains where nothing can be compiled."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT, copy_project

TOOLS = ("sh", "bash", "mkdir", "df", "awk", "tail", "grep", "dirname", "realpath", "timeout", "ls", "wc")
# A Python that can't do what Debian keeps in packages of its own.
WITHOUT = {
    "headers": "import sysconfig as s; f = s.get_paths; s.get_paths = lambda *a, **k: f(*a, **k) | {'include': '/no'}",
    "venv": "import sys; sys.modules['ensurepip'] = None",
}


TWO_GPUS = "echo 'GPU 0: Tesla T4 (UUID: GPU-1)'; echo 'GPU 1: Tesla T4 (UUID: GPU-2)'"


def program(file: Path, script: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def check(tmp_path):
    """Runs setup/check.sh with only the programs that it is given on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(*there: str, without: str | None = None, torch: str = "", **scripts: str) -> tuple[int, str]:
        for name in (*TOOLS, *there):
            (programs / name).symlink_to(shutil.which(name))
        (programs / "python3").symlink_to(sys.executable)
        for name, script in scripts.items():
            program(programs / name.replace("_", "-"), script)
        environment = {"PATH": str(programs)}
        if without:
            (tmp_path / "sitecustomize.py").write_text(WITHOUT[without])
            environment["PYTHONPATH"] = str(tmp_path)
        command = [PROJECT / "setup" / "check.sh", "python3", tmp_path / "venv", torch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert not done.stdout
        return done.returncode, done.stderr

    return run


def test_a_machine_that_has_all_is_told_nothing(check):
    assert check("git", "g++", df="echo; echo x 90000 1 90000 1% /") == (0, "")


@pytest.mark.parametrize(
    ("there", "without", "package"),
    [(("git",), None, "g++"), (("git", "g++"), "headers", "python3-dev"), (("g++",), None, "git")],
)
def test_what_only_costs_a_row_is_noted_in_one_line(check, there, without, package):
    code, said = check(*there, without=without, df="echo; echo x 90000 1 90000 1% /")
    assert code == 0
    (line,) = said.splitlines()
    assert line.startswith("note: ")
    assert line.endswith(f"On Debian: apt install {package}")
    if package != "git":
        assert "the row horovod is left out, and deepspeed runs without collectives of its own" in line


def test_without_the_venv_module_it_names_all_packages(check):
    code, said = check("git", without="venv")
    assert code == 2
    assert said == "error: python3 has no venv. On Debian: apt install python3-venv g++\n"


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_python_that_it_was_not_tried_with_is_refused(check, version):
    code, said = check(python3=f"echo {version}")
    assert code == 2
    assert said.startswith(f"error: python3 is Python {version}, and Lockstep is tried with 3.11, 3.12 and 3.13.")


def test_a_full_disk_is_told_before_anything_is_installed(check):
    code, said = check("git", "g++", torch="cpu", df="echo; echo x 1000 1 999 99% /")
    assert code == 2
    assert "has 999 MB of disk left, and set-up needs 4000 for PyTorch's cpu build, as TORCH=cpu asks for it." in said


@pytest.mark.parametrize(("torch", "refused"), [("", True), ("cpu", False)])
def test_the_build_for_gpus_needs_more_of_the_disk(check, torch, refused):
    code, said = check("git", "g++", torch=torch, df="echo; echo x 9000 1 9000 1% /", nvidia_smi=TWO_GPUS)
    assert code == (2 if refused else 0)
    assert ("set-up needs 10000 for PyTorch's cuda build, as nvidia-smi lists GPUs" in said) == refused


def test_the_readmes_name_what_it_looks_for():
    (command,) = [line for line in (PROJECT / "README.md").read_text().splitlines() if "apt install" in line]
    assert {"python3", "python3-venv", "python3-dev", "git", "make", "g++"} == set(command.split()[3:])
    said = (PROJECT / "setup" / "check.sh").read_text()
    for file in ("README.md", "README.zh-CN.md"):
        for version in ("3.11", "3.12", "3.13"):
            assert version in (PROJECT / file).read_text(encoding="utf-8")
            assert version in said


def smi_of(*gpus: str) -> str:
    """An nvidia-smi that lists GPUs, and tells of each its driver's version and its compute capability."""
    lines = "\n".join(gpus)
    return f"""case "$1" in -L) echo 'GPU 0: NVIDIA (UUID: GPU-a)' ;; *) echo '{lines}' ;; esac"""


@pytest.mark.parametrize(
    ("asked", "smi", "devices", "decided"),
    [
        ("", TWO_GPUS, 0, "cuda as nvidia-smi lists GPUs"),
        ("", None, 2, "cuda as there is an NVIDIA GPU in /dev"),
        ("", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", 1, "cuda as there is"),
        ("", "echo 'No devices were found'; exit 6", 0, "cpu as no NVIDIA GPU is found"),
        ("", None, 0, "cpu as no NVIDIA GPU is found"),
        ("cpu", TWO_GPUS, 2, "cpu as TORCH=cpu asks for it"),
        ("cuda", None, 0, "cuda as TORCH=cuda asks for it"),
        ("", smi_of("580.65.06, 9.0"), 1, "cuda as nvidia-smi lists GPUs"),
        ("", smi_of("535.183.01, 9.0"), 1, "cpu as the driver of NVIDIA is 535.183.01, and CUDA 13 needs 580 or newer"),
        (
            "",
            smi_of("580.65.06, 7.0"),
            1,
            "cpu as the best GPU has compute capability 7.0, and CUDA 13 needs 7.5 or more",
        ),
        ("", smi_of("580.65.06, 6.1", "580.65.06, 9.0"), 2, "cuda as nvidia-smi lists GPUs"),
        ("cuda", smi_of("535.183.01, 7.0"), 1, "cuda as TORCH=cuda asks for it"),
    ],
)
def test_where_gpus_are_cuda_s_build_is_taken_unless_told_otherwise(tmp_path, asked, smi, devices, decided):
    for number in range(devices):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()  # the driver alone
    if smi:
        program(tmp_path / "bin" / "nvidia-smi", smi)
    script = tmp_path / "which_torch.sh"
    script.write_text((PROJECT / "setup" / script.name).read_text().replace("-d /dev/", f"-d {tmp_path}/"))
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["sh", script, asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(decided)


def test_another_build_than_the_two_is_refused_before_anything_is_done(check):
    code, said = check("git", "g++", torch="gpu")
    assert (code, said) == (2, "error: TORCH=gpu: there are cpu, cuda and here\n")


@pytest.mark.parametrize(
    ("there", "asked", "again"),
    [
        *[("cpu", "", False), ("cpu", "cpu", False), ("cpu", "cuda", True), ("cuda", "cpu", True), ("", "cuda", True)],
        *[("here", "", False), ("here", "here", False), ("cpu", "here", True), ("here", "cpu", True)],
    ],
)
def test_another_build_is_set_up_when_it_is_asked_for(tmp_path, there, asked, again):
    (tmp_path / ".complete").write_text(f"{there}\n")
    command = ["make", "-n", "setup", f"VENV={tmp_path}", f"TORCH={asked}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert (f'setup/install.sh python3 {tmp_path} "{asked}"' in done.stdout) == again


def test_pytorch_is_taken_from_the_active_environment_where_it_has_one(tmp_path):
    folders, here = tmp_path / "folders", PROJECT / "setup" / "here.sh"
    venv.create(tmp_path / "theirs")
    python = tmp_path / "theirs" / "bin" / "python"
    packages = next((tmp_path / "theirs" / "lib").glob("python*/site-packages"))
    (packages / "those.pth").write_text(str(Path(torch.__file__).parents[1]))
    found = subprocess.run([here, "find", python, folders], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == f"PyTorch {torch.__version__} of {tmp_path / 'theirs'}"
    assert str(Path(torch.__file__).parents[1]) in folders.read_text().splitlines()
    alone = tmp_path / "python"
    alone.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    alone.chmod(0o755)
    done = subprocess.run([here, "find", alone, tmp_path / "none"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, (tmp_path / "none").exists()) == (1, "", False)
    assert done.stderr.startswith(f"error: TORCH=here takes the PyTorch of {sys.executable}, which has none.")
    # An older one than was ever tried, and Lockstep's own.
    (packages / "those.pth").unlink()
    (packages / "torch-2.1.0.dist-info").mkdir()
    (packages / "torch-2.1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.1.0\n")
    done = subprocess.run([here, "find", python, tmp_path / "none"], capture_output=True, text=True, check=False)
    assert "proven with PyTorch 2.11 to 2.13, and here is 2.1.0" in done.stderr
    if Path(sys.prefix) == PROJECT / ".venv":
        done = subprocess.run([here, "find", sys.executable, folders], capture_output=True, text=True, check=False)
        assert "the active environment is Lockstep's own .venv" in done.stderr


def test_beside_it_all_packages_are_pinned_and_none_is_pytorch():
    here = PROJECT / "setup" / "here.sh"
    packages = subprocess.run([here, "packages"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert all("==" in package for package in packages)
    names = {package.split("==")[0].lower() for package in packages}
    assert {"transformers", "snakemake", "pytest", "setuptools"} <= names
    assert not [name for name in names if name == "torch" or name.startswith(("nvidia-cu", "triton"))]


@pytest.mark.parametrize(("there", "said"), [("cpu", True), ("cuda", False), ("here", False)])
def test_gpus_that_came_later_are_pointed_out(tmp_path, there, said):
    (tmp_path / ".complete").write_text(f"{there}\n")
    program(tmp_path / "bin" / "nvidia-smi", TWO_GPUS)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["make", "setup", f"VENV={tmp_path}", "TORCH="]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
    note = f"note: there are GPUs here, and {tmp_path} has PyTorch's cpu build: make setup TORCH=cuda\n"
    assert done.stderr == (note if said else "")


class Indexes:
    """A copy of what set-up works with, and two indexes as folders: pip's own, and PyTorch's.

    Their wheels hold next to nothing, and the copy's locks name them by their hashes.
    """

    def __init__(self, folder: Path, python: Path):
        self.folder, self.python = folder, python
        self.lock("cpu", "")
        self.lock("cuda", "")
        for name in ("setup", "workflow/scripts"):
            shutil.copytree(PROJECT / name, folder / name)
        shutil.copy(PROJECT / "requirements.txt", folder)

    def lock(self, variant: str, lines: str) -> None:
        file = self.folder / "docker" / "locks" / f"torch-{variant}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines + "tqdm==4.70.1 \\\n    --hash=sha256:" + 64 * "0" + "\n")  # which both have

    def wheel(self, index: str, name: str, version: str, **files: str) -> str:
        """Add a wheel to that index; returns its line in a lock."""
        place = self.folder / index / name.replace("_", "-")
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(file, "w") as packed:
            for path, text in files.items():
                packed.writestr(path.replace("__", "/", 1) + ".py", text)
            packed.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            packed.writestr(f"{about}/RECORD", "")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        with (place / "index.html").open("a") as page:
            page.write(f'<a href="{file.name}#sha256={digest}">{file.name}</a>\n')
        return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"

    def torch(self, index: str, build: str) -> str:
        builds = {"cpu": ("2.13.0+cpu", None), "cuda": ("2.13.0", "13.0"), "rocm": ("2.13.0+rocm7.1", None)}
        version, cuda = builds[build]
        return self.wheel(index, "torch", version, torch____init__="", torch__version=f"cuda: str | None = {cuda!r}\n")

    def install(self, *arguments: str, cpu_index: str = "") -> subprocess.CompletedProcess:
        """Run setup/torch.sh, with the first index as the machine's own."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        own |= {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"file://{self.folder}/own",
            "CPU_INDEX_URL": cpu_index,
        }
        command = [self.folder / "setup" / "torch.sh", self.python, *arguments]
        return subprocess.run(command, env=own, capture_output=True, text=True, check=False)

    @property
    def installed(self) -> dict[str, str]:
        command = [self.python, "-m", "pip", "list", "--disable-pip-version-check", "--format=freeze"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        packages = dict(line.split("==") for line in done.stdout.splitlines())
        return {name: version for name, version in packages.items() if name not in ("pip", "setuptools")}


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def indexes(tmp_path, empty_venv):
    made = Indexes(tmp_path, empty_venv)
    yield made
    if there := list(made.installed):
        subprocess.run([empty_venv, "-m", "pip", "uninstall", "--quiet", "--yes", *there], check=True)


@pytest.fixture
def silent():
    """The address of a server that takes what it is sent, and never answers: so does a firewall."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/whl/cpu"


def test_the_index_of_this_machine_comes_first(indexes):
    indexes.lock("cpu", indexes.torch("own", "cpu"))
    indexes.torch("own", "cuda")
    done = indexes.install("cpu", cpu_index="http://127.0.0.1:9/never-asked")
    assert done.returncode == 0, done.stderr
    assert indexes.installed == {"torch": "2.13.0+cpu"}
    assert "never-asked" not in done.stdout + done.stderr


def test_pytorch_s_index_is_asked_for_the_cpu_build_that_this_machine_s_lacks(indexes):
    indexes.lock("cpu", indexes.torch("pytorch", "cpu"))
    indexes.torch("own", "cuda")
    done = indexes.install("cpu", cpu_index=f"file://{indexes.folder}/pytorch")
    assert done.returncode == 0, done.stderr
    assert indexes.installed == {"torch": "2.13.0+cpu"}
    assert indexes.install("cpu", "cpu").returncode == 0  # again, and no index has it now


def test_a_build_for_gpus_of_amd_is_kept_unless_another_one_is_asked_for(indexes):
    indexes.torch("own", "rocm")
    wheel = next((indexes.folder / "own" / "torch").glob("*.whl"))
    subprocess.run([indexes.python, "-m", "pip", "install", "--quiet", wheel], check=True)
    indexes.lock("cpu", indexes.torch("own", "cpu"))
    done = indexes.install("cpu")
    assert (done.returncode, done.stdout) == (0, "note: PyTorch 2.13.0+rocm7.1, the build for AMD's GPUs, is kept\n")
    assert indexes.installed == {"torch": "2.13.0+rocm7.1"}
    assert indexes.install("cpu", "cpu").returncode == 0
    assert indexes.installed == {"torch": "2.13.0+cpu"}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock of the CPU build is for Python 3.11")
def test_a_cpu_build_of_another_hash_is_refused(indexes):
    indexes.lock("cpu", re.sub("sha256:.*", "sha256:" + 64 * "1", indexes.torch("pytorch", "cpu")))
    done = indexes.install("cpu", cpu_index=f"file://{indexes.folder}/pytorch")
    assert done.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not indexes.installed


UNREACHED = "pip's index does not have it, and {} does not answer or does not have it\n"


def test_where_pytorch_s_index_is_out_of_reach_it_says_so_soon(indexes, silent):
    indexes.lock("cuda", indexes.torch("own", "cuda"))
    began = time.monotonic()
    done = indexes.install("cpu", cpu_index=silent)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60  # where it could be reached it takes a few seconds
    note = "note: PyTorch's CPU build can't be had, so what pip's index gives is taken: "
    assert note + UNREACHED.format(silent) in done.stdout
    assert indexes.installed == {"torch": "2.13.0"}


def test_a_cpu_build_that_was_asked_for_by_name_is_not_replaced(indexes):
    """By three gigabytes of something else."""
    indexes.lock("cuda", indexes.torch("own", "cuda"))
    nobody = "http://127.0.0.1:9"
    done = indexes.install("cpu", "cpu", cpu_index=nobody)
    assert done.returncode == 1
    assert done.stderr.endswith(f"error: PyTorch's CPU build can't be had: {UNREACHED.format(nobody)}")
    assert not indexes.installed


def test_cuda_s_build_comes_with_its_libraries_and_goes_with_them(indexes):
    """Also where the index has a CPU build, which would do for `torch==2.13.0` and be preferred."""
    indexes.lock("cuda", indexes.torch("own", "cuda") + indexes.wheel("own", "nvidia_cublas", "13.1.1.3"))
    indexes.lock("cpu", indexes.torch("own", "cpu"))
    done = indexes.install("cuda")
    assert done.returncode == 0, done.stderr
    assert indexes.installed == {"torch": "2.13.0", "nvidia_cublas": "13.1.1.3"}
    done = indexes.install("cpu")
    assert done.returncode == 0, done.stderr
    assert indexes.installed == {"torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("build", "cuda", "kept", "reused"),
    [
        ("cu130", "13.0", "gloo", False),
        ("cu130", "13.0", "gloo-gpu", False),
        ("cu130", "13.0", "gloo-nccl", True),
        ("cpu", None, "gloo", True),
        ("cpu", None, "gloo-nccl", False),
    ],
)
def test_for_gpus_a_horovod_without_nccl_is_not_reused(tmp_path, empty_venv, build, cuda, kept, reused):
    """It would move all gradients through the CPU. What is not reused is built anew, which needs g++."""
    torch = f'__version__ = "2.13.0+{build}"\nclass version:\n    cuda = {cuda!r}\n'
    (tmp_path / "torch.py").write_text(torch)
    cache = tmp_path / "lockstep" / "horovod-0.28.1-py{}{}-torch2.13.0+{}-{}".format(*sys.version_info[:2], build, kept)
    cache.mkdir(parents=True)
    (cache / "kept.whl").touch()  # which pip refuses, by its name
    for name in ("bash", "dirname", "basename", "readlink", "ls"):
        (tmp_path / name).symlink_to(shutil.which(name))
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [PROJECT / "docker" / "build-horovod.sh", empty_venv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert ("kept.whl is not a valid wheel filename" in done.stderr) == reused
    assert ("building Horovod needs g++" in done.stderr) != reused


def test_cuda_s_wheels_are_laid_out_as_a_toolkit_beside_the_environment(tmp_path):
    """With the compiler fetched to a folder of its own, which has a part of what the environment has too."""
    fetched, environment = tmp_path / "fetched" / "nvidia", tmp_path / "environment" / "nvidia"
    libraries = ("cu13/lib/libcudart.so.13", "nccl/lib/libnccl.so.2", "nccl/include/nccl.h", "cu13/include/cublas.h")
    for folder, names in ((fetched, ("cu13/bin/nvcc", libraries[0])), (environment, libraries)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    before = sorted(environment.rglob("*"))
    (fetched / "cu13" / "bin" / "nvcc").chmod(0o755)
    script = f". {PROJECT}/docker/toolkit.sh; toolkit {sys.executable} {tmp_path}/cuda; "
    script += 'echo "$CUDA_HOME $NCCL_HOME"; command -v nvcc'
    search = os.environ | {"PYTHONPATH": f"{fetched.parent}:{environment.parent}"}
    done = subprocess.run(["bash", "-euc", script], env=search, capture_output=True, text=True, check=True)
    home = tmp_path / "cuda"
    assert done.stdout.split() == [str(home), str(home / "nccl"), str(home / "bin" / "nvcc")]
    for name in ("lib/libcudart.so", "lib64/libcudart.so.13", "nccl/lib/libnccl.so", "include/cublas.h", "bin/nvcc"):
        assert (home / name).is_file(), name
    assert sorted(environment.rglob("*")) == before


def test_what_pip_says_is_shown_only_where_it_fails(tmp_path):
    """With a Python whose pip finds nothing."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {python} "$3/bin/python"; exit; fi\n'
        f'[ "$2" = pip ] || exec {sys.executable} -S "$@"\n'
        "echo 'WARNING: a mirror does not answer'; echo 'ERROR: no such package'; exit 1\n"
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"
    command = [PROJECT / "setup" / "install.sh", python, venv, "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    steps = done.stdout.splitlines()
    assert steps[0].startswith(f"set-up, 1 of 5: a Python environment in {venv} ... ")
    assert steps[1] == "set-up, 2 of 5: PyTorch's cpu build, as TORCH=cpu asks for it ... failed"
    assert "ERROR: no such package" in done.stderr
    assert (venv / "setup.log").read_text().startswith("== a Python environment")
    assert done.stderr.splitlines()[-1].startswith("error: set-up failed.")


@pytest.mark.slow
def test_deepspeed_trains_where_nothing_can_be_compiled(tmp_path):
    copy = copy_project(tmp_path / "project")
    small = ["data.limit=300", "model.hidden_size=32", "model.layers=1", "train.max_steps=3", "train.eval_every=0"]
    small += ["train.checkpoint=last", "hardware.device=cpu", "hardware.processes=2", "hardware.oversubscribe=true"]
    arguments = [word for value in [*small, "hardware.threads=1"] for word in ("--set", value)]
    for script, *more in (("prepare",), ("plan",), ("launch", "--row", "deepspeed")):
        nothing = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        done = copy.script(script, *arguments, *more, timeout=600, **nothing)
        assert done.returncode == 0, done.stderr
    (file,) = copy.path("results/runs/deepspeed").glob("n2/rep1/record.json")
    assert "collectives through shared memory could not be compiled, so gloo's were used" in file.read_text()
