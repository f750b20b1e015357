"""What other programs say: git of the project, and any that tells its version."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

from lockstep.paths import PROJECT

COMMIT = "LOCKSTEP_COMMIT"  # environment variable: what `commit` returns, as JSON; for images, which have no git


def output(*command: str) -> str | None:
    """What a command prints, run at the top of the project; None where there is no such program, or it fails."""
    try:
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> dict[str, str | bool | None]:
    """The git commit of the project, and whether the files differ from it; None where git can't tell."""
    if COMMIT in os.environ:
        return json.loads(os.environ[COMMIT])
    head, status = output("git", "rev-parse", "HEAD"), output("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if status is None else bool(status)}


@cache
def origin() -> str:
    """Where git fetched the project from; empty where it can't tell."""
    return output("git", "config", "--get", "remote.origin.url") or ""


@cache
def horovod_has(library: str) -> bool:
    """Whether Horovod was built with "mpi", or with "nccl"."""
    return _says_true(f"import horovod.torch; print(bool(horovod.torch.{library}_built()))")


def has_compiler(device: str) -> bool:
    """Whether there is what torch.compile calls: for a CPU's programs C++, for what launches those of a GPU C."""
    variable, *names = ("CC", "cc", "gcc", "clang") if device == "cuda" else ("CXX", "g++", "clang++")
    return any(shutil.which(name) for name in (os.environ.get(variable), *names) if name)


def _says_true(program: str) -> bool:
    """In a process of its own: what it imports takes seconds, and is not for the Snakefile."""
    return output(sys.executable, "-c", program) == "True"
