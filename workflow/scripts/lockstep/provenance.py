"""Facts from other programs: the project's commit from git, and properties of installed packages."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

from lockstep.paths import PROJECT

COMMIT = "LOCKSTEP_COMMIT"  # environment variable with the result of `commit` as JSON, for images without git


def output(*command: str) -> str | None:
    """The output of a command, run in the project's folder; None if there is no such program, or it fails."""
    try:
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> dict[str, str | bool | None]:
    """The project's commit, and whether files differ from it; None if git can't tell."""
    if COMMIT in os.environ:
        return json.loads(os.environ[COMMIT])
    head, status = output("git", "rev-parse", "HEAD"), output("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if status is None else bool(status)}


@cache
def origin() -> str:
    """The URL of the project's git remote; empty if git can't tell."""
    return output("git", "config", "--get", "remote.origin.url") or ""


@cache
def horovod_has(library: str) -> bool:
    """Whether Horovod was built with "mpi", or with "nccl"."""
    return _says_true(f"import horovod.torch; print(bool(horovod.torch.{library}_built()))")


def has_compiler(device: str) -> bool:
    """Whether torch.compile's compiler is installed: C++ for a CPU's kernels, C for the launchers of a GPU's."""
    variable, *names = ("CC", "cc", "gcc", "clang") if device == "cuda" else ("CXX", "g++", "clang++")
    return any(shutil.which(name) for name in (os.environ.get(variable), *names) if name)


def _says_true(program: str) -> bool:
    """Run a program in a new process, since its imports take seconds, and return whether it prints True."""
    return output(sys.executable, "-c", program) == "True"
