"""What is passed into a container, which image a row uses, and what is refused before anything is trained."""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

import self_test
from lockstep import paths
from lockstep.config import containers, registry, schema
from lockstep.config.machine import VARIABLES
from lockstep.config.reading import read
from lockstep.data import sources
from lockstep.data.labels import Labels
from lockstep.errors import BadInput, RunFailed
from lockstep.report import cautions, conditions
from lockstep.report.environments import merge_environments
from tests import made
from tests.conftest import PROJECT

LOCKS = PROJECT / "docker" / "locks"
CPU = ["hardware.device=cpu"]


def config(*overrides: str):
    return read([PROJECT / "config" / "config.yaml"], [*CPU, *overrides])


@pytest.fixture
def apptainer(tmp_path, monkeypatch):
    """A working folder, with a program of that name on PATH, which is looked up and never run."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.chdir(tmp_path)
    for module in (paths, containers):  # as if the project lay here
        monkeypatch.setattr(module, "PROJECT", tmp_path)
    return tmp_path


def sif(name: str) -> bytes:
    return b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + name.encode()


def make_images(folder, *names: str) -> None:
    (folder / containers.SIF).mkdir(parents=True)
    sums = []
    for name in names:
        (folder / containers.SIF / f"{name}-cpu.sif").write_bytes(sif(name))
        sums.append(f"{hashlib.sha256(sif(name)).hexdigest()}  {name}-cpu.sif")
    (folder / containers.SUMS).write_text("\n".join(sums) + "\n")


def test_each_strategy_has_an_image():
    families = {name: containers.family(name) for name in registry.names()}
    for family in ("deepspeed", "horovod"):
        assert families.pop(family) == families.pop(f"published_{family}") == family
    assert set(families.values()) == {"torch"}


def test_without_apptainer_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="Apptainer is not installed here"):
        containers.check(config())


def test_a_missing_image_is_named_with_what_makes_it(apptainer):
    make_images(apptainer, "torch", "deepspeed")
    with pytest.raises(BadInput, match=r"containers\.horovod: docker/sif/horovod-cpu\.sif does not exist.*make sif"):
        containers.check(config())
    containers.check(config("rows.horovod=null"))  # an image that no row needs may be missing


def test_an_image_that_is_not_the_one_that_was_built_is_refused(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    containers.check(config())
    (apptainer / containers.SIF / "deepspeed-cpu.sif").write_bytes(sif("another"))
    for same in ("auto", str(apptainer / containers.SIF / "deepspeed-cpu.sif")):
        with pytest.raises(BadInput, match=r"containers\.deepspeed: .* is not the image that .* names"):
            containers.check(config(f"containers.deepspeed={same}"))


def test_what_is_no_image_is_refused(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    (apptainer / containers.SIF / "torch-cpu.sif").write_text("hello")
    with pytest.raises(BadInput, match=r"containers\.torch: .* is not a \.sif file"):
        containers.check(config())


def test_a_damaged_list_of_digests_is_named(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    (apptainer / containers.SUMS).write_text("garbage\n")
    with pytest.raises(BadInput, match="SHA256SUMS: has a line that is not a digest"):
        containers.check(config())


def test_a_registry_needs_a_digest(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    with pytest.raises(BadInput, match="has no digest"):
        containers.check(config("containers.torch=docker://ghcr.io/me/torch:latest"))
    with pytest.raises(BadInput, match="has no digest"):
        containers.check(config("containers.torch=docker://ghcr.io/me/torch@sha256:abc"))
    containers.check(config(f"containers.torch=docker://ghcr.io/me/torch@sha256:{64 * '0'}"))


def test_only_what_changes_speed_goes_in_and_own_files_are_bound(tmp_path, monkeypatch):
    data = tmp_path / "rows" / "my data.json"
    data.parent.mkdir()
    data.write_text("[]")
    monkeypatch.setenv("MY_SECRET_TOKEN", "canary")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "")  # would be looked up in the image
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    said = shlex.split(containers.arguments(config(f"data.path={data}"), {}))
    assert said == ["--cleanenv", f"--bind={data.parent}:{data.parent}:ro"]
    handed = {name: value for name, value in containers.os.environ.items() if name.startswith("APPTAINERENV_")}
    assert handed["APPTAINERENV_NCCL_P2P_DISABLE"] == "1"
    assert handed["APPTAINERENV_HF_ENDPOINT"] == "https://mirror.example"
    assert "APPTAINERENV_HF_TOKEN" not in handed
    assert "canary" not in handed.values()
    assert "APPTAINERENV_LD_PRELOAD" not in handed
    assert all(str(PROJECT.cwd()) in handed[f"APPTAINERENV_{name}"] for name in ("HF_HOME", "TORCH_HOME"))


def test_a_folder_that_apptainer_cannot_bind_is_refused(tmp_path, monkeypatch):
    data = tmp_path / "a,b" / "data.json"
    data.parent.mkdir()
    data.write_text("[]")
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    with pytest.raises(BadInput, match="can't bind a folder with a comma or colon"):
        containers.arguments(config(f"data.path={data}"), {})


def test_a_workflow_elsewhere_sees_the_project_and_its_images(apptainer, tmp_path, monkeypatch):
    """This is the case if another workflow uses Lockstep as a module."""
    make_images(apptainer, *containers.FAMILIES)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    asked = config()
    known = containers.check(asked)
    assert known["torch"][0] == str(tmp_path / "docker" / "sif" / "torch-cpu.sif")
    assert f"--bind={tmp_path}:{tmp_path}:ro" in shlex.split(containers.arguments(asked, known))


def test_an_image_is_known_by_its_own_digest_wherever_it_is(apptainer, monkeypatch):
    make_images(apptainer, *containers.FAMILIES)
    reference = f"docker://ghcr.io/me/lockstep-torch@sha256:{64 * '0'}"
    own = apptainer / "own" / "horovod-cpu.sif"  # the name of another file that `make sif` made
    own.parent.mkdir()
    own.write_bytes(sif("own"))
    asked = config(f"containers.torch={reference}", f"containers.horovod={own}")
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    containers.arguments(asked, containers.check(asked))
    inside = {containers.KNOWN: containers.os.environ[f"APPTAINERENV_{containers.KNOWN}"]}
    for name, file, expected in (
        ("torch", "/cache/0123.simg", (reference, f"sha256:{64 * '0'}")),
        ("horovod", str(own), (str(own), f"sha256:{hashlib.sha256(sif('own')).hexdigest()}")),
        ("other", "/some/where.sif", ("/some/where.sif", None)),
    ):
        here = inside | {"LOCKSTEP_IMAGE": f"lockstep/{name}:cpu", "APPTAINER_CONTAINER": file}
        monkeypatch.setattr(containers.os, "environ", here)
        assert containers.current() == expected


def test_docker_hands_in_what_apptainer_does():
    """Proxies, the hub's mirror and a token are passed only to services with a network."""
    speed = {*VARIABLES} - {containers.FOREIGN}
    for service, expected in (("bench", speed), ("fetch", speed | {*containers.PROXIES, *containers.HUB})):
        handed = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"][service]["environment"]
        assert {name for name, value in handed.items() if value is None} == expected
        assert handed["HF_HOME"] == "/bench/.snakemake/cache/huggingface"


def locked(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_table_of_versions_is_what_the_locks_hold(variant):
    table = yaml.safe_load((PROJECT / "docker" / "images.yaml").read_text())[variant]
    torch = locked(f"torch-{variant}")
    assert table["torch"] == torch["torch"]
    assert locked("sources")["deepspeed"] == table["deepspeed"]
    assert f"version={table['horovod']}\n" in (PROJECT / "docker" / "build-horovod.sh").read_text()
    if variant == "cuda":
        assert torch["nvidia-nccl-cu13"] == table["nccl"]
        assert torch["nvidia-cudnn-cu13"].startswith(table["cudnn"])
        assert torch["nvidia-cuda-runtime"].startswith(table["cuda"])
    else:
        assert not [name for name in torch if name.startswith("nvidia-c")]


@pytest.mark.parametrize("lock", sorted(file.stem for file in LOCKS.glob("*.txt")))
def test_everything_that_is_installed_has_a_hash(lock):
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    packages = [place for place, line in enumerate(lines) if "==" in line]
    assert packages
    assert all(lines[place + 1].strip().startswith("--hash=sha256:") for place in packages)


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_images_hold_what_the_requirements_name(variant):
    wanted = dict(re.findall(r"^([\w.-]+)==(\S+)", (PROJECT / "requirements.txt").read_text(), re.MULTILINE))
    have = {
        name.lower(): version.split("+")[0]
        for name, version in (locked(f"bench-{variant}") | locked("sources")).items()
    }
    assert {name: have.get(name.lower()) for name in wanted} == wanted


def test_an_image_whose_digest_is_not_known_any_more_is_refused(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    (apptainer / containers.SUMS).unlink()
    with pytest.raises(BadInput, match=r"containers\.torch: .* is not named in docker/sif/SHA256SUMS, or that is gone"):
        containers.check(config())
    own = apptainer / "own.sif"  # nobody keeps a digest of what lies elsewhere
    own.write_bytes(sif("own"))
    containers.check(config(*(f"containers.{name}={own}" for name in containers.FAMILIES)))


def test_in_docker_a_path_outside_the_folder_says_that_it_is_not_seen(monkeypatch):
    monkeypatch.setattr(containers, "kind", lambda: "docker")
    wanted = read([PROJECT / "config" / "config.yaml"], ["data.path=/home/me/rows.csv"]).data
    with pytest.raises(BadInput, match=r"Name an existing one\. A container sees only the project's folder"):
        sources.read(wanted, Path("downloads"), [], Labels())
    monkeypatch.setattr(containers, "kind", lambda: None)
    assert containers.outside("/home/me/rows.csv") == containers.offline() == ""


# What entry.sh needs of a container is a folder with results/ and .snakemake/.
@pytest.fixture
def enter(tmp_path):
    for name in ("results", ".snakemake"):
        (tmp_path / name).mkdir()

    def run(*command: str, stdin=subprocess.PIPE) -> subprocess.CompletedProcess:
        entry, said = ["bash", PROJECT / "docker" / "entry.sh", *command], [tmp_path / "out", tmp_path / "err"]
        with said[0].open("wb") as out, said[1].open("wb") as err:
            process = subprocess.Popen(entry, cwd=tmp_path, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
        process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):  # what waits for the end of the input, as a container's end does
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin:
            process.stdin.close()
        return subprocess.CompletedProcess(entry, process.returncode, *(file.read_text() for file in said))

    return run


def test_a_container_that_nothing_could_end_does_not_start(enter, tmp_path):
    into, ours = os.pipe()
    os.close(ours)  # as Compose hands in what is empty
    refused = enter("echo", "started", stdin=into)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "docker compose run -d" in refused.stderr
    assert enter("echo", "started").stdout == "started\n"  # its input stays open
    assert enter("echo", "started", stdin=subprocess.DEVNULL).stdout == "started\n"  # detached


def test_a_configuration_file_that_a_container_does_not_see_is_named(enter):
    refused = enter("echo", "--configfile", "/home/me/mine.yaml")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "error: /home/me/mine.yaml is not there: a container sees only the project's folder."
    )


ENVIRONMENT = {"python": "3.11.2", "in_container": "docker", "packages": {"torch": "2.13.0", "horovod": None}}


def environments(*changes: dict) -> list[dict]:
    rest = dict.fromkeys(("cpu", "cores", "gpus", "commit", "system", "kernel", "cuda", "cudnn", "nccl", "mpi"))
    image = {"image": "lockstep/bench:cpu", "image_digest": "sha256:aaa"}
    return [rest | ENVIRONMENT | image | change for change in changes]


def test_all_builds_and_versions_are_listed():
    merged = merge_environments(
        environments({}, {"image_digest": "sha256:bbb"}, {"python": "3.11.7", "in_container": None, "image": None}, {})
    )
    assert merged["images"] == {"lockstep/bench:cpu": ["sha256:aaa", "sha256:bbb"]}
    assert merged["python"] == "3.11.2 / 3.11.7"
    assert merged["in_container"] == "docker / no container"
    assert merged["packages"] == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("seen", "mixed"), [(["H100"], []), (["H100", "H100"], []), (["A100"], ["gpus"]), (["H100", "A100"], ["gpus"])]
)
def test_a_row_that_sees_only_the_first_gpu_is_of_the_same_machine(seen, mixed):
    """`single` is such a row; the table lists all GPUs that any row sees."""
    both = environments({"gpus": seen}, {"gpus": ["H100", "H100"]})
    assert cautions.mixed_conditions([made.run(environment=each) for each in both]) == mixed
    if not mixed:
        assert conditions.machine(merge_environments(both), "cuda").en == "2 x H100"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"image_digest": "sha256:bbb"}, ["build of an image"]),
        ({"python": "3.11.7"}, ["python"]),
        ({"image": "lockstep/torch:cpu", "image_digest": "sha256:bbb"}, []),  # each family has its own
    ],
)
def test_a_table_of_unlike_builds_says_so(change, what):
    runs = [made.run(environment=environment) for environment in environments({}, change)]
    assert cautions.mixed_conditions(runs) == what


# One list of images: docker/images.yaml's.
def test_the_dockerfile_has_a_target_for_each_image():
    text = (PROJECT / "docker" / "Dockerfile").read_text()
    targets = text[text.index("# The targets.") :]
    stages = re.findall(r"^FROM \S+ AS (\S+)$", targets, re.MULTILINE)
    assert stages == [*containers.FAMILIES, "bench"]
    assert re.findall(r"^ENV LOCKSTEP_IMAGE=lockstep/(\S+):\$\{VARIANT\}$", targets, re.MULTILINE) == stages


def test_each_family_can_be_given_an_image():
    assert tuple(schema.of_configuration()["properties"]["containers"]["properties"]) == containers.FAMILIES


@pytest.fixture
def engines(tmp_path):
    """A copy of what builds images, with a docker and an apptainer that only record their arguments."""
    shutil.copytree(PROJECT / "docker", tmp_path / "docker", ignore=shutil.ignore_patterns("wheels", "sif", "locks"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    # apptainer build --force --mksquashfs-args ARGUMENTS FILE IMAGE
    for name, command in (("docker", ""), ("apptainer", '\ntouch "$5"')):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> asked{command}\n')
        (programs / name).chmod(0o755)

    def run(script: str, **environment: str) -> tuple[subprocess.CompletedProcess, str]:
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(tmp_path / "docker" / script)]
        finished = subprocess.run(
            command, env=os.environ | {"PATH": path} | environment, capture_output=True, text=True, check=False
        )
        asked = tmp_path / "asked"
        return finished, asked.read_text() if asked.is_file() else ""

    return run


def test_all_images_are_built(engines):
    finished, asked = engines("build.sh")
    assert finished.returncode == 0, finished.stderr
    assert re.findall(r"--tag lockstep/(\S+):cpu", asked) == [*containers.FAMILIES, "bench"]


def test_an_image_that_there_is_none_of_is_refused(engines):
    finished, asked = engines("build.sh", IMAGES="torch tensorflow")
    assert (finished.returncode, asked) == (2, "")
    every = " ".join([*containers.FAMILIES, "bench"])
    assert finished.stderr == f'error: IMAGES="torch tensorflow": there is no image tensorflow; there are {every}\n'


def test_each_family_becomes_a_file_for_apptainer(engines, tmp_path):
    finished, asked = engines("sif.sh", VARIANT="cuda")
    assert finished.returncode == 0, finished.stderr
    assert re.findall(r"docker-daemon:lockstep/(\S+):cuda", asked) == [*containers.FAMILIES]
    files = [line.split()[1] for line in (tmp_path / containers.SUMS).read_text().splitlines()]
    assert files == sorted(f"{name}-cuda.sif" for name in containers.FAMILIES)


@pytest.mark.parametrize(
    ("image", "missing", "cuda", "says"),
    [
        ("lockstep/deepspeed:cpu", "deepspeed", None, "lockstep/deepspeed:cpu: deepspeed is not installed"),
        ("lockstep/bench:cpu", "horovod", None, "lockstep/bench:cpu: horovod is not installed"),
        ("lockstep/torch:cuda", "", None, "is built for CPUs alone, and this image is for CUDA 13.0"),
        ("lockstep/deepspeed:cuda", "", "12.6", "is built for CUDA 12.6, and this image is for CUDA 13.0"),
        ("lockstep/torch:cpu", "", "13.0", "is built for CUDA 13.0, and this image is for CPUs alone"),
        ("lockstep/torch:cpu", "deepspeed", None, None),  # a family's image has no other's framework
        ("lockstep/deepspeed:cuda", "horovod", "13.0", None),
        ("", "horovod", "12.6", None),  # not an image
    ],
)
def test_an_image_without_what_it_is_for_fails_its_self_test(image, missing, cuda, says, monkeypatch):
    trained = []
    monkeypatch.setenv("LOCKSTEP_IMAGE", image)
    monkeypatch.setattr(self_test, "available", lambda strategy: strategy != missing)
    monkeypatch.setattr(self_test.torch.version, "cuda", cuda)
    monkeypatch.setattr(self_test.registry, "load", lambda strategy: None)
    monkeypatch.setattr(self_test, "step", lambda script, *arguments: trained.append(arguments[-1]) or "")
    monkeypatch.setattr("sys.argv", ["self_test.py"])
    if says is None:
        self_test.main()
        assert trained[2:] == [row for row in self_test.ROWS if row != missing]
    else:
        with pytest.raises(RunFailed, match=re.escape(says)):
            self_test.main()
        assert trained == []
