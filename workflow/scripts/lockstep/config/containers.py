"""The container images for --use-singularity: select and verify them, and compose Apptainer's arguments.

It imports nothing slow, since the Snakefile uses it before anything is trained.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lockstep import caches, provenance
from lockstep.config import registry
from lockstep.config.machine import VARIABLES
from lockstep.errors import BadInput
from lockstep.files import hash_file
from lockstep.paths import IMAGES, PROJECT, of_project

if TYPE_CHECKING:  # ranks import this module, and start sooner without jsonschema
    from lockstep.config.configuration import Config

# Each family of strategies has an image; `torch` is for strategies without an image of their own.
FAMILIES = tuple(yaml.safe_load(IMAGES.read_text(encoding="utf-8"))["families"])
SIF = Path("docker/sif")
SUMS = SIF / "SHA256SUMS"  # written by `make sif`
KNOWN = "LOCKSTEP_IMAGES"  # environment variable with the result of `check`, as JSON
FOREIGN = "LD_PRELOAD"  # names a library of the host, which may not fit an image's C library
# Variables passed into a container, besides those that change speed or numbers; no others are passed.
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET")


def family(strategy: str) -> str:
    return next((need.package for need in registry.needs(strategy) if need.package in FAMILIES), "torch")


def images(config: Config) -> dict[str, str]:
    """Each family's image: the configured one, or the local .sif file for this machine's devices."""
    devices = {row.hardware.device for row in config.rows.values()}
    variant = "cuda" if "cuda" in devices else "cpu"
    return {
        name: str(of_project(SIF / f"{name}-{variant}.sif"))
        if config.containers[name] == "auto"
        else config.containers[name]
        for name in FAMILIES
    }


def check(config: Config) -> dict[str, tuple[str, str]]:
    """The images that the rows need, by family: name (for a file, its absolute path) and digest.

    Raises BadInput if Apptainer or an image is missing, or an image is not the one that was built.
    """
    if not (shutil.which("apptainer") or shutil.which("singularity")):
        raise BadInput("--use-singularity: Apptainer is not installed here. Install it, or run without containers.")
    needed = {"torch"} | {family(row.strategy) for row in config.rows.values()}
    return {name: _known(name, image) for name, image in images(config).items() if name in needed}


def _known(name: str, image: str) -> tuple[str, str]:
    if "://" in image:
        if not re.search("@sha256:[0-9a-f]{64}$", image):
            raise BadInput(f"containers.{name}: {image} has no digest, so it may change; write …@sha256:….")
        return image, image.rpartition("@")[2]
    file = Path(image)
    if not file.is_file():
        raise BadInput(f"containers.{name}: {image} does not exist. Build it with make sif, or run without containers.")
    with file.open("rb") as stream:
        if b"SIF_MAGIC" not in stream.read(64):
            raise BadInput(f"containers.{name}: {image} is not a .sif file. Build it again: make sif.")
    digest = hash_file(file)
    if file.absolute().parent == of_project(SIF).absolute() and digest != (wanted := _sums().get(file.name)):
        why = "is not the image that {} names: its sha256 differs" if wanted else "is not named in {}, or that is gone"
        raise BadInput(f"containers.{name}: {image} {why.format(SUMS)}. Build it again: make sif.")
    return str(file.absolute()), f"sha256:{digest}"


def _sums() -> dict[str, str]:
    """The digest of each file that `make sif` built, by file name."""
    sums = of_project(SUMS)
    if not sums.is_file():
        return {}
    lines = [line.split() for line in sums.read_text(encoding="utf-8").splitlines()]
    if any(len(line) != 2 for line in lines):
        raise BadInput(f"{SUMS}: has a line that is not a digest and file name. Build the images again: make sif.")
    return {name: digest for digest, name in lines}


def arguments(config: Config, images: dict[str, tuple[str, str]]) -> str:
    """Apptainer's arguments, which give a container the working directory, /tmp, the user's files (read-only) and GPUs.

    Of the host's environment only variables that change speed or numbers are passed, and those for downloads (proxies,
    the hub); `images` is passed, too. Caches stay in the working directory.
    """
    cache = caches.here()
    names = {*VARIABLES, *PROXIES, *HUB} - {FOREIGN}
    handed = {name: os.environ[name] for name in sorted(names & os.environ.keys())}
    handed |= {KNOWN: json.dumps(images), provenance.COMMIT: json.dumps(provenance.commit())}
    handed |= {caches.VARIABLE: cache, "HF_HOME": cache / "huggingface", "TORCH_HOME": cache / "torch"}
    os.environ.update({f"APPTAINERENV_{name}": str(value) for name, value in handed.items()})
    named = [config.data.path, config.predict.file, config.model.name]
    named += [row.options.get(key) for row in config.rows.values() for key in registry.literals(row.strategy)["FILES"]]
    files = [Path(name) for name in named if name]
    binds = {str(file.resolve().parent) for file in files if file.exists() and not _inside(file)}
    if not _inside(PROJECT):  # another workflow uses Lockstep as a module
        binds.add(str(PROJECT))
    for folder in binds:
        if set(folder) & set(",:"):
            raise BadInput(f"{folder}: Apptainer can't bind a folder with a comma or colon in its path. Rename it.")
    gpus = ["--nv"] if any(row.hardware.device == "cuda" for row in config.rows.values()) else []
    return shlex.join(["--cleanenv", *gpus, *(f"--bind={folder}:{folder}:ro" for folder in sorted(binds))])


def _inside(file: Path) -> bool:
    return file.resolve().is_relative_to(Path.cwd())


def kind() -> str | None:
    """The kind of container this process runs in: apptainer, docker, or None."""
    if "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ:
        return "apptainer"
    return "docker" if Path("/.dockerenv").exists() else None


def outside(name: str) -> str:
    """A sentence for a message that `name` does not exist, if a container may not see it; otherwise empty."""
    if kind() != "docker" or not name.startswith(("/", "~", "..")):
        return ""
    return " A container sees only the project's folder: put it there, and use its path there."


def offline() -> str:
    """A sentence for a message that a download failed, if this container has no network; otherwise empty."""
    routes = Path("/proc/net/route")  # a heading, and a line for each route
    if kind() != "docker" or not routes.is_file() or len(routes.read_text().splitlines()) > 1:
        return ""
    return " This container has no network; fetch it first: docker compose run --rm fetch, with the same arguments."


def current() -> tuple[str | None, str | None]:
    """The image that this process runs in, and its digest, from environment variables; None outside a container."""
    named = os.environ.get("LOCKSTEP_IMAGE")  # set in the image itself, such as lockstep/torch:cpu
    if kind() != "apptainer":
        return named, os.environ.get("LOCKSTEP_DIGEST") or None
    images = {name: tuple(image) for name, image in json.loads(os.environ.get(KNOWN, "{}")).items()}
    sif = os.environ.get("APPTAINER_CONTAINER") or os.environ["SINGULARITY_CONTAINER"]
    own = images.get((named or "").split("/")[-1].split(":")[0])
    return next((image for image in images.values() if image[0] == sif), own or (sif, None))
