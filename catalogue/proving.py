"""Have `lockstep accept` prove rows, for a table of verdicts."""

import subprocess
import sys
from pathlib import Path

from benchmarks.common import PROJECT, SCRIPTS
from lockstep.paths import ACCEPT


def prove(folder: Path, name: str, minutes: float, configs: list[Path]) -> Path:
    """Prove the rows that files ask for; returns the accept.json. Ends the program if `lockstep accept` refuses."""
    program = [sys.executable, str(SCRIPTS / "accept.py"), "--results", str(folder), "--no-times"]
    print(f"{name}:", flush=True)
    words = [f"--minutes={minutes:g}", *(f"--config={config}" for config in configs)]
    finished = subprocess.run([*program, *words], cwd=PROJECT, check=False)
    if finished.returncode not in (0, 1):  # 1: a verdict is wrong, which the table says
        sys.exit(finished.returncode)
    return folder / ACCEPT
