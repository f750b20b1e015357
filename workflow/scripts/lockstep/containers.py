"""The container images in which rules run with --use-singularity: which, whether they are sound, and what they get.

Imports nothing heavy: the Snakefile asks before anything is trained.
"""

import os
import shlex
import shutil
from pathlib import Path

import yaml

from lockstep import strategies
from lockstep.config import Config
from lockstep.errors import BadInput
from lockstep.files import hash_file
from lockstep.hardware import VARIABLES

# Each family of strategies has an image; `torch` is the one for all that need no other.
FAMILIES = ("torch", "deepspeed", "horovod")
SIF = Path("docker/sif")
SUMS = SIF / "SHA256SUMS"  # as `make sif` writes it
DIGESTS = Path("docker/digests.yaml")  # of Docker's images, as `make images` writes it
REFERENCES = "LOCKSTEP_REFERENCES"  # environment variable: family=reference of each image that a registry has
# What is handed into a container, besides what changes speed or numbers; all else of the host's environment stays out.
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def family(strategy: str) -> str:
    return next((name for name in strategies.literals(strategy)["NEEDS"] if name in FAMILIES), "torch")


def images(config: Config) -> dict[str, str]:
    """Each family's image: the configuration's, or the local .sif file for what this machine trains on."""
    devices = {row.hardware.device for row in config.rows.values()}
    variant = "cuda" if "cuda" in devices else "cpu"
    return {
        name: str(SIF / f"{name}-{variant}.sif") if config.containers[name] == "auto" else config.containers[name]
        for name in FAMILIES
    }


def check(config: Config) -> None:
    """Raises BadInput where Apptainer or an image is missing, or an image is not the one that was built."""
    if not (shutil.which("apptainer") or shutil.which("singularity")):
        raise BadInput("--use-singularity: Apptainer is not installed here. Install it, or run without containers.")
    needed = {"torch"} | {family(row.strategy) for row in config.rows.values()}
    for name, image in images(config).items():
        if name not in needed:
            continue
        if "://" in image:
            if "@sha256:" not in image:
                raise BadInput(f"containers.{name}: {image} names no digest, so it may change; write …@sha256:….")
            continue
        if not Path(image).is_file():
            raise BadInput(
                f"containers.{name}: {image} does not exist. Build it with make sif, or run without containers."
            )
        wanted = _sums().get(Path(image).name) if Path(image).parent == SIF else None
        if wanted and hash_file(Path(image)) != wanted:
            raise BadInput(
                f"containers.{name}: {image} is not the image that {SUMS} names: its sha256 differs."
                " Build it again: make sif."
            )


def _sums() -> dict[str, str]:
    if not SUMS.is_file():
        return {}
    return {name: digest for digest, name in (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())}


def arguments(config: Config) -> str:
    """Apptainer's arguments: nothing of the host but the working directory, the user's own files, and GPUs.

    Of the host's environment only what changes speed or numbers and proxies go in; caches stay in there too.
    """
    cache = Path.cwd() / ".snakemake" / "cache"
    handed = {name: os.environ[name] for name in (*VARIABLES, *PROXIES) if name in os.environ}
    handed |= {REFERENCES: " ".join(f"{name}={image}" for name, image in images(config).items() if "@" in image)}
    handed |= {"XDG_CACHE_HOME": cache, "HF_HOME": cache / "huggingface", "TORCH_HOME": cache / "torch"}
    os.environ.update({f"APPTAINERENV_{name}": str(value) for name, value in handed.items()})
    files = [Path(name) for name in (config.data.path, config.predict.file, config.model.name) if name]
    binds = {str(file.resolve().parent) for file in files if file.exists() and not _inside(file)}
    gpus = ["--nv"] if any(row.hardware.device == "cuda" for row in config.rows.values()) else []
    return shlex.join(["--cleanenv", *gpus, *(f"--bind={folder}:{folder}:ro" for folder in sorted(binds))])


def _inside(file: Path) -> bool:
    return file.resolve().is_relative_to(Path.cwd())


def current() -> tuple[str | None, str | None]:
    """The image that this process runs in and its digest, as far as they are known; None outside one.

    A local image's digest stands in the files beside the project; a registry's is part of its name.
    """
    named = os.environ.get("LOCKSTEP_IMAGE")  # the image itself says so, like lockstep/torch:cpu
    sif = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER")
    if not sif:
        built = yaml.safe_load(DIGESTS.read_text(encoding="utf-8")) if named and DIGESTS.is_file() else {}
        return named, built.get(named)
    references = dict(word.split("=", 1) for word in os.environ.get(REFERENCES, "").split())
    if named and (reference := references.get(named.split("/")[-1].split(":")[0])):
        return reference, reference.rpartition("@")[2]
    return sif, _sums().get(Path(sif).name)
