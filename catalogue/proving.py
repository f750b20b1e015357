"""Have `lockstep accept` prove rows, for a table of verdicts."""

import subprocess
import sys
from pathlib import Path

from benchmarks.common import PROJECT, SCRIPTS
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_object
from lockstep.paths import ACCEPT


def prove(folder: Path, name: str, minutes: float, configs: list[Path]) -> Path:
    """Prove the rows that files ask for; returns the accept.json.

    Ends the program if `lockstep accept` refuses. Raises RunFailed if it wrote nothing.
    """
    program = [sys.executable, str(SCRIPTS / "accept.py"), "--results", str(folder), "--no-times"]
    print(f"{name}:", flush=True)
    words = [f"--minutes={minutes:g}", *(f"--config={config}" for config in configs)]
    before = _written(folder / ACCEPT)
    finished = subprocess.run([*program, *words], cwd=PROJECT, check=False)
    if finished.returncode not in (0, 1):  # 1: a verdict is wrong, which the table says; or it broke off
        sys.exit(finished.returncode)
    if _written(folder / ACCEPT) == before:
        raise RunFailed(f"{name}: lockstep accept broke off before it proved anything; what it says is above")
    return folder / ACCEPT


def _written(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.is_file() else None


def found_in(file: Path) -> dict:
    """The content of an accept.json. Raises BadInput if it is damaged, broke off, or has no proofs."""
    found = read_object(file, ("time", "task", "machine", "proofs", "cannot", "finished", "not_reached"))
    if not found["finished"]:
        raise BadInput(f"{file}: lockstep accept broke off, so it is not complete. Start it again.")
    if not found["proofs"]:
        raise BadInput(f"{file}: nothing was proven. Give more --minutes.")
    return found


def not_reached(found: dict) -> list[str]:
    """The proofs that there was no time for, as `proof of ddp`."""
    return [what for what in found["not_reached"] if what.startswith("proof")]
