"""What goes into a container, which image a row takes, and what is refused before anything is trained."""

import hashlib
import re
import shlex

import pytest
import yaml

from lockstep import containers, strategies
from lockstep.config import read
from lockstep.errors import BadInput

from .conftest import PROJECT

LOCKS = PROJECT / "docker" / "locks"
CPU = ["hardware.device=cpu"]


def config(*overrides: str):
    return read([PROJECT / "config" / "config.yaml"], [*CPU, *overrides])


@pytest.fixture
def apptainer(tmp_path, monkeypatch):
    """A folder to work in, with a program of that name on PATH: only its being there is asked for."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_images(folder, *names: str) -> None:
    (folder / containers.SIF).mkdir(parents=True)
    sums = []
    for name in names:
        (folder / containers.SIF / f"{name}-cpu.sif").write_bytes(name.encode())
        sums.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}-cpu.sif")
    (folder / containers.SUMS).write_text("\n".join(sums) + "\n")


def test_each_strategy_has_an_image():
    found = {name: containers.family(name) for name in strategies.names()}
    assert found.pop("deepspeed") == "deepspeed"
    assert found.pop("horovod") == "horovod"
    assert set(found.values()) == {"torch"}


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
    (apptainer / containers.SIF / "deepspeed-cpu.sif").write_bytes(b"another")
    with pytest.raises(BadInput, match=r"containers\.deepspeed: .* is not the image that .* names"):
        containers.check(config())


def test_a_registry_needs_a_digest(apptainer):
    make_images(apptainer, *containers.FAMILIES)
    with pytest.raises(BadInput, match="names no digest"):
        containers.check(config("containers.torch=docker://ghcr.io/me/torch:latest"))
    containers.check(config(f"containers.torch=docker://ghcr.io/me/torch@sha256:{64 * '0'}"))


def test_only_what_changes_speed_goes_in_and_own_files_are_bound(tmp_path, monkeypatch):
    data = tmp_path / "rows" / "my data.json"
    data.parent.mkdir()
    data.write_text("[]")
    monkeypatch.setenv("MY_SECRET_TOKEN", "canary")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    said = shlex.split(containers.arguments(config(f"data.path={data}")))
    assert said == ["--cleanenv", f"--bind={data.parent}:{data.parent}:ro"]
    handed = {name: value for name, value in containers.os.environ.items() if name.startswith("APPTAINERENV_")}
    assert handed["APPTAINERENV_NCCL_P2P_DISABLE"] == "1"
    assert "canary" not in handed.values()
    assert all(str(PROJECT.cwd()) in handed[f"APPTAINERENV_{name}"] for name in ("HF_HOME", "TORCH_HOME"))


def test_an_image_of_a_registry_is_known_by_its_name_and_digest(apptainer, monkeypatch):
    make_images(apptainer, *containers.FAMILIES)
    reference = f"docker://ghcr.io/me/lockstep-torch@sha256:{64 * '0'}"
    monkeypatch.setattr(containers.os, "environ", dict(containers.os.environ))
    containers.arguments(config(f"containers.torch={reference}"))
    inside = {name: containers.os.environ[f"APPTAINERENV_{name}"] for name in (containers.REFERENCES,)}
    for name, expected in (
        ("torch", (reference, f"sha256:{64 * '0'}")),
        ("horovod", ("/work/docker/sif/horovod-cpu.sif", hashlib.sha256(b"horovod").hexdigest())),
    ):
        inside |= {"LOCKSTEP_IMAGE": f"lockstep/{name}:cpu", "APPTAINER_CONTAINER": f"/work/docker/sif/{name}-cpu.sif"}
        monkeypatch.setattr(containers.os, "environ", inside)
        assert containers.current() == expected


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
