"""What other programs say: git of the project, and any that tells its version."""

import json
import os
import subprocess
from pathlib import Path

COMMIT = "LOCKSTEP_COMMIT"  # environment variable: what `commit` returns, as JSON; for images, which have no git
PROJECT = Path(__file__).parents[3]


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
